"""The requests and the output of `fovea evaluate`, with a scripted model."""

import json
import math
import pathlib
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from PIL import Image

from fovea.wire.errors import InvalidInput, NotFound
from fovea_data.answer_counts import AnswerCounts
from fovea_data.conversation import Asking
from fovea_data.evaluate import Report, measure, read_sources
from fovea_rollout import Answer, Message, RolloutSettings, SamplingSettings, Step
from fovea_rollout.stopping import error_words
from tests.unit.fovea_rollout.scripted import LetterTemplate, ScriptedPolicy

SETTINGS = RolloutSettings(SamplingSettings(max_tokens=8), max_context=100)


class Echo:
    """Rewards the number of times that the answer contains the truth."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def reset(self) -> tuple[Message, ...]:
        return tuple(self._record["prompt"])

    def step(self, answer: Answer) -> Step:
        reward = answer.text.count(self._record["reward_spec"]["ground_truth"])
        return Step((), float(reward), True, {"length": float(len(answer.text))})

    def close(self) -> None: ...


def chats(path: pathlib.Path, *rows: Any) -> pathlib.Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


async def seen(path: pathlib.Path, script: Any, **options: Any) -> Report:
    kind, sources = read_sources(path, **options)
    return await measure(ScriptedPolicy(script), LetterTemplate(), kind, sources, SETTINGS)


async def test_chats_have_an_accuracy_and_its_standard_error(tmp_path: pathlib.Path) -> None:
    path = chats(tmp_path / "c.jsonl", *({"prompt": f"{n}?", "completion": "ab"[n % 4 == 0]} for n in range(8)))
    report = await seen(path, lambda _: " a|")
    assert (report.kind, report.mean, report.rows, report.failed) == ("accuracy", 0.75, 8, 0)
    assert report.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 7))
    assert report.answers == AnswerCounts(("a", "b"), ((6, 0, 0), (2, 0, 0)))
    assert str(report) == "accuracy 0.7500 ± 0.1637, 8 rows\n  a: 6 of 6 right\n  b: 0 of 2 right, 2 as a"
    assert json.loads(json.dumps(asdict(report)))["answers"] == {"labels": ["a", "b"], "counts": [[6, 0, 0], [2, 0, 0]]}


async def test_a_row_that_failed_is_in_no_count_of_answers(tmp_path: pathlib.Path) -> None:
    rows = [{"prompt": "?" * (99 if n == 1 else 1), "completion": "ab"[n % 2]} for n in range(6)]
    report = await seen(chats(tmp_path / "c.jsonl", *rows), lambda _: "c|")
    assert (report.rows, report.failed) == (5, 1)
    assert report.answers == AnswerCounts(("a", "b"), ((0, 0, 3), (0, 0, 2)))


async def test_a_folders_classes_are_its_answers(tmp_path: pathlib.Path) -> None:
    for name in ("red", "dark_blue"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / name / "1.png")
    read: list[str] = []
    report = await seen(tmp_path, lambda text: read.append(text) or "dark blue|", asking=Asking("Which?"))  # type: ignore[func-returns-value]
    assert report.mean == 0.5
    assert read[0] == "u:#Which?|a:"


async def test_records_have_a_reward_and_their_environments_metrics(tmp_path: pathlib.Path) -> None:
    record = {"env_class": f"{__name__}:Echo", "reward_spec": {"method": "rule", "ground_truth": "a"}}
    rows = [{"prompt": [{"role": "user", "content": str(n)}], **record} for n in range(3)]
    report = await seen(chats(tmp_path / "r.jsonl", *rows), lambda read: "aa|" if "1" in read else "b|")
    assert (report.kind, report.mean) == ("reward", pytest.approx(2 / 3))
    assert report.standard_error == pytest.approx(np.std([0, 2, 0], ddof=1) / math.sqrt(3))
    assert report.metrics == {"length": pytest.approx(4 / 3)}
    assert report.answers is None


async def test_broken_and_too_long_rows_are_counted_named_and_left_out(tmp_path: pathlib.Path) -> None:
    path = chats(
        tmp_path / "c.jsonl", {"prompt": "1?", "completion": "a"}, "{", {"prompt": "?" * 99, "completion": "a"}
    )
    report = await seen(path, lambda _: "a|")
    assert (report.mean, report.standard_error, report.rows, report.failed) == (1.0, None, 1, 2)
    assert f"{path}:2: the line is not JSON" in report.first_failure
    assert "2 rows left out" in str(report)


async def test_no_row_that_counts_has_no_mean(tmp_path: pathlib.Path) -> None:
    report = await seen(chats(tmp_path / "c.jsonl", {"prompt": "?" * 99, "completion": "a"}), lambda _: "a|")
    assert report.mean is None
    assert "does not fit" in str(report)


def test_a_limit_spreads_over_the_data(tmp_path: pathlib.Path) -> None:
    path = chats(tmp_path / "c.jsonl", *({"prompt": f"{n}", "completion": "a"} for n in range(9)))
    _, sources = read_sources(path, limit=3)
    environments: list[Any] = [source() for source in sources]  # type: ignore[operator]
    assert [one.reset()[0].text for one in environments] == ["0", "4", "8"]


def test_other_files_and_missing_ones_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotFound):
        read_sources(tmp_path / "chats.csv")
    (tmp_path / "labels.csv").write_text("image,label\n")
    with pytest.raises(InvalidInput, match=r"labels.csv is a file: give a folder.* load_chats .* `convert`.* \.csv"):
        read_sources(tmp_path / "labels.csv")
    with pytest.raises(NotFound):
        read_sources(tmp_path / "chats.jsonl")
    with pytest.raises(InvalidInput, match=":1: the line is not JSON"):
        read_sources(chats(tmp_path / "broken.jsonl", "{"))


@pytest.mark.parametrize(
    ("body", "words"), [({"detail": "it is not served", "reason": "NOT_FOUND"}, "it is not served"), ("busy", "404")]
)
def test_a_refused_request_is_told_in_the_servers_sentence(body: object, words: str) -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "http://127.0.0.1"))
    assert error_words(tinker.NotFoundError("404", response=response, body=body)) == words
    assert error_words(InvalidInput("rows is empty")) == "rows is empty"
