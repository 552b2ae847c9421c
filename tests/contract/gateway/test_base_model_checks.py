"""Conformance checks of several base models and of SDK 0.39, on a correct gateway with fake services and on faulty
ones.
"""

import asyncio
import json
import pathlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import Response
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fovea_conformance.__main__ import load
from fovea_conformance.check import Status
from fovea_conformance.proxy import Exchange, Proxy
from fovea_conformance.runner import Verdict, run_check
from fovea_conformance.target import Options
from tests.contract.gateway.conftest import KEY, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.test_base_models import TEACHER, School, opened
from tests.e2e.conformance.corruption import Wrong, answer, request, without
from tests.e2e.conformance.disorder import reply

CHECKS = {one.check_id: one for one in load()}
RIGHT = Wrong()
_SEARCH = "checkpoints/search"


def _only_the_first(body: dict[str, Any]) -> None:
    body["base_model"] = MODEL


def _not_on_the_page(body: dict[str, Any]) -> None:
    body["next_cursor"] = None


def _anonymous(body: dict[str, Any]) -> None:
    for row in body["checkpoints"]:
        row.pop("base_model")


def _oldest_first(body: dict[str, Any]) -> None:
    body["checkpoints"].reverse()


def _longer_pages(body: dict[str, Any]) -> None:
    body["limit"] = 3


def _without_teacher(one: Exchange) -> Response | None:
    """A server that lists a model which cannot be sampled."""
    asked = one.route == "create_sampling_session" and one.json().get("base_model") == TEACHER
    return Response('{"detail": "Not Found"}', 404, media_type="application/json") if asked else None


def _nowhere(body: dict[str, Any]) -> None:
    body["urls"] = {}


WRONG: dict[str, dict[str, Wrong]] = {
    "C120": {
        "one model by all names": request("create_sampling_session", _only_the_first),
        "a listed model is not there": Wrong(before=_without_teacher),
    },
    "C121": {
        "trains another one instead": request("create_model", _only_the_first),
        "refuses without a name": reply("create_model", 400, {"detail": "no"}),
        "a listed model is not there": Wrong(before=_without_teacher),
    },
    "C122": {
        "no search": reply(_SEARCH, 404, {"detail": "no such route"}),
        "ignores metadata": without(_SEARCH, "user_metadata"),
        "ignores the kind": without(_SEARCH, "checkpoint_type"),
        "ignores base models": without(_SEARCH, "base_models"),
        "ignores the cursor": without(_SEARCH, "cursor"),
        "longer pages": request(_SEARCH, _longer_pages),
        "one page alone": answer(_SEARCH, _not_on_the_page),
        "oldest first": answer(_SEARCH, _oldest_first),
        "no base model": answer(_SEARCH, _anonymous),
    },
    "C123": {
        "not found": reply("external_weights_upload_start", 404, {"detail": "Not Found"}),
        "the second breaks": reply("external_weights_upload_finish", 500, {"detail": "oh"}),
        "nowhere to send": answer("external_weights_upload_start", _nowhere),
        "takes what was not sent": reply(
            "external_weights_upload_finish", 200, {"tinker_path": "tinker://a/external_weights/b"}
        ),
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A byte tokenizer with ids in the vocabulary of the fake services."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
async def school(tmp_path: pathlib.Path) -> AsyncIterator[School]:
    async with opened(tmp_path) as one:
        for score, sampler in enumerate((one.stand.sampler, one.teacher, one.other), start=1):
            sampler.score = -float(score)
        yield one


async def judged(url: str, check_id: str, wrong: Wrong, checkpoint: pathlib.Path) -> Verdict:
    """Returns the verdict of a check on a server behind a proxy. It runs in a thread: it blocks, and the gateway runs
    in this loop.
    """

    def judge() -> Verdict:
        with Proxy(url, before=wrong.before, after=wrong.after) as proxy:
            return run_check(CHECKS[check_id], Options(proxy.url, KEY, MODEL, checkpoint=str(checkpoint)))

    return await asyncio.to_thread(judge)


async def test_the_gateway_does_what_they_ask(school: School, checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Runs the program without a model name; it judges one check after the other."""
    out = tmp_path / "verdicts.json"
    options = ["--base-url", school.stand.url, "--api-key", KEY, "--checkpoint", checkpoint, "--only", "I"]
    program = await asyncio.create_subprocess_exec(sys.executable, "-m", "fovea_conformance", *options, "--json", out)
    assert await asyncio.wait_for(program.wait(), 240) == 0
    verdicts = {row["id"]: row for row in json.loads(out.read_text())}
    assert {name: (row["status"], row["detail"]) for name, row in verdicts.items()} == {
        "C120": ("passed", "3 models, each of its own weights"),
        "C121": ("passed", f"['{TEACHER}'] refused with their names, and sampled"),
        "C122": ("passed", "4 of one run, on pages of two"),
        "C123": ("passed", "an adapter of one module, the same when downloaded"),
    }


async def test_they_say_what_one_base_model_lacks(tmp_path: pathlib.Path, checkpoint: pathlib.Path) -> None:
    async with running(School(tmp_path).stand) as stand:
        for check_id, words in (("C120", "a second base model"), ("C121", "for sampling only")):
            verdict = await judged(stand.url, check_id, RIGHT, checkpoint)
            assert verdict.status is Status.NOT_APPLICABLE
            assert words in verdict.detail


async def test_they_fail_on_wrong_servers(school: School, checkpoint: pathlib.Path) -> None:
    for check_id, servers in WRONG.items():
        for name, wrong in servers.items():
            verdict = await judged(school.stand.url, check_id, wrong, checkpoint)
            assert verdict.status is Status.FAILED, f"{check_id}, {name}: {verdict.detail}"
