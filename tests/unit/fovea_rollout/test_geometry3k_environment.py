"""Geometry-3K's protocol, and mathematically equal answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments import math_grading
from fovea_rollout.environments.environment import Step, read_answer
from fovea_rollout.environments.geometry3k_environment import (
    Geometry3kEnvironment,
    final_answer,
    geometry3k_environment,
)
from fovea_rollout.environments.math_grading import is_same_answer
from fovea_rollout.environments.records import environment_of, parse_record
from fovea_rollout.messages import Message, parse_message

TRUTH = "3 \\sqrt { 2 }"


def made(**columns: Any) -> Geometry3kEnvironment:
    row = {
        "prompt": [{"role": "user", "content": "Find x."}],
        "env_class": "geometry3k",
        "reward_spec": {"method": "rule", "ground_truth": TRUTH},
        "extra_info": {"split": "train", "index": 0, "problem": "Find x.", "answer": TRUTH},
    }
    environment = environment_of(parse_record(row | columns))
    assert isinstance(environment, Geometry3kEnvironment)
    assert [parse_message(message).text for message in environment.reset()] == ["Find x."]
    return environment


def call(answer: Any) -> str:
    body = json.dumps({"name": "calc_score", "arguments": {"answer": answer}})
    return f"<think>\nHm.\n</think>\n\n<tool_call>{body}</tool_call>"


def played(environment: Geometry3kEnvironment, *texts: str) -> list[Step]:
    return [environment.step(read_answer(text, is_cut=False)) for text in texts]


def said(step: Step) -> str:
    (message,) = step.messages
    return parse_message(message).text


def test_a_right_call_ends_it() -> None:
    (step,) = played(made(), call("\\sqrt{18}"))
    assert (step.reward, step.is_done, step.metrics) == (1.0, True, {"right": 1.0, "is_called": 1.0})


def test_a_wrong_call_gets_an_error_and_the_last_turn_asks_for_the_answer_only() -> None:
    first, second, last = played(made(), call(4), call("5"), "It is \\boxed{\\sqrt{18}}, I think.")
    assert "The score is 0.0" in said(first)
    assert "only the final answer" not in said(first)
    assert "only the final answer" in said(second)
    assert said(second).startswith("<tool_response>\n")
    assert [first.reward, second.reward, last.reward] == [0.0, 0.0, 1.0]
    assert [first.is_done, second.is_done, last.is_done] == [False, False, True]


def test_three_wrong_calls_end_it() -> None:
    steps = played(made(), call(1), call(2), call(3))
    assert [step.is_done for step in steps] == [False, False, True]
    assert not any(step.reward for step in steps)


def test_a_number_with_a_huge_exponent_is_left_to_the_process_that_has_a_limit() -> None:
    """Written out, it would have 30 million digits; only the limited process evaluates it."""
    assert math_grading._number("1e30000000") is None
    assert math_grading._number("1.5e3") == math_grading._number("3000/2") == 1500


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>\n\\boxed{1}\n</think>\n\n\\boxed{3\\sqrt{2}}", 1.0),
        ("Two lines.\nSo x = 3\\sqrt{2}", 1.0),
        ("3\\sqrt{2}\nor 7", 0.0),
        ("\\boxed{}", 0.0),
        ("", 0.0),
    ],
)
def test_without_a_call_the_answer_is_final(text: str, reward: float) -> None:
    (step,) = played(made(), text)
    assert (step.reward, step.is_done, step.metrics["is_called"]) == (reward, True, 0.0)


def test_the_last_call_counts() -> None:
    (step,) = played(made(), f"{call(1)} {call('3*sqrt(2)')}")
    assert step.reward == 1.0


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("<tool_call>{oops}</tool_call>", "is not JSON"),
        ('<tool_call>{"name": "look"}</tool_call>', 'call calc_score with an "answer"'),
        ('<tool_call>{"name": "calc_score", "arguments": {"value": 3}}</tool_call>', "call calc_score"),
    ],
)
def test_a_call_that_cannot_be_read_costs_its_turn(text: str, flaw: str) -> None:
    step, last = played(made(max_turns=2), text, text)
    assert flaw in said(step)
    assert (step.is_done, last.is_done, last.reward) == (False, True, 0.0)


def test_a_row_without_an_answer_is_refused() -> None:
    for spec in ({}, {"method": "rule", "ground_truth": {"x": 1}}):
        with pytest.raises(InvalidInput, match=r"reward_spec\.ground_truth"):
            made(reward_spec=spec)


def test_numbers_are_answers_and_the_tool_can_be_explained() -> None:
    record = {"prompt": (Message("user", ("Find x.",)),), "reward_spec": {"method": "rule", "ground_truth": 12}}
    environment = geometry3k_environment(record, asks=True)
    (message,) = environment.reset()
    assert "Find x.\n\nThink within" in message.text
    assert played(environment, "\\boxed{12.0}")[0].reward == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} \\boxed{\\frac{1}{2}} is it", "\\frac{1}{2}"),
        ("\\boxed{1", "\\boxed{1"),
        ("a\n\n b \n \n", "b"),
    ],
)
def test_final_answers(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("12", "12.0"),
        ("12", "12 cm^2"),
        ("12", "12\\text{ cm}^2"),
        ("12", "12 square units"),
        ("12", "$12$"),
        ("12", "x = 12"),
        ("12", "The answer is 12."),
        ("60", "60^\\circ"),
        ("60", "60 degrees"),
        ("m \\angle A = 60", "60°"),
        ("0.5", "1/2"),
        ("\\frac { 1 } { 2 }", "\\dfrac12"),
        ("3 \\sqrt { 2 }", "\\sqrt{18}"),
        ("3 \\sqrt { 2 }", "3√2"),
        ("\\sqrt { 13 }", "13^{1/2}"),
        ("2 \\pi", "2π"),
    ],
)
def test_the_same_answer_in_other_words(truth: str, answer: str) -> None:
    assert is_same_answer(truth, answer)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("12", "13"),
        ("12", "12, 13"),
        ("12", ""),
        ("3 \\sqrt { 2 }", "3 \\sqrt { 3 }"),
        ("12", "\\frac{"),
        ("12", "1" * 9999),
    ],
)
def test_another_answer(truth: str, answer: str) -> None:
    assert not is_same_answer(truth, answer)


def test_an_answer_that_never_ends_is_wrong_and_the_next_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_same_answer("\\sqrt{2}", "2^{1/2}")  # the process is running
    monkeypatch.setattr(math_grading, "TIMEOUT_S", 1.0)
    assert not is_same_answer("12", "9^{9^{9^{9^9}}}!")
    monkeypatch.undo()
    assert is_same_answer("\\sqrt{2}", "2^{1/2}")


def test_the_process_that_evaluates_answers_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a secret of this machine")
    grader = math_grading._Grader()
    try:
        assert grader.compare("\\frac{1}{2}", "0.5")
        assert grader._process is not None
        environment = Path(f"/proc/{grader._process.pid}/environ").read_bytes()
    finally:
        grader.stop()
    assert b"PATH=" in environment
    assert b"a secret" not in environment
