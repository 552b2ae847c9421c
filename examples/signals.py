"""A game of three signals: the colour of each picture means a direction, which the model must find out."""

from __future__ import annotations

import numpy as np

from fovea_rollout import Picture

WAYS = {"red": "left", "green": "right", "blue": "top", "yellow": "bottom"}
"""Meanings of the colours, in words of the tiny model's vocabulary."""
QUESTION = "Where is it?"
LENGTH = 3
BAR = 0.9
"""Share of signals that the model should read correctly; chance gives 0.25."""
_INK = {"red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 60, 220), "yellow": (240, 220, 40)}
_SIDE = 64


def draw_signals(rng: np.random.Generator) -> tuple[str, ...]:
    """Draws the colours of one game."""
    return tuple(str(colour) for colour in rng.choice(list(WAYS), LENGTH))


def show(colour: str) -> Picture:
    """Draws a signal, a disc on white."""
    across, down = np.ogrid[:_SIDE, :_SIDE]
    middle = (_SIDE - 1) / 2
    pixels = np.full((_SIDE, _SIDE, 3), 250, np.uint8)
    pixels[(across - middle) ** 2 + (down - middle) ** 2 < (0.4 * _SIDE) ** 2] = _INK[colour]
    return Picture.of_pixels(pixels)


def random_way(rng: np.random.Generator) -> str:
    """Returns a random direction."""
    return str(rng.choice(list(WAYS.values())))
