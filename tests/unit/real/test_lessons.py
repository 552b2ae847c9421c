"""The scores of pirate answers and of sums. No held-out task is used for training."""

import asyncio

import pytest

from fovea_data import load_chats
from fovea_real.lessons import (
    HELD_OUT_FACTS,
    HELD_OUT_SUMS,
    Sum,
    SumEnvironment,
    boxed,
    facts,
    pirate_score,
    says,
    speaks_like_a_pirate,
    sums,
)
from fovea_rollout import Answer


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_held_out_is_practised(seed: int) -> None:
    learnt, held_out = facts(seed)
    assert len(held_out) == HELD_OUT_FACTS
    assert not {fact.question for fact in learnt} & {fact.question for fact in held_out}
    practised, asked = sums(seed)
    assert (len(practised), len(asked)) == (80 - HELD_OUT_SUMS, HELD_OUT_SUMS)
    assert not set(practised) & set(asked)
    assert Sum(3, 4) not in {*practised, *asked}  # the prompt shows its result


def test_every_lesson_has_the_full_score() -> None:
    learnt, _ = facts()
    for fact, row in zip(learnt, load_chats([fact.row for fact in learnt]), strict=True):
        assert says(fact.answer, fact.word)
        assert pirate_score(fact.answer, row) == 1.0
        assert pirate_score(f"It is {fact.word}.", row) == 0.0
        assert pirate_score("Arr, that be nonsense, matey!", row) == 0.0


@pytest.mark.parametrize(
    ("answer", "is_style"),
    [(" Arr, I be Bob, matey!\n", True), ("I be Bob, matey!", False), ("Arr, I am Bob, matey!", False), ("", False)],
)
def test_the_style_is_a_rule(answer: str, is_style: bool) -> None:
    assert speaks_like_a_pirate(answer) is is_style


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("2 + 5 = \\boxed{7}", 7),
        ("\\boxed{ -7 }.", -7),
        ("7", None),
        ("\\boxed{7} or \\boxed{8}", None),
        ("\\boxed{seven}", None),
        ("\\boxed{7", None),
    ],
)
def test_a_box_has_one_number(answer: str, number: int | None) -> None:
    assert boxed(answer) == number


def test_only_the_right_result_in_a_box_is_rewarded() -> None:
    async def step(text: str) -> tuple[float, float]:
        environment = SumEnvironment(Sum(2, 5))
        assert (await environment.reset())[-1].text == "2 + 5"
        done = await environment.step(Answer(text))
        assert done.is_done
        return done.reward, done.metrics["boxed"]

    answers = ("2 + 5 = \\boxed{7}", "2 + 5 = \\boxed{8}", "2 + 5 = 7")
    assert [asyncio.run(step(answer)) for answer in answers] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
