"""Converts pictures into the vision tower's patches as the processor does, but with each frame only once.

Shapes: B pictures, N = 256 patches a picture, C = 3 channels, patch_size = 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

PATCH_SIZE = 16
MERGE_SIZE = 2
SIDE = 256
PATCHES_PER_PICTURE = (SIDE // PATCH_SIZE) ** 2
TOKENS_PER_PICTURE = PATCHES_PER_PICTURE // MERGE_SIZE**2


def patchify(pictures: Sequence[npt.NDArray[np.uint8]]) -> Tensor:
    """Square RGB pictures (uint8 [side, side, 3], any side up to 256) -> float32 [B * N, C * 16 * 16] in -1..1.

    Resized to 256x256 and ordered merge block by merge block, equal to the processor's rows but for its repeated frame.
    """
    resized = torch.empty(len(pictures), 3, SIDE, SIDE, dtype=torch.uint8)
    by_side: dict[int, list[int]] = {}
    for index, picture in enumerate(pictures):
        by_side.setdefault(len(picture), []).append(index)
    for indices in by_side.values():
        batch = torch.from_numpy(np.stack([pictures[index] for index in indices])).permute(0, 3, 1, 2)
        resized[indices] = transforms.resize(
            batch, [SIDE, SIDE], interpolation=InterpolationMode.BICUBIC, antialias=True
        )
    blocks = SIDE // PATCH_SIZE // MERGE_SIZE
    grid = resized.reshape(-1, 3, blocks, MERGE_SIZE, PATCH_SIZE, blocks, MERGE_SIZE, PATCH_SIZE)
    rows = grid.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * PATCH_SIZE**2)
    return rows.float().div_(127.5).sub_(1.0)


class StillPatchEmbedding(nn.Module):
    """A Conv3d patch embedding for still pictures, in which both frames are equal: it first adds the frames' weights.

    The result is exact and needs half the work. The class shares its parameters with the wrapped convolution.
    """

    def __init__(self, projection: nn.Conv3d) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, patches: Tensor) -> Tensor:
        """float32 [rows, C * 16 * 16] -> float32 [rows, hidden]."""
        weight = self.projection.weight.sum(dim=2).flatten(1)
        return nn.functional.linear(patches, weight, self.projection.bias)
