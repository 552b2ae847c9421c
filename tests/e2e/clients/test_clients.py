"""Clients in Go and TypeScript sample the same tokens as Python, and report errors."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from examples.clients.answer import answer, answer_in_python
from examples.clients.question import Question, questions
from tests.e2e.clients.conftest import TlsFront
from tests.e2e.stack import API_KEY, Stack

TIMEOUT_S = 300.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def asked(stack: Stack) -> list[Question]:
    return questions(stack.model)


async def test_it_samples_what_python_samples(client: list[str], stack: Stack, asked: list[Question]) -> None:
    address = stack.address("gateway")
    for question in asked:
        # The first sample fills vLLM's caches, so that both compared samples are computed the same way.
        await answer_in_python(address, API_KEY, question, TIMEOUT_S)
        wanted = await answer_in_python(address, API_KEY, question, TIMEOUT_S)
        got = await asyncio.to_thread(answer, client, address, API_KEY, question, TIMEOUT_S)
        assert got.tokens
        assert got.difference(wanted) == ""


async def test_it_speaks_tls(client: list[str], stack: Stack, asked: list[Question], tls_front: TlsFront) -> None:
    trusting = [*client, "--ca", str(tls_front.certificate)]
    got = await asyncio.to_thread(answer, trusting, tls_front.address, API_KEY, asked[0], TIMEOUT_S)
    assert got.difference(await answer_in_python(stack.address("gateway"), API_KEY, asked[0], TIMEOUT_S)) == ""
    misled = [*client, "--ca", str(tls_front.other_certificate)]
    with pytest.raises(subprocess.CalledProcessError) as failure:
        await asyncio.to_thread(answer, misled, tls_front.address, API_KEY, asked[0], TIMEOUT_S)
    assert failure.value.returncode == 1
    assert "certificate" in failure.value.stderr


@pytest.mark.parametrize(
    ("options", "image", "said"),
    [
        (["--model", "nobody"], "square.png", ["NOT_FOUND", "'nobody' is not served", "field: base_model"]),
        (["--api-key", "tml-wrong"], "square.png", ["UNAUTHENTICATED", "this API key is unknown"]),
        ([], "broken.png", ["INVALID_ARGUMENT", "no supported format", "field: chunks[1]"]),
        (["--timeout", "0.001"], "square.png", ["DEADLINE_EXCEEDED"]),
    ],
)
def test_it_says_what_is_wrong(
    client: list[str],
    stack: Stack,
    asked: list[Question],
    tmp_path: Path,
    options: list[str],
    image: str,
    said: list[str],
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    picture = tmp_path / image if image == "broken.png" else asked[0].image
    sides = [" ".join(map(str, side)) for side in (asked[0].before, asked[0].after)]
    address = ["--address", stack.address("gateway"), "--api-key", API_KEY]
    done = subprocess.run(
        [*client, *address, *options, str(picture), *sides], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    # Go writes the code as NotFound, the others as NOT_FOUND.
    spoken = done.stderr.replace("_", "").lower()
    for words in said:
        assert words.replace("_", "").lower() in spoken, done.stderr


def test_it_wants_its_arguments(client: list[str]) -> None:
    done = subprocess.run(client, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "TOKENS_BEFORE" in done.stderr
