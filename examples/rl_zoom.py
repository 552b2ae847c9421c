"""Reinforcement learning with a tool that enlarges part of a picture, with the default settings of `fovea_rollout`.

A disc is in one of four places, with a seal on it that is smaller than a pixel of the first picture. `zoom` shows the
middle of a place enlarged. In the right place, the seal's colour fills a good part of that view. Nothing was tuned for
this puzzle: rates, sizes and numbers of steps are the library's defaults.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from examples.experiment import Experiment, read_arguments
from fovea_rollout import Answer, Chunk, LoopSettings, Message, Picture, RolloutSettings, SamplingSettings, Step, run

SIDE = 64
"""Pixels of the side of every picture."""
PLACES = {"left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75)}
"""Middles of the places, as shares of width and height."""
COLOURS = {"red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
PAPER, DISC = (250, 250, 250), (10, 10, 10)
DISC_RADIUS = 0.2
SEAL_HALF = 0.4 / SIDE
"""Half the side of the seal: less than half a pixel from the middle of a place, where four pixels meet."""
ZOOM = 32
"""Factor by which a zoomed view is narrower than the whole picture."""
MAX_TURNS = 3
QUESTION = "What colour is the seal? Call zoom to see it."
EMPTY = "There is no such place."
BAR = 0.7
"""Mean reward that the model should reach. Guessing gives 0.25. Zooming at random, and guessing if that shows nothing,
gives 0.44 with one zoom and 0.63 with two."""


@dataclass(frozen=True)
class Puzzle:
    """The place of the disc and the colour of its seal: names from `PLACES` and `COLOURS`."""

    place: str
    colour: str

    def draw(self, zoomed: str | None = None) -> Picture:
        """Draws the whole picture, or the view of a zoomed place."""
        middle, width = (PLACES[zoomed], 1 / ZOOM) if zoomed else ((0.5, 0.5), 1.0)
        across, down = (centre + ((np.arange(SIDE) + 0.5) / SIDE - 0.5) * width for centre in middle)
        x, y = PLACES[self.place]
        right, below = (across - x)[None, :], (down - y)[:, None]
        pixels = np.full((SIDE, SIDE, 3), PAPER, np.uint8)
        pixels[np.hypot(right, below) < DISC_RADIUS] = DISC
        pixels[np.maximum(np.abs(right), np.abs(below)) < SEAL_HALF] = COLOURS[self.colour]
        return Picture.of_pixels(pixels)


def draw_puzzle(rng: np.random.Generator) -> Puzzle:
    """Draws a puzzle. All places and colours are equally likely."""
    return Puzzle(str(rng.choice(list(PLACES))), str(rng.choice(list(COLOURS))))


class ZoomEnvironment:
    """One puzzle. A call of `zoom` uses a turn and returns a picture. Any other answer is a colour and ends the game.

    The reward is 1 for the right colour. Metrics: `zooms` (their number), `is_found` (1 if one showed the seal), and
    `right_if_found` for an answer after that.
    """

    def __init__(self, puzzle: Puzzle) -> None:
        self._puzzle, self._turns, self._is_found = puzzle, 0, False

    async def reset(self) -> list[Message]:
        """Returns the whole picture and the question."""
        return [Message("user", (self._puzzle.draw(), QUESTION))]

    async def step(self, answer: Answer) -> Step:
        """Zooms, or scores the answer."""
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
        """Does nothing: the environment has no resources."""

    def _metrics(self, zooms: int) -> dict[str, float]:
        return {"zooms": float(zooms), "is_found": float(self._is_found)}


class RandomPlayer:
    """A player that zooms into a random place once, and then answers a random colour."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def answer(self, prompt: Sequence[Chunk]) -> str:
        """Returns an answer to a prompt."""
        if sum(isinstance(chunk, Picture) for chunk in prompt) > 1:
            return str(self._rng.choice(list(COLOURS)))
        return zoom_call(str(self._rng.choice(list(PLACES))))


def zoom_call(place: str) -> str:
    """Returns a call in the model's format."""
    return f"<tool_call>\n{json.dumps({'name': 'zoom', 'arguments': {'place': place}})}\n</tool_call>"


def draw_sources(rng: np.random.Generator, count: int) -> list[partial[ZoomEnvironment]]:
    """Draws puzzles; each is one source of rollouts."""
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
    run(main(read_arguments(__doc__)))
