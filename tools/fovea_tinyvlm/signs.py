"""An invented alphabet: random signs with names, and deformed pictures of them that look like scans.

No sign is a digit. A sign has at least three strokes that share no end, thus six loose ends; a digit has at most four.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fovea_tinyvlm.strokes import Floats, bezier, rasterize

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
SIGN_NAMES: tuple[str, ...] = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)
SIGN_COUNT = 16
OPEN_STROKES = 3
SCAN_SIDE = 8
SCAN_LEVELS = 16
_CANVAS_SIDE = 16
_CANDIDATES = 300


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Signs as curves.

    Attributes:
        control_points: float32 [signs, OPEN_STROKES, 3, 2] in 0..1.
    """

    control_points: Floats

    def __len__(self) -> int:
        return len(self.control_points)


def invent_alphabet(rng: np.random.Generator, sign_count: int = SIGN_COUNT) -> Alphabet:
    """Draws many candidates of three curved strokes with ends on a 4x4 lattice; keeps `sign_count` dissimilar ones."""
    lattice = np.stack(np.meshgrid(np.linspace(0.1, 0.9, 4), np.linspace(0.1, 0.9, 4)), axis=-1).reshape(-1, 2)
    candidates = np.empty((_CANDIDATES, OPEN_STROKES, 3, 2), dtype=np.float32)
    for candidate in candidates:
        lengths = np.zeros(OPEN_STROKES)
        while lengths.min() < 0.4:
            ends = lattice[rng.permutation(len(lattice))[: 2 * OPEN_STROKES]].reshape(OPEN_STROKES, 2, 2)
            lengths = np.linalg.norm(ends[:, 0] - ends[:, 1], axis=-1)
        bend = rng.normal(0.0, 0.2, (OPEN_STROKES, 2)) * (rng.random((OPEN_STROKES, 1)) < 0.5)
        candidate[:, 0], candidate[:, 2] = ends[:, 0], ends[:, 1]
        candidate[:, 1] = ends.mean(axis=1) + bend
    # With a wide pen, almost equal signs count as similar.
    drawn = rasterize(bezier(candidates), np.full(_CANDIDATES, 0.25, dtype=np.float32), SCAN_SIDE)
    drawn = drawn.reshape(_CANDIDATES, -1)
    chosen = [0]
    nearest = np.full(_CANDIDATES, np.inf)
    while len(chosen) < sign_count:
        nearest = np.minimum(nearest, ((drawn - drawn[chosen[-1]]) ** 2).sum(axis=1))
        chosen.append(int(nearest.argmax()))
    return Alphabet(candidates[chosen])


def scan(alphabet: Alphabet, indices: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Draws signs as a shaky hand would write them, and scans them at 8x8 in 17 grey levels, light ink on dark.

    Args:
        alphabet: The alphabet.
        indices: int64 [B], the sign of every picture.
        rng: Source of the deformation: turn, shear, stretch, shift, wobble and pen width.

    Returns:
        uint8 [B, 8, 8].
    """
    count = len(indices)
    control_points = alphabet.control_points[indices] - 0.5
    control_points = control_points + rng.normal(0.0, 0.03, control_points.shape).astype(np.float32)
    turn, shear = rng.normal(0.0, 0.12, count), rng.normal(0.0, 0.15, count)
    stretch = rng.uniform(0.75, 1.05, (count, 2)) * np.array([0.9, 1.0])
    cos, sin = np.cos(turn), np.sin(turn)
    # Rows of the matrix that turns, shears and stretches: x' = m00 x + m01 y, y' = m10 x + m11 y.
    matrix = np.stack([np.stack([cos, shear - sin], -1), np.stack([sin, cos], -1)], axis=1) * stretch[:, :, None]
    moved = np.einsum("bij,bskj->bski", matrix, control_points)
    moved = moved + 0.5 + rng.normal(0.0, 0.03, (count, 1, 1, 2))
    width = rng.uniform(0.06, 0.13, count).astype(np.float32)
    ink = rasterize(bezier(moved.astype(np.float32)), width, _CANVAS_SIDE)
    cell = _CANVAS_SIDE // SCAN_SIDE
    mean = ink.reshape(count, SCAN_SIDE, cell, SCAN_SIDE, cell).mean(axis=(2, 4))
    levels = np.round(mean * SCAN_LEVELS)
    pixels: npt.NDArray[np.uint8] = np.round(levels * (255 / SCAN_LEVELS)).astype(np.uint8)
    return pixels
