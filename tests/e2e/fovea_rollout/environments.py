"""The two patterns of vision environments: one picture followed by text, or a new picture each turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fovea_rollout import Answer, Message, Picture, Step

SIZES = ((64, 64), (96, 64), (64, 128))


class Looking:
    """Shows one picture and then comments on each answer; the last answer ends it.

    Args:
        seed: Seed of the picture.
        turns: Maximum number of answers.
    """

    def __init__(self, seed: int, turns: int = 3) -> None:
        self._random = np.random.default_rng(seed)
        self._left = turns

    async def reset(self) -> Sequence[Message]:
        """Returns a picture and a question."""
        return [Message("system", ("You see.",)), Message("user", (self.frame(), "What colour is it?"))]

    async def step(self, answer: Answer) -> Step:
        """Rewards an answer by its length."""
        self._left -= 1
        return Step([self.reply(answer)], float(len(answer.text)), self._left == 0, {"cut": float(answer.is_cut)})

    async def close(self) -> None:
        """Does nothing; there are no resources."""

    def reply(self, answer: Answer) -> Message:
        """Returns a text that depends on the answer."""
        return Message("user", (f"Not in {len(answer.text)} letters. Look again!",))

    def frame(self) -> Picture:
        """Returns noise in one of three sizes."""
        width, height = SIZES[self._random.integers(len(SIZES))]
        return Picture.of_pixels(self._random.integers(0, 255, (height, width, 3), dtype=np.uint8))


class Walking(Looking):
    """Shows a new picture each turn."""

    def reply(self, answer: Answer) -> Message:
        """Returns the next picture."""
        return Message("user", ("You are here: ", self.frame(), "Where to?"))
