"""What the Qwen-VL families share for images: smart resizing, one placeholder per merged patch, and MRoPE.

Formulas are those of transformers 5.19: `smart_resize` in models/qwen2_vl/image_processing_qwen2_vl.py, and
`get_rope_index` with `get_vision_position_ids` in models/qwen3_vl/modeling_qwen3_vl.py and
models/qwen2_5_vl/modeling_qwen2_5_vl.py (for images, without videos, the two are the same).
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from services.renderer.families.base import Grid, ImageSpan, ProcessorSettings, TokenIds
from services.renderer.model_directory import Checkpoint

_PAD_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")


class QwenVL:
    """A Qwen-VL checkpoint; the families differ in their settings only."""

    model_types: ClassVar[tuple[str, ...]] = ()
    supports_images: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint, processor: ProcessorSettings) -> None:
        if not processor.get("do_resize", True):
            raise ValueError("the image processor has do_resize=false; Qwen-VL grids need resized images")
        self.image_token_id = int(checkpoint.require("image_token_id"))
        self.reserved_ids: Mapping[int, str] = self._reserved_ids(checkpoint)
        self.image_opener_id: int | None = checkpoint.special_ids.get("<|vision_start|>")
        self.patch_size = int(processor["patch_size"])
        self.merge_size = int(processor["merge_size"])
        self.min_pixels = int(processor["size"]["shortest_edge"])
        self.max_pixels = int(processor["size"]["longest_edge"])
        vision_merge_size = int(checkpoint.require("vision_config")["spatial_merge_size"])
        if vision_merge_size != self.merge_size:
            raise ValueError(
                f"the image processor has merge_size {self.merge_size},"
                f" config.json has spatial_merge_size {vision_merge_size}"
            )

    def token_count(self, width: int, height: int) -> int:
        """See `Family.token_count`."""
        resized_width, resized_height = self._resized(width, height)
        factor = self.patch_size * self.merge_size
        return (resized_width // factor) * (resized_height // factor)

    def placeholder_ids(self, grid: Grid) -> TokenIds:
        """See `Family.placeholder_ids`."""
        return np.full(math.prod(grid) // self.merge_size**2, self.image_token_id, dtype=np.int32)

    def positions(self, length: int, spans: Sequence[ImageSpan]) -> TokenIds:
        """See `Family.positions`.

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

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """The size (width, height) in pixels that an image is resized to; `smart_resize` with its own rounding."""
        factor = self.patch_size * self.merge_size
        rounded_height = round(height / factor) * factor
        rounded_width = round(width / factor) * factor
        if rounded_height * rounded_width > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            rounded_height = max(factor, math.floor(height / shrink / factor) * factor)
            rounded_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif rounded_height * rounded_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rounded_height = math.ceil(height * grow / factor) * factor
            rounded_width = math.ceil(width * grow / factor) * factor
        return rounded_width, rounded_height

    def _reserved_ids(self, checkpoint: Checkpoint) -> dict[int, str]:
        reserved = {checkpoint.special_ids[name]: name for name in _PAD_TOKENS if name in checkpoint.special_ids}
        reserved.setdefault(self.image_token_id, "the image placeholder")
        video_token_id = checkpoint.config.get("video_token_id")
        if video_token_id is not None:
            reserved.setdefault(int(video_token_id), "the video placeholder")
        return reserved
