"""Qwen2-VL, 2.5-VL, 3-VL, 3-Omni and 3.5, GLM-4.1V and 4.5V: smart resizing, one id per merged patch, and MRoPE.

They differ only in numbers from the checkpoint (patch size 14 or 16). Qwen2.5-VL's time scaling (`tokens_per_second`)
applies to videos only. Qwen3-VL's interleaved MRoPE concerns the model, not the position ids.

The formulas are those of transformers 5.19: `smart_resize` in models/qwen2_vl/image_processing_qwen2_vl.py, and
`get_rope_index` with `get_vision_position_ids` in models/qwen3_vl/modeling_qwen3_vl.py and
models/qwen2_5_vl/modeling_qwen2_5_vl.py (the two are the same for images).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fovea.vision.vision_family import ImageAt, ImageTensors, Replacement, TokenCounter, VisionFamily, require

_Grid = tuple[int, int, int]
"""Patches of one image before merging: time, height, width."""

_GREY = 128
# Far more than any image has (64 megapixels are 250,000 patches of 16 x 16), and small enough to multiply safely.
_MAX_PATCHES = 2**24


class QwenVL(VisionFamily):
    """Images as `pixel_values`, uint8 patches [t*h*w, channels * temporal patch * patch^2], and `image_grid_thw`."""

    model_types: ClassVar[tuple[str, ...]] = (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        *("qwen3_5", "qwen3_5_moe", "qwen3_omni_moe"),
    )
    opener: ClassVar[str] = "<|vision_start|>"
    placeholders: ClassVar[tuple[str, ...]] = ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
    position_rows = 3

    def __init__(self, config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> None:
        super().__init__(config, added_tokens)
        vision = require(config, "vision_config")
        self._merge_size = int(vision["spatial_merge_size"])
        channel_count = vision.get("in_channels", vision.get("in_chans", 3))  # Qwen2.5-VL's files use in_chans
        self._patch_bytes = int(channel_count * vision["temporal_patch_size"] * vision["patch_size"] ** 2)

    def token_counter(self, processor: Mapping[str, Any]) -> TokenCounter | None:
        if not processor.get("do_resize", True):
            raise ValueError("the image processor has do_resize=false; Qwen-VL grids need resized images")
        if int(processor["merge_size"]) != self._merge_size:
            raise ValueError(
                f"the image processor has merge_size {processor['merge_size']},"
                f" config.json has spatial_merge_size {self._merge_size}"
            )
        size = processor["size"]
        return SmartResize(
            int(processor["patch_size"]) * self._merge_size, int(size["shortest_edge"]), int(size["longest_edge"])
        ).token_count

    def replacement(self, tensors: ImageTensors) -> Replacement:
        count = math.prod(_grid_of(tensors)) // self._merge_size**2
        return Replacement(np.full(count, self.image_token_id, dtype=np.int32), np.ones(count, dtype=np.bool_))

    def positions(self, length: int, images: Sequence[ImageAt]) -> npt.NDArray[np.int32]:
        """Returns the position ids of an input; see `VisionFamily.positions`. The rows are time, height and width.

        For text, all three rows count up. In an image, the time stays constant, and height and width count up from
        there; text then continues after the longer side. `get_rope_index` treats two adjacent images as one and fails.
        Here each image is placed by itself, as in vLLM.
        """
        positions = np.empty((3, length), dtype=np.int32)
        filled, position = 0, 0
        for offset, tensors in images:
            text_length = offset - filled
            positions[:, filled:offset] = np.arange(position, position + text_length, dtype=np.int32)
            position += text_length
            time, height, width = _grid_of(tensors)
            height, width = height // self._merge_size, width // self._merge_size
            filled = offset + time * height * width
            image = np.indices((time, height, width), dtype=np.int32).reshape(3, -1)
            positions[:, offset:filled] = image + position
            position += max(height, width)
        positions[:, filled:] = np.arange(position, position + length - filled, dtype=np.int32)
        return positions

    def patch_count(self, embedding_count: int) -> int:
        return embedding_count * self._merge_size**2

    def tensors_problem(self, tensors: ImageTensors) -> str:
        if set(tensors) != {"pixel_values", "image_grid_thw"}:
            return f"tensors are {sorted(tensors)}, must be ['image_grid_thw', 'pixel_values']"
        grid = tensors["image_grid_thw"]
        if problem := _mismatch("image_grid_thw", grid, np.int64, (1, 3)):
            return problem
        if problem := self._grid_problem(_grid_of(tensors)):
            return f"image_grid_thw {problem}"
        shape = (math.prod(_grid_of(tensors)), self._patch_bytes)
        if problem := _mismatch("pixel_values", tensors["pixel_values"], np.uint8, shape):
            return f"{problem} for the grid {grid[0].tolist()}"
        return ""

    def blank_image(self) -> dict[str, npt.NDArray]:
        """Returns an image of four by four merged patches."""
        side = 4 * self._merge_size
        pixels = np.full((side * side, self._patch_bytes), _GREY, dtype=np.uint8)
        return {"pixel_values": pixels, "image_grid_thw": np.array([[1, side, side]], dtype=np.int64)}

    def _grid_problem(self, grid: _Grid) -> str:
        """Checks a grid: it must be (1, height, width) in patches, with multiples of the merge size."""
        said = str(list(grid))
        if any(extent < 1 for extent in grid) or math.prod(grid) > _MAX_PATCHES:
            return f"{said} must be positive and at most {_MAX_PATCHES} patches"
        if grid[0] != 1:
            return f"{said} has {grid[0]} frames; an image has 1"
        if grid[1] % self._merge_size or grid[2] % self._merge_size:
            return f"{said} must be multiples of {self._merge_size} in height and width"
        return ""


class Glm4v(QwenVL):
    """QwenVL with a different resizing, which counts frames."""

    model_types = ("glm4v", "glm4v_moe")
    opener = "<|begin_of_image|>"
    placeholders = ("<|image|>", "<|video|>")

    def token_counter(self, processor: Mapping[str, Any]) -> None:
        return None


def _grid_of(tensors: ImageTensors) -> _Grid:
    time, height, width = tensors["image_grid_thw"][0].tolist()
    return time, height, width


def _mismatch(name: str, array: npt.NDArray, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> str:
    if array.dtype != dtype:
        return f"{name} is {array.dtype.name}, must be {np.dtype(dtype).name}"
    if array.shape != shape:
        return f"{name} has shape {list(array.shape)}, must be {list(shape)}"
    return ""


@dataclass(frozen=True)
class SmartResize:
    """The size to which an image is resized, with the rounding of `smart_resize`.

    Args:
        factor: Side in pixels of the square that becomes one token.
        min_pixels: Smaller images are enlarged to at least this many pixels.
        max_pixels: Larger images are shrunk to at most this many pixels.
    """

    factor: int
    min_pixels: int
    max_pixels: int

    def token_count(self, width: int, height: int) -> int:
        """Returns the number of tokens of an image with this size in pixels."""
        rows, columns = self._rounded(width, height)
        return rows * columns

    def _rounded(self, width: int, height: int) -> tuple[int, int]:
        """Returns rows and columns of tokens."""
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            return max(1, math.floor(height / shrink / factor)), max(1, math.floor(width / shrink / factor))
        if rows * columns * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows, columns
