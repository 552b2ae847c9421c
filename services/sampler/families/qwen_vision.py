"""What Qwen's vision-language models share: patches of one width, a grid of them, and a merge of neighbours."""

import math
from collections.abc import Sequence

import numpy as np

from services.sampler.families.base import Family, FeatureTensors

_GREY = 128
_MAX_PATCHES = 2**24


class QwenVisionFamily(Family):
    """Uint8 patches [t*h*w, channels * temporal patch * patch^2] and their grid (t, h, w)."""

    @property
    def image_token_id(self) -> int:
        """The placeholder id of images."""
        return int(self.config["image_token_id"])

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """Placeholders of images and of videos, which Fovea does not take."""
        return frozenset(int(self.config[name]) for name in ("image_token_id", "video_token_id") if name in self.config)

    @property
    def image_opener_id(self) -> int | None:
        """The id of `<|vision_start|>`."""
        return self.config.get("vision_start_token_id")

    def grid_problem(self, grid: Sequence[int]) -> str:
        """A grid is (1, height, width) in patches, both multiples of the merge size."""
        if len(grid) != 3:
            return f"grid_thw {list(grid)} must have 3 extents"
        if any(extent < 1 for extent in grid) or math.prod(grid) > _MAX_PATCHES:
            return f"grid_thw {list(grid)} must be positive and at most {_MAX_PATCHES} patches"
        if grid[0] != 1:
            return f"grid_thw {list(grid)} has {grid[0]} frames; an image has 1"
        if grid[1] % self._merge or grid[2] % self._merge:
            return f"grid_thw {list(grid)} must be multiples of {self._merge} in height and width"
        return ""

    def token_count(self, grid: Sequence[int]) -> int:
        """Patches over the square of the merge size."""
        return math.prod(grid) // self._merge**2

    def tensor_shapes(self, grid: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """`pixel_values` and `image_grid_thw`."""
        return {
            "pixel_values": ("uint8", (math.prod(grid), self._patch_width)),
            "image_grid_thw": ("int64", (1, 3)),
        }

    def values_problem(self, grid: Sequence[int], tensors: FeatureTensors) -> str:
        """The grid must be the one that the request names."""
        found = tensors["image_grid_thw"][0].tolist()
        return "" if found == list(grid) else f"image_grid_thw is {found}, the request says {list(grid)}"

    def grey_image(self) -> tuple[FeatureTensors, list[int]]:
        """Four by four merged patches of grey."""
        grid = [1, 4 * self._merge, 4 * self._merge]
        (_, shape) = self.tensor_shapes(grid)["pixel_values"]
        pixels = np.full(shape, _GREY, dtype=np.uint8)
        return {"pixel_values": pixels, "image_grid_thw": np.array([grid], dtype=np.int64)}, grid

    @property
    def _merge(self) -> int:
        return int(self.config["vision_config"]["spatial_merge_size"])

    @property
    def _patch_width(self) -> int:
        vision = self.config["vision_config"]
        channels = vision.get("in_channels", vision.get("in_chans", 3))
        return int(channels * vision["temporal_patch_size"] * vision["patch_size"] ** 2)
