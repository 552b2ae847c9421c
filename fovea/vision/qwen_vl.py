"""Qwen2.5-VL and Qwen3-VL (dense): smart resizing, one placeholder per merged patch, and MRoPE.

They differ in numbers of the checkpoint only (patch 14 and 16). Qwen2.5-VL's time scaling (`tokens_per_second`) is for
videos, an image has one moment; Qwen3-VL's interleaved MRoPE concerns the model, not the position ids.

Formulas are those of transformers 5.19: `smart_resize` in models/qwen2_vl/image_processing_qwen2_vl.py, and
`get_rope_index` with `get_vision_position_ids` in models/qwen3_vl/modeling_qwen3_vl.py and
models/qwen2_5_vl/modeling_qwen2_5_vl.py (for images, without videos, the two are the same).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fovea.vision.vision_family import Grid, GridSpan, TensorShapes, TokenCounter, TokenIds, VisionFamily, require

_GREY = 128
# Far more than any image has (64 megapixels are 250,000 patches of 16 x 16), and safe to multiply.
_MAX_PATCHES = 2**24


class QwenVL(VisionFamily):
    """Images as uint8 patches [t*h*w, channels * temporal patch * patch^2], in grids of (t, h, w) patches."""

    model_types = ("qwen2_5_vl", "qwen3_vl")
    opener = "<|vision_start|>"
    placeholders = ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
    uses_mrope = True

    def __init__(self, config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> None:
        super().__init__(config, added_tokens)
        vision = require(config, "vision_config")
        self.merge_size = int(vision["spatial_merge_size"])
        channel_count = vision.get("in_channels", vision.get("in_chans", 3))  # Qwen2.5-VL's files say in_chans.
        self.patch_bytes = int(channel_count * vision["temporal_patch_size"] * vision["patch_size"] ** 2)

    def token_counter(self, processor: Mapping[str, Any]) -> TokenCounter:
        if not processor.get("do_resize", True):
            raise ValueError("the image processor has do_resize=false; Qwen-VL grids need resized images")
        if int(processor["merge_size"]) != self.merge_size:
            raise ValueError(
                f"the image processor has merge_size {processor['merge_size']},"
                f" config.json has spatial_merge_size {self.merge_size}"
            )
        size = processor["size"]
        return SmartResize(
            int(processor["patch_size"]) * self.merge_size, int(size["shortest_edge"]), int(size["longest_edge"])
        ).token_count

    def token_count(self, grid: Grid) -> int:
        return math.prod(grid) // self.merge_size**2

    def positions(self, length: int, spans: Sequence[GridSpan]) -> TokenIds:
        """See `VisionFamily.positions`.

        Text counts on in all three rows. An image keeps its time, counts rows and columns from there, and text goes on
        after the longer side. Unlike `get_rope_index`, which takes two images in a row for one and fails, each image
        is placed by itself, as vLLM does.
        """
        positions = np.empty((3, length), dtype=np.int32)
        filled, position = 0, 0
        for span in spans:
            text_length = span.offset - filled
            positions[:, filled : span.offset] = np.arange(position, position + text_length, dtype=np.int32)
            position += text_length
            time, height, width = span.grid[0], span.grid[1] // self.merge_size, span.grid[2] // self.merge_size
            filled = span.offset + time * height * width
            image = np.indices((time, height, width), dtype=np.int32).reshape(3, -1)
            positions[:, span.offset : filled] = image + position
            position += max(height, width)
        positions[:, filled:] = np.arange(position, position + length - filled, dtype=np.int32)
        return positions

    def grid_problem(self, grid: Sequence[int]) -> str:
        """A grid is (1, height, width) in patches, both multiples of the merge size."""
        if len(grid) != 3:
            return f"grid_thw {list(grid)} must have 3 extents"
        if any(extent < 1 for extent in grid) or math.prod(grid) > _MAX_PATCHES:
            return f"grid_thw {list(grid)} must be positive and at most {_MAX_PATCHES} patches"
        if grid[0] != 1:
            return f"grid_thw {list(grid)} has {grid[0]} frames; an image has 1"
        if grid[1] % self.merge_size or grid[2] % self.merge_size:
            return f"grid_thw {list(grid)} must be multiples of {self.merge_size} in height and width"
        return ""

    def tensor_shapes(self, grid: Grid) -> TensorShapes:
        return {"pixel_values": ("uint8", (math.prod(grid), self.patch_bytes)), "image_grid_thw": ("int64", (1, 3))}

    def grid_of(self, tensors: Mapping[str, npt.NDArray]) -> Grid:
        time, height, width = (int(extent) for extent in tensors["image_grid_thw"].reshape(3))
        return time, height, width

    def blank_image(self) -> tuple[dict[str, npt.NDArray], Grid]:
        """Four by four merged patches of grey."""
        grid = (1, 4 * self.merge_size, 4 * self.merge_size)
        _, shape = self.tensor_shapes(grid)["pixel_values"]
        pixels = np.full(shape, _GREY, dtype=np.uint8)
        return {"pixel_values": pixels, "image_grid_thw": np.array([grid], dtype=np.int64)}, grid


@dataclass(frozen=True)
class SmartResize:
    """The size that an image is resized to, with the rounding of `smart_resize`.

    Args:
        factor: Pixels along each side of the square that becomes one token.
        min_pixels: Smaller images are enlarged to at least so many.
        max_pixels: Larger images are shrunk to at most so many.
    """

    factor: int
    min_pixels: int
    max_pixels: int

    def token_count(self, width: int, height: int) -> int:
        """Tokens of an image of this size in pixels."""
        rows, columns = self._rounded(width, height)
        return rows * columns

    def _rounded(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            return max(1, math.floor(height / shrink / factor)), max(1, math.floor(width / shrink / factor))
        if rows * columns * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows, columns
