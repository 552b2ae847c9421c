"""Rasterizes strokes, which are curved lines with a pen width.

Shapes: B pictures, S strokes per picture, P points per stroke, side pixels per side. Coordinates are x to the right and
y down, 0..1 over the canvas.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

POINTS_PER_STROKE = 9


def bezier(control_points: Floats) -> Floats:
    """Quadratic Bezier curves, `control_points` float32 [..., 3, 2] -> points float32 [..., P, 2]."""
    t = np.linspace(0.0, 1.0, POINTS_PER_STROKE, dtype=np.float32)
    weights = np.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2], axis=1)
    points: Floats = np.einsum("pk,...kd->...pd", weights, control_points).astype(np.float32)
    return points


def rasterize(points: Floats, width: Floats, side: int) -> Floats:
    """Draws strokes. Ink is 1 within half a pen width of a stroke and falls to 0 over one pixel.

    Args:
        points: float32 [B, S, P, 2].
        width: float32 [B], the pen width.
        side: Pixels a side.

    Returns:
        float32 [B, side, side] in 0..1.
    """
    centres = (np.arange(side, dtype=np.float32) + 0.5) / side
    pixels = np.stack(np.meshgrid(centres, centres, indexing="xy"), axis=-1).reshape(1, 1, -1, 2)
    start = points[:, :, :-1].reshape(len(points), -1, 1, 2)
    along = points[:, :, 1:].reshape(len(points), -1, 1, 2) - start
    length_squared = np.maximum((along**2).sum(-1), 1e-9)
    offset = pixels - start
    position = np.clip((offset * along).sum(-1) / length_squared, 0.0, 1.0)
    distance = np.sqrt(((offset - position[..., None] * along) ** 2).sum(-1))
    nearest = distance.min(axis=1)
    ink: Floats = np.clip((width[:, None] / 2 - nearest) * side + 0.5, 0.0, 1.0).astype(np.float32)
    return ink.reshape(-1, side, side)
