"""Generates colour pictures: one shape on a plain background, or a number of dots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 40),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
GROUNDS: tuple[str, ...] = ("black", "white")
SHAPES: tuple[str, ...] = ("square", "disc", "triangle", "cross")
PLACES: tuple[str, ...] = ("left", "right", "top", "bottom", "centre")
SIDE = 64
MOST_DOTS = 4
COLOUR_QUESTION = "What colour is it?"
GROUND_QUESTION = "What colour is the ground?"
SHAPE_QUESTION = "What shape is it?"
PLACE_QUESTION = "Where is it?"
COUNT_QUESTION = "How many dots are there?"
SCENE_QUESTIONS = (COLOUR_QUESTION, GROUND_QUESTION, SHAPE_QUESTION, PLACE_QUESTION, COUNT_QUESTION)
_PLACE_CENTRES = {
    "left": (0.25, 0.5),
    "right": (0.75, 0.5),
    "top": (0.5, 0.25),
    "bottom": (0.5, 0.75),
    "centre": (0.5, 0.5),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture with facts about it.

    Attributes:
        pixels: uint8 [64, 64, 3].
        facts: Maps questions to answers.
    """

    pixels: npt.NDArray[np.uint8]
    facts: dict[str, str]


def shape_scene(rng: np.random.Generator) -> Scene:
    """Draws a shape of one colour on a background of another, in one of five positions."""
    colour, ground = _colours(rng)
    shape, place = str(rng.choice(SHAPES)), str(rng.choice(PLACES))
    fills = rng.random() < 0.25
    centre = np.array(_PLACE_CENTRES[place]) + rng.uniform(-0.04, 0.04, 2)
    x, y = _offsets(centre)
    radius = rng.uniform(0.17, 0.24)
    if fills:
        mask = np.ones((SIDE, SIDE), dtype=np.bool_)
    elif shape == "square":
        mask = np.maximum(abs(x), abs(y)) < radius
    elif shape == "disc":
        mask = np.hypot(x, y) < radius
    elif shape == "triangle":
        mask = (y < radius) & (abs(x) < (y + radius) / 2)
    else:
        mask = (np.minimum(abs(x), abs(y)) < radius / 3) & (np.maximum(abs(x), abs(y)) < radius)
    facts = {COLOUR_QUESTION: colour}
    if not fills:
        facts |= {SHAPE_QUESTION: shape, PLACE_QUESTION: place, GROUND_QUESTION: ground}
    return Scene(_paint(mask, colour, ground, rng), facts)


def dots_scene(rng: np.random.Generator) -> Scene:
    """Draws one to four separate dots of one colour. The answer to the question for their number is a digit."""
    colour, ground = _colours(rng)
    count = int(rng.integers(1, MOST_DOTS + 1))
    cells = rng.permutation(9)[:count]
    mask = np.zeros((SIDE, SIDE), dtype=np.bool_)
    for cell in cells:
        # At most one dot per cell of a 3x3 grid, so that dots never touch.
        centre = (np.array([cell % 3, cell // 3]) + 0.5) / 3 + rng.uniform(-0.05, 0.05, 2)
        x, y = _offsets(centre)
        mask |= np.hypot(x, y) < rng.uniform(0.09, 0.12)
    return Scene(_paint(mask, colour, ground, rng), {COUNT_QUESTION: str(count)})


def _colours(rng: np.random.Generator) -> tuple[str, str]:
    ground = str(rng.choice(GROUNDS))
    return str(rng.choice([colour for colour in COLOURS if colour != ground])), ground


def _offsets(centre: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    axis = (np.arange(SIDE) + 0.5) / SIDE
    return (axis - centre[0])[None, :], (axis - centre[1])[:, None]


def _paint(mask: npt.NDArray[np.bool_], colour: str, ground: str, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    noise = rng.normal(0.0, 4.0, (2, 3))
    ink, paper = np.array(COLOURS[colour]) + noise[0], np.array(COLOURS[ground]) + noise[1]
    return np.clip(np.where(mask[..., None], ink, paper), 0, 255).astype(np.uint8)
