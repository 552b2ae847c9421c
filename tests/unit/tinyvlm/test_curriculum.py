"""The pictures: no digits among them, correct answers, patches equal to the processor's."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fovea_tinyvlm
from fovea_tinyvlm.curriculum import SIGN_QUESTION, draw_lessons
from fovea_tinyvlm.patches import StillPatchEmbedding, patchify
from fovea_tinyvlm.processor import image_processor
from fovea_tinyvlm.scenes import COLOUR_QUESTION, COLOURS, COUNT_QUESTION, dots_scene, shape_scene
from fovea_tinyvlm.signs import SIGN_NAMES, invent_alphabet, scan

MODULES = sorted(Path(fovea_tinyvlm.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_can_reach_a_font_or_a_data_set(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    roots = {name.split(".")[0] for name in imported}
    assert not roots & {"sklearn", "PIL", "matplotlib", "cv2", "datasets", "freetype"}
    assert not any(name.startswith("torchvision.datasets") for name in imported)


@pytest.mark.parametrize("seed", range(5))
def test_every_sign_has_six_loose_ends_so_none_is_a_digit(seed: int) -> None:
    alphabet = invent_alphabet(np.random.default_rng(seed))
    for sign in alphabet.control_points:
        ends = sign[:, [0, 2]].reshape(-1, 2)
        distances = np.linalg.norm(ends[:, None] - ends[None], axis=-1) + np.eye(len(ends))
        assert len(ends) == 6
        assert distances.min() > 0.2


def test_sign_names_hold_no_digit() -> None:
    assert len(set(SIGN_NAMES)) == len(SIGN_NAMES)
    assert not any(character.isdigit() for name in SIGN_NAMES for character in name)


def test_scans_have_seventeen_levels_and_ink() -> None:
    rng = np.random.default_rng(0)
    alphabet = invent_alphabet(rng)
    pictures = scan(alphabet, np.arange(len(alphabet)), rng)
    assert pictures.shape == (len(alphabet), 8, 8)
    assert set(np.unique(pictures)) <= {round(level * 255 / 16) for level in range(17)}
    assert (pictures.max(axis=(1, 2)) > 100).all()


def test_shape_is_painted_in_the_colour_of_the_answer() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scene = shape_scene(rng)
        colour = np.array(COLOURS[scene.facts[COLOUR_QUESTION]])
        assert (np.abs(scene.pixels.astype(int) - colour).max(axis=-1) < 25).mean() > 0.02


def test_dots_are_as_many_as_the_answer_says() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scene = dots_scene(rng)
        ink = (scene.pixels != scene.pixels[0, 0]).any(axis=-1)
        # No dot crosses a line between the cells of the 3x3 grid, so a cell has ink if it has a dot.
        cells = [block.any() for rows in np.array_split(ink, 3) for block in np.array_split(rows, 3, axis=1)]
        assert sum(cells) == int(scene.facts[COUNT_QUESTION])


def test_lessons_are_reproducible_and_only_counts_answer_with_digits() -> None:
    first, second = (draw_lessons(invent_alphabet(rng), 16, rng) for rng in map(np.random.default_rng, (3, 3)))
    for left, right in zip(first, second, strict=True):
        assert left.turns == right.turns
        assert np.array_equal(left.pixels, right.pixels)
    for lesson in first:
        for question, answer in lesson.turns:
            assert answer.isdigit() == (question == COUNT_QUESTION)
    assert any(question == SIGN_QUESTION for lesson in first for question, _ in lesson.turns)


def test_patches_equal_the_processors() -> None:
    rng = np.random.default_rng(0)
    pictures = [lesson.pixels for lesson in draw_lessons(invent_alphabet(rng), 6, rng)]
    rows = image_processor("qwen3_vl")([Image.fromarray(picture) for picture in pictures], return_tensors="pt")
    frames = rows["pixel_values"].unflatten(1, (3, 2, 256))
    torch.testing.assert_close(patchify(pictures), frames[:, :, 0].flatten(1))


def test_still_patch_embedding_equals_the_convolution_of_repeated_frames() -> None:
    projection = torch.nn.Conv3d(3, 8, kernel_size=(2, 16, 16), stride=(2, 16, 16))
    patches = torch.randn(5, 3, 1, 16, 16)
    expected = projection(patches.expand(-1, -1, 2, -1, -1)).flatten(1)
    torch.testing.assert_close(StillPatchEmbedding(projection)(patches.flatten(1)), expected)
