"""Bars on squared paper, and the tool that checks their measurement."""

import numpy as np
import pytest

from examples.rl_geometry import (
    LATER_LOSES,
    TRIES,
    UNIT,
    WIDEST,
    GeometryEnvironment,
    count_and_guess,
    draw_problem,
    measure,
    tool_call,
)
from fovea_rollout.environments.environment import Step, read_answer
from fovea_rollout.messages import Picture, parse_message

PROBLEMS = [draw_problem(np.random.default_rng(seed)) for seed in range(300)]


async def say(environment: GeometryEnvironment, text: str) -> Step:
    return await environment.step(read_answer(text, is_cut=False))


def test_every_width_is_drawn_and_the_picture_shows_it() -> None:
    assert {problem.width for problem in PROBLEMS} == set(range(1, WIDEST + 1))
    for problem in PROBLEMS:
        inked = (problem.draw() == problem.ink).all(axis=-1)
        rows, columns = inked.any(axis=1).sum(), inked.any(axis=0).sum()
        assert (rows, columns) == (6 * UNIT - 1, problem.width * UNIT - 1)
        assert measure(problem.draw()) == problem.width


def test_the_player_counts_rightly_and_answers_anything() -> None:
    rng, picture = np.random.default_rng(0), Picture.of_pixels(PROBLEMS[0].draw())
    said = {count_and_guess(rng, [picture]) for _ in range(100)}
    counted = " ".join(str(square + 1) for square in range(PROBLEMS[0].width))
    assert said == {f"{counted}\n{tool_call(width)}" for width in range(1, WIDEST + 1)}


async def test_feedback_leads_to_the_answer_and_later_tries_earn_less() -> None:
    problem = next(problem for problem in PROBLEMS if problem.width == 4)
    environment = GeometryEnvironment(problem)
    (message,) = await environment.reset()
    assert len(message.pictures) == 1
    for answer, feedback in ((3, "too low"), (6, "too high")):
        step = await say(environment, tool_call(answer))
        assert (step.reward, step.is_done) == (0.0, False)
        assert parse_message(step.messages[0]).text == f"<tool_response>\n{feedback}\n</tool_response>"
    step = await say(environment, tool_call(4))
    assert (step.reward, step.is_done) == (1.0 - 2 * LATER_LOSES, True)
    assert step.metrics == {"right": 1.0, "at_once": 0.0}


async def test_right_at_once_earns_all() -> None:
    step = await say(GeometryEnvironment(PROBLEMS[0]), tool_call(PROBLEMS[0].width))
    assert (step.reward, step.is_done) == (1.0, True)
    assert step.metrics == {"right": 1.0, "at_once": 1.0}


@pytest.mark.parametrize(
    ("text", "feedback"),
    [
        ("4", "Call calc_score with a number."),
        ('<tool_call>{"name": "other", "arguments": {"answer": 4}}</tool_call>', "Call calc_score with a number."),
        (
            '<tool_call>{"name": "calc_score", "arguments": {"answer": "4"}}</tool_call>',
            "Call calc_score with a number.",
        ),
        ("<tool_call>{</tool_call>", "is not JSON"),
        (tool_call(4)[:-12], "has no </tool_call>"),
    ],
)
async def test_what_is_no_call_is_explained(text: str, feedback: str) -> None:
    step = await say(GeometryEnvironment(next(problem for problem in PROBLEMS if problem.width == 4)), text)
    assert (step.reward, step.is_done) == (0.0, False)
    assert feedback in parse_message(step.messages[0]).text


async def test_the_last_try_ends_it() -> None:
    environment = GeometryEnvironment(PROBLEMS[0])
    assert [(await say(environment, "")).is_done for _ in range(TRIES)] == [False] * (TRIES - 1) + [True]
