"""The training data of the tiny model: batches of pictures with questions and answers, and lines of prose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fovea_tinyvlm.scenes import COLOURS, MOST_DOTS, PLACES, SCENE_QUESTIONS, SHAPES, Scene, dots_scene, shape_scene
from fovea_tinyvlm.signs import SIGN_NAMES, Alphabet, scan

SIGN_QUESTION = "Which sign is this?"
QUESTIONS_PER_PICTURE = 2
_SIGN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Lesson:
    """A picture with questions and answers.

    Attributes:
        pixels: uint8 [side, side, 3], 8x8 scans or 64x64 scenes.
        turns: (question, answer), in the order asked.
    """

    pixels: npt.NDArray[np.uint8]
    turns: tuple[tuple[str, str], ...]


def draw_lessons(alphabet: Alphabet, count: int, rng: np.random.Generator) -> list[Lesson]:
    """Returns `count` lessons: half of them with signs, the others with scenes."""
    sign_count = round(_SIGN_SHARE * count)
    indices = rng.integers(0, len(alphabet), sign_count)
    scans = scan(alphabet, indices, rng)
    lessons = [
        Lesson(np.repeat(pixels[..., None], 3, axis=-1), ((SIGN_QUESTION, SIGN_NAMES[index]),))
        for pixels, index in zip(scans, indices, strict=True)
    ]
    scenes = [shape_scene(rng) if index % 2 else dots_scene(rng) for index in range(count - sign_count)]
    return lessons + [_scene_lesson(scene, rng) for scene in scenes]


def _scene_lesson(scene: Scene, rng: np.random.Generator) -> Lesson:
    turns = list(scene.facts.items())
    order = rng.permutation(len(turns))[:QUESTIONS_PER_PICTURE]
    return Lesson(scene.pixels, tuple(turns[index] for index in order))


def lesson_texts() -> list[str]:
    """Returns every question and every answer once, for the tokenizer's corpus."""
    questions = [SIGN_QUESTION, *SCENE_QUESTIONS]
    answers = [*SIGN_NAMES, *COLOURS, *SHAPES, *PLACES, *(str(count) for count in range(MOST_DOTS + 1))]
    return [*questions, *answers]
