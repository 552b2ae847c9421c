"""Draws pictures with questions and answers: shapes in places, dots, numbers and words, bar charts, small grids.

A drawing depends only on its seed, split and index. All lengths are in units of a 256th of the picture's side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Split = Literal["train", "held-out"]
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 35),
    "green": (35, 150, 55),
    "blue": (45, 75, 220),
    "yellow": (240, 215, 40),
    "orange": (245, 135, 25),
    "purple": (130, 45, 160),
    "pink": (250, 140, 190),
    "black": (15, 15, 15),
    "white": (252, 252, 252),
}
GROUNDS = {"white": (240, 240, 240), "grey": (185, 185, 190), "black": (45, 45, 50)}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
PLACES = (
    *("at the top left", "at the top", "at the top right", "on the left", "in the centre", "on the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
"""The names of a 3x3 grid's cells, row by row."""
WORDS = (
    "apple baby bird boat book bread bus cake car cat chair clock cloud cow cup dog door duck egg farm fire fish "
    "flag frog game goat gold hat home horse house ice jam king lamp leaf lion milk moon mouse nose ocean pen pig "
    "queen rain river road rose salt sea shop sky snow song star sun tea tree window wolf zebra"
).split()
MOST_SHAPES, MOST_DOTS, MOST_WALLS = 4, 9, 6
CAPTION_QUESTIONS = ("Describe the picture.", "What do you see?", "Describe this image in a sentence.")
_WEIGHTS = {"shapes": 0.56, "dots": 0.1, "writing": 0.12, "chart": 0.11, "grid": 0.11}
TASKS = tuple(_WEIGHTS)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a drawing, and the right answer. A caption is the answer of the kind `caption`."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Thing:
    """A drawn thing: its box (left, top, right, bottom) in 256ths of the side, its word and its colour's."""

    box: tuple[float, float, float, float]
    word: str
    colour: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture, uint8 [side, side, 3], with questions about it, the caption first, and the things in it."""

    task: str
    pixels: npt.NDArray[np.uint8]
    questions: tuple[Question, ...]
    things: tuple[Thing, ...]


class _Canvas:
    """A picture under construction."""

    def __init__(self, rng: np.random.Generator, side: int) -> None:
        self.rng = rng
        self.scale = side / 256
        self.ground = str(rng.choice(list(GROUNDS)))
        self.image = Image.new("RGB", (side, side), self._ink(GROUNDS[self.ground], 8))
        self.draw = ImageDraw.Draw(self.image)
        self.things: list[Thing] = []

    def colours(self, count: int) -> list[str]:
        """Draws different colours that are visible on the ground."""
        seen = [colour for colour in COLOURS if colour != self.ground and (colour, self.ground) != ("white", "grey")]
        return [str(colour) for colour in self.rng.permutation(seen)[:count]]

    def shape(self, word: str, colour: str, x: float, y: float, radius: float) -> None:
        """Draws a shape around a centre."""
        ink = self._ink(COLOURS[colour], 10)
        box = (x - radius, y - radius, x + radius, y + radius)
        if word == "ring":
            self.draw.ellipse(self._scaled(box), outline=ink, width=max(2, round(0.36 * radius * self.scale)))
        elif word in ("circle", "dot"):
            self.draw.ellipse(self._scaled(box), fill=ink)
        elif word == "square":
            self.draw.rectangle(
                self._scaled((x - 0.9 * radius, y - 0.9 * radius, x + 0.9 * radius, y + 0.9 * radius)), ink
            )
        elif word == "cross":
            for wide, high in ((radius, 0.33 * radius), (0.33 * radius, radius)):
                self.draw.rectangle(self._scaled((x - wide, y - high, x + wide, y + high)), ink)
        else:
            points, inner = (5, 0.42) if word == "star" else (3, 0.5)
            turned = [
                (
                    x + size * radius * math.sin(math.pi * at / points),
                    y - size * radius * math.cos(math.pi * at / points),
                )
                for at, size in enumerate([1.0, inner] * points)
            ]
            self.draw.polygon([(px * self.scale, py * self.scale) for px, py in turned], fill=ink)
        self.things.append(Thing(box, word, colour))

    def rectangle(self, box: tuple[float, float, float, float], colour: str, word: str) -> None:
        """Draws a filled rectangle."""
        self.draw.rectangle(self._scaled(box), self._ink(COLOURS[colour], 10))
        self.things.append(Thing(box, word, colour))

    def line(self, *corners: float, tone: int = 128, width: int = 1) -> None:
        """Draws a grey line."""
        self.draw.line(self._scaled(corners), fill=(tone, tone, tone), width=width)

    def write(self, text: str, colour: str, x: float, y: float, size: float) -> None:
        """Writes from the left, with the middle of the line at `y`."""
        font, ink = _font(max(6, round(size * self.scale))), self._ink(COLOURS[colour], 10)
        self.draw.text((x * self.scale, y * self.scale), text, fill=ink, font=font, anchor="lm")
        for character in text:
            wide = font.getlength(character) / self.scale
            self.things.append(Thing((x, y - size / 2, x + wide, y + size / 2), character, colour))
            x += wide

    def _scaled(self, corners: Sequence[float]) -> list[float]:
        return [corner * self.scale for corner in corners]

    def _ink(self, colour: tuple[int, int, int], spread: int) -> tuple[int, ...]:
        noise = self.rng.integers(-spread, spread + 1, 3)
        return tuple(min(max(level + int(by), 0), 255) for level, by in zip(colour, noise, strict=True))


@lru_cache(maxsize=64)
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _shapes(canvas: _Canvas, most: int) -> list[Question]:
    rng = canvas.rng
    places = sorted(int(place) for place in rng.permutation(9)[: rng.integers(1, most + 1)])
    colours = canvas.colours(len(places)) if rng.random() < 0.6 else [canvas.colours(1)[0] for _ in places]
    seen = [(colour, str(rng.choice(SHAPES)), PLACES[place]) for colour, place in zip(colours, places, strict=True)]
    for (colour, shape, _), cell in zip(seen, places, strict=True):
        x, y = (256 * (part + 0.5) / 3 + rng.uniform(-10, 10) for part in (cell % 3, cell // 3))
        canvas.shape(shape, colour, x, y, rng.uniform(20, 34))
    begin = "There is 1 shape" if len(seen) == 1 else f"There are {len(seen)} shapes"
    caption = f"{begin}: {_listed([f'{_article(colour)} {shape} {place}' for colour, shape, place in seen])}."
    made = [_caption(rng, caption), Question("count", "How many shapes are there?", str(len(seen)))]
    for colour, shape, place in seen:
        made.append(Question("colour", f"What colour is the shape {place}?", colour))
        made.append(Question("shape", f"What shape is {place}?", shape))
        if sum(other[1] == shape for other in seen) == 1:
            made.append(Question("colour", f"What colour is the {shape}?", colour))
        if sum(other[0] == colour for other in seen) == 1:
            made.append(Question("shape", f"What shape is {colour}?", shape))
        if sum(other[:2] == (colour, shape) for other in seen) == 1:
            made.append(Question("place", f"Where is the {colour} {shape}?", place))
    shape = seen[rng.integers(len(seen))][1] if rng.random() < 0.7 else str(rng.choice(SHAPES))
    plural = "crosses" if shape == "cross" else f"{shape}s"
    made.append(Question("count", f"How many {plural} are there?", str(sum(one[1] == shape for one in seen))))
    colour, shape, _ = seen[rng.integers(len(seen))]
    if rng.random() < 0.5:  # the thing asked for differs from one that is there in colour or in shape
        colour, shape = (
            (str(rng.choice(list(COLOURS))), shape) if rng.random() < 0.5 else (colour, str(rng.choice(SHAPES)))
        )
    there = any(one[:2] == (colour, shape) for one in seen)
    made.append(Question("yes or no", f"Is there {_article(colour)} {shape}?", "yes" if there else "no"))
    return made


def _dots(canvas: _Canvas, most: int) -> list[Question]:
    rng, count, (colour,) = canvas.rng, int(canvas.rng.integers(1, MOST_DOTS + 1)), canvas.colours(1)
    for cell in rng.permutation(16)[:count]:
        x, y = (256 * (part + 0.5) / 4 + rng.uniform(-10, 10) for part in (cell % 4, cell // 4))
        canvas.shape("dot", colour, x, y, rng.uniform(13, 19))
    dots = f"There is 1 {colour} dot" if count == 1 else f"There are {count} {colour} dots"
    return [
        _caption(rng, f"{dots}."),
        Question("count", "How many dots are there?", str(count)),
        Question("colour", "What colour are the dots?", colour),
    ]


def _writing(canvas: _Canvas, most: int) -> list[Question]:
    rng, (colour,) = canvas.rng, canvas.colours(1)
    kind = "word" if rng.random() < 0.4 else "number"
    text = str(rng.choice(WORDS)) if kind == "word" else str(rng.integers(10 ** int(rng.integers(1, 5))))
    size = rng.uniform(44, 72)
    wide = _font(max(6, round(size * canvas.scale))).getlength(text) / canvas.scale
    size *= min(1.0, 230 / wide)
    wide = _font(max(6, round(size * canvas.scale))).getlength(text) / canvas.scale
    canvas.write(text, colour, rng.uniform(8, max(9.0, 248 - wide)), rng.uniform(50, 206), size)
    return [
        _caption(rng, f"The {kind} {text} is written in {colour}."),
        Question(kind, f"What {kind} is written?", text),
        Question("colour", f"What colour is the {kind}?", colour),
        Question("yes or no", "Is it a number?", "yes" if kind == "number" else "no"),
    ]


def _chart(canvas: _Canvas, most: int) -> list[Question]:
    rng = canvas.rng
    colours = canvas.colours(int(rng.integers(2, 5)))
    values = [int(value) for value in rng.permutation(9)[: len(colours)] + 1]
    for level in range(10):
        canvas.line(30, 236 - 22 * level, 250, 236 - 22 * level, width=2 if level == 0 else 1)
        if level % 3 == 0:
            canvas.write(str(level), "white" if canvas.ground == "black" else "black", 10, 236 - 22 * level, 20)
    step, wide = 220 / len(colours), rng.uniform(30, 44)
    for at, (colour, value) in enumerate(zip(colours, values, strict=True)):
        x = 30 + step * (at + 0.5)
        canvas.rectangle((x - wide / 2, 236 - 22 * value, x + wide / 2, 236), colour, "bar")
    told = _listed([f"{colour} {value}" for colour, value in zip(colours, values, strict=True)])
    at = int(rng.integers(len(colours)))
    return [
        _caption(rng, f"A chart with {len(colours)} bars: {told}."),
        Question("value", f"How tall is the {colours[at]} bar?", str(values[at])),
        Question("bar", "Which bar is the tallest?", colours[values.index(max(values))]),
        Question("bar", "Which bar is the shortest?", colours[values.index(min(values))]),
        Question("count", "How many bars are there?", str(len(colours))),
    ]


def _grid(canvas: _Canvas, most: int) -> list[Question]:
    rng, size = canvas.rng, int(canvas.rng.integers(3, 6))
    step = 240 / size
    cells = [divmod(int(cell), size) for cell in rng.permutation(size * size)]
    walls = int(rng.integers(0, min(MOST_WALLS, size * size - 2) + 1))
    (me, goal), blocks = cells[:2], cells[2 : 2 + walls]
    ink = "white" if canvas.ground == "black" else "black"
    for at in range(size + 1):
        canvas.line(8 + step * at, 8, 8 + step * at, 248)
        canvas.line(8, 8 + step * at, 248, 8 + step * at)
    for row, column in blocks:
        x, y = 8 + step * column, 8 + step * row
        canvas.rectangle((x + 2, y + 2, x + step - 2, y + step - 2), ink, "wall")
    for word, colour, (row, column) in (("circle", "red", me), ("star", "green", goal)):
        canvas.shape(word, colour, 8 + step * (column + 0.5), 8 + step * (row + 0.5), 0.38 * step)
    ways = [*_way(goal[1] - me[1], "left", "right"), *_way(goal[0] - me[0], "up", "down")]
    told = [f"row {row + 1}, column {column + 1}" for row, column in (me, goal)]
    return [
        _caption(rng, f"A {size} by {size} grid: the player is in {told[0]}, the goal is in {told[1]}."),
        Question("place", "Where is the goal?", told[1]),
        Question("place", "Where is the player?", told[0]),
        Question("way", "Which way is the goal from the player?", " and ".join(ways)),
        Question("count", "How many walls are there?", str(walls)),
    ]


def _way(by: int, less: str, more: str) -> list[str]:
    return [] if by == 0 else [more if by > 0 else less]


def _caption(rng: np.random.Generator, text: str) -> Question:
    return Question("caption", str(rng.choice(CAPTION_QUESTIONS)), text)


_DRAWERS: dict[str, Callable[[_Canvas, int], list[Question]]] = {
    "shapes": _shapes,
    "dots": _dots,
    "writing": _writing,
    "chart": _chart,
    "grid": _grid,
}


def drawing(
    seed: int, split: Split, index: int, side: int = 256, tasks: Sequence[str] = TASKS, most: int = MOST_SHAPES
) -> Drawing:
    """Draws one picture.

    Args:
        seed: Seed of all pictures.
        split: No picture of one split is drawn from the numbers of the other.
        index: Number of the picture.
        side: Pixels a side.
        tasks: The tasks to choose from.
        most: The most shapes of a picture of the task `shapes`.
    """
    rng = np.random.default_rng([seed, 0 if split == "train" else 1, index])
    weights = np.array([_WEIGHTS[task] for task in tasks])
    task = str(rng.choice(list(tasks), p=weights / weights.sum()))
    canvas = _Canvas(rng, side)
    questions = _DRAWERS[task](canvas, most)
    return Drawing(task, np.asarray(canvas.image), tuple(questions), tuple(canvas.things))


_SHAPE = re.compile(rf"\ban? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) ({'|'.join(sorted(PLACES, key=len)[::-1])})")
_COUNT = re.compile(r"\b(?:There (?:is|are)|with|A) (\d)\b")
_DOTS = re.compile(rf"\b({'|'.join(COLOURS)}) dots?\b")
_WRITTEN = re.compile(rf"\bThe (?:number|word) (\w+) is written in ({'|'.join(COLOURS)})")
_BAR = re.compile(rf"\b({'|'.join(COLOURS)}) (\d)\b")
_CELL = re.compile(r"\bthe (player|goal) is in row (\d), column (\d)")


def facts(caption: str) -> dict[tuple[str, str], str]:
    """Returns what a caption states: keys are a kind (count, colour, shape, place, text, value) and its subject."""
    found: dict[tuple[str, str], str] = {}
    if count := _COUNT.search(caption):
        found["count", ""] = count[1]
    if dots := _DOTS.search(caption):
        found["colour", "dots"] = dots[1]
    if written := _WRITTEN.search(caption):
        found["text", ""], found["colour", "text"] = written.groups()
    for colour, shape, place in _SHAPE.findall(caption):
        found |= {("colour", place): colour, ("shape", place): shape, ("place", place): "taken"}
    found |= {("value", colour): value for colour, value in _BAR.findall(caption)}
    return found | {("place", word): f"{row} {column}" for word, row, column in _CELL.findall(caption)}


def marks(question: Question, answer: str) -> dict[str, list[bool]]:
    """Marks an answer by rule: for a caption each fact, right, missing or too many; otherwise the whole answer.

    Returns:
        Marks by `caption: KIND OF FACT` and `whole caption`, or by the kind of the question.
    """
    if question.kind != "caption":
        return {question.kind: [answer.strip().rstrip(".").lower() == question.answer.lower()]}
    wanted, told = facts(question.answer), facts(answer)
    found: dict[str, list[bool]] = {"whole caption": [wanted == told]}
    for key in sorted({*wanted, *told}):
        found.setdefault(f"caption: {key[0]}", []).append(wanted.get(key) == told.get(key))
    return found


def summary(marked: Sequence[dict[str, list[bool]]]) -> dict[str, float]:
    """Returns the share of right marks of each kind, of all facts of captions (`captions`), and of short answers."""
    kinds: dict[str, list[bool]] = {}
    for one in marked:
        for kind, found in one.items():
            kinds.setdefault(kind, []).extend(found)
            group = "captions" if kind.startswith("caption: ") else "short answers"
            if kind != "whole caption":
                kinds.setdefault(group, []).extend(found)
    return {kind: round(sum(found) / len(found), 4) for kind, found in sorted(kinds.items())}
