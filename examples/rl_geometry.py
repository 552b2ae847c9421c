"""Reinforcement learning with one picture and several tries: a model learns to measure, with feedback to each try.

The warm-up clones a player that counts the squares in writing, and then answers a random number.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from examples.experiment import Experiment, read_arguments
from fovea_rollout import Answer, Chunk, LoopSettings, Message, Picture, RolloutSettings, SamplingSettings, Step, run

SIDE, UNIT, WIDEST = 64, 8, 7
TRIES = 3
LATER_LOSES = 0.25
BAR = 0.7
"""Mean reward that the model should reach. A blind model can halve the remaining widths with each try: it is right with
the first try for 1 width of 7, with the second for 2, and with the third for 4, which is a reward of
(1 + 2 * 0.75 + 4 * 0.5) / 7 = 0.64 at best. A model that sees the bar gets 1."""
QUESTION = "How many squares wide is the bar? Count, then call calc_score."
PAPER, LINE = 10, 60
INKS = ((220, 30, 30), (30, 170, 50), (40, 60, 220), (240, 220, 40))

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Problem:
    """A bar on squared paper.

    Attributes:
        width: Width of the bar in squares. All bars are six squares high, because the tiny model sees badly.
        column: Column of the first square.
        ink: Colour in red, green and blue, 0 to 255.
    """

    width: int
    column: int
    ink: tuple[int, int, int]

    def draw(self) -> Pixels:
        """Returns the picture, uint8 [64, 64, 3]."""
        pixels = np.full((SIDE, SIDE, 3), PAPER, np.uint8)
        pixels[::UNIT] = pixels[:, ::UNIT] = LINE
        left = self.column * UNIT
        pixels[UNIT + 1 : -UNIT, left + 1 : left + self.width * UNIT] = self.ink
        return pixels


def draw_problem(rng: np.random.Generator) -> Problem:
    """Draws a problem. All widths are equally likely, and so are all positions of a width."""
    width = int(rng.integers(1, WIDEST + 1))
    column = int(rng.integers(SIDE // UNIT - width + 1))
    return Problem(width, column, INKS[rng.integers(len(INKS))])


class GeometryEnvironment:
    """Shows a problem. The tool `calc_score` says whether an answer is too low or too high, and the model tries again.

    The reward of a right answer is 1 minus a quarter for each try before it.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._tries = 0

    async def reset(self) -> list[Message]:
        """Returns the picture and the question."""
        return [Message("user", (Picture.of_pixels(self._problem.draw()), QUESTION))]

    async def step(self, answer: Answer) -> Step:
        """Runs the tool that the model called."""
        self._tries += 1
        difference = self._difference(answer)
        if difference == 0:
            reward = 1.0 - LATER_LOSES * (self._tries - 1)
            return Step((), reward, True, {"right": 1.0, "at_once": float(self._tries == 1)})
        if difference is None:
            feedback = answer.malformed or "Call calc_score with a number."
        else:
            feedback = "too low" if difference < 0 else "too high"
        # Qwen's templates write the role `tool` like this; the tiny model's template does not have that role.
        message = Message("user", (f"<tool_response>\n{feedback}\n</tool_response>",), has_markup=True)
        return Step([message], 0.0, self._tries == TRIES, {"right": 0.0, "at_once": 0.0})

    async def close(self) -> None:
        """Does nothing: the environment has no resources."""

    def _difference(self, answer: Answer) -> int | None:
        """Returns the answer minus the width; None if there is no readable answer."""
        for call in answer.tool_calls:
            value = call.arguments.get("answer")
            if call.name == "calc_score" and isinstance(value, int):
                return value - self._problem.width
        return None


def tool_call(answer: int) -> str:
    """Returns a call in the model's format."""
    call = json.dumps({"name": "calc_score", "arguments": {"answer": answer}})
    return f"<tool_call>\n{call}\n</tool_call>"


def measure(pixels: Pixels) -> int:
    """Returns the width of the bar in a picture of `Problem.draw`, in squares."""
    centres = pixels[SIDE // 2 + UNIT // 2, UNIT // 2 :: UNIT]
    return int((centres.max(axis=1) > LINE).sum())


def count_and_guess(rng: np.random.Generator, prompt: Sequence[Chunk]) -> str:
    """Returns an answer of the cloned player: it counts correctly, and then answers a random number."""
    picture = next(chunk for chunk in prompt if isinstance(chunk, Picture))
    counted = " ".join(str(square) for square in range(1, measure(picture.pixels) + 1))
    return f"{counted}\n{tool_call(int(rng.integers(1, WIDEST + 1)))}"


def draw_sources(rng: np.random.Generator, count: int) -> list[partial[GeometryEnvironment]]:
    """Draws problems; each is one source of rollouts."""
    return [partial(GeometryEnvironment, draw_problem(rng)) for _ in range(count)]


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    rng = np.random.default_rng(arguments.seed)
    held_out, train = draw_sources(rng, arguments.held_out), draw_sources(rng, 1000)
    rollout = RolloutSettings(SamplingSettings(max_tokens=64, seed=arguments.seed), max_turns=TRIES)
    experiment = await Experiment.begin("rl_geometry", arguments, rollout)
    settings = LoopSettings(
        arguments.steps,
        arguments.groups,
        discount=0.0,  # each try is judged by itself
        rollout=rollout,
        seed=arguments.seed,
    )
    await experiment.run(train, held_out, partial(count_and_guess, rng), settings, BAR)


if __name__ == "__main__":
    run(main(read_arguments(__doc__, steps=60, warm_up=400)))
