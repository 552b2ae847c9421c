"""Reinforcement learning with a tool that shows more of a picture, by the defaults of `fovea_rollout` alone.

A disc lies in one of four places, with a seal on it that is smaller than a pixel of the first picture. `zoom` shows the
middle of a place much enlarged: in the right one, the seal's colour fills a good part of it. Nothing was tuned for this
puzzle: rates, sizes and numbers of steps are the library's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from examples.experiment import Experiment, read_arguments
from fovea_rollout import Answer, Chunk, LoopSettings, Message, Picture, RolloutSettings, SamplingSettings, Step

SIDE = 64
"""Pixels of every picture."""
PLACES = {"left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75)}
"""Their middles, as shares of width and height."""
COLOURS = {"red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
PAPER, DISC = (250, 250, 250), (10, 10, 10)
DISC_RADIUS = 0.2
SEAL_HALF = 0.4 / SIDE
"""Half of its side: less than half a pixel from the middle of a place, where four pixels meet."""
ZOOM = 32
"""How much narrower than the whole a zoomed view is."""
MAX_TURNS = 3
QUESTION = "What colour is the seal? Call zoom to see it."
EMPTY = "There is no such place."
BAR = 0.7
"""By guessing alone 0.25; who zooms without looking first, and guesses where that showed nothing, is right with 0.44
after one zoom and with 0.63 after two."""


@dataclass(frozen=True)
class Puzzle:
    """Where the disc is, and the colour of its seal: names from `PLACES` and `COLOURS`."""

    place: str
    colour: str

    def draw(self, zoomed: str | None = None) -> Picture:
        """The whole, or what `zoom` shows of a place."""
        middle, width = (PLACES[zoomed], 1 / ZOOM) if zoomed else ((0.5, 0.5), 1.0)
        across, down = (centre + ((np.arange(SIDE) + 0.5) / SIDE - 0.5) * width for centre in middle)
        x, y = PLACES[self.place]
        right, below = (across - x)[None, :], (down - y)[:, None]
        pixels = np.full((SIDE, SIDE, 3), PAPER, np.uint8)
        pixels[np.hypot(right, below) < DISC_RADIUS] = DISC
        pixels[np.maximum(np.abs(right), np.abs(below)) < SEAL_HALF] = COLOURS[self.colour]
        return Picture.of_pixels(pixels)


def draw_puzzle(rng: np.random.Generator) -> Puzzle:
    """Every place and every colour is as likely."""
    return Puzzle(str(rng.choice(list(PLACES))), str(rng.choice(list(COLOURS))))


class ZoomEnvironment:
    """One puzzle. A call of `zoom` costs a turn and brings a picture; any other answer is the colour, and ends it.

    The reward is 1 for the right colour. Metrics: how many `zooms` there were, whether one showed the seal, `is_found`,
    and of an answer after that `right_if_found`.
    """

    def __init__(self, puzzle: Puzzle) -> None:
        self._puzzle, self._turns, self._is_found = puzzle, 0, False

    async def reset(self) -> list[Message]:
        """The whole picture and the question."""
        return [Message("user", (self._puzzle.draw(), QUESTION))]

    async def step(self, answer: Answer) -> Step:
        """Zooms, or takes the answer."""
        self._turns += 1
        if not answer.tool_calls and not answer.malformed:
            reward = float(answer.text.strip() == self._puzzle.colour)
            found = {"right_if_found": reward} if self._is_found else {}
            return Step((), reward, True, self._metrics(self._turns - 1) | found)
        place = answer.tool_calls[-1].arguments.get("place") if answer.tool_calls else None
        shown: str | Picture = self._puzzle.draw(place) if place in PLACES else answer.malformed or EMPTY
        message = Message("user", ("<tool_response>\n", shown, "\n</tool_response>"), has_markup=True)
        self._is_found |= place == self._puzzle.place
        return Step([message], 0.0, self._turns == MAX_TURNS, self._metrics(self._turns))

    async def close(self) -> None:
        """Holds nothing."""

    def _metrics(self, zooms: int) -> dict[str, float]:
        return {"zooms": float(zooms), "is_found": float(self._is_found)}


class RandomPlayer:
    """Zooms once, answers then, and knows nothing."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def answer(self, prompt: Sequence[Chunk]) -> str:
        """What it writes."""
        if sum(isinstance(chunk, Picture) for chunk in prompt) > 1:
            return str(self._rng.choice(list(COLOURS)))
        return zoom_call(str(self._rng.choice(list(PLACES))))


def zoom_call(place: str) -> str:
    """What the model has to write."""
    return f"<tool_call>\n{json.dumps({'name': 'zoom', 'arguments': {'place': place}})}\n</tool_call>"


def draw_sources(rng: np.random.Generator, count: int) -> list[partial[ZoomEnvironment]]:
    """Puzzles; each is one source of rollouts."""
    return [partial(ZoomEnvironment, draw_puzzle(rng)) for _ in range(count)]


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    rng = np.random.default_rng(arguments.seed)
    held_out, train = draw_sources(rng, arguments.held_out), draw_sources(rng, 1000)
    rollout = RolloutSettings(SamplingSettings(seed=arguments.seed))
    experiment = await Experiment.begin("rl_zoom", arguments, rollout)
    settings = LoopSettings(arguments.steps, arguments.groups, rollout=rollout, seed=arguments.seed)
    await experiment.run(train, held_out, RandomPlayer(rng).answer, settings, BAR)


if __name__ == "__main__":
    asyncio.run(main(read_arguments(__doc__)))
