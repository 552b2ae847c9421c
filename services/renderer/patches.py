"""What the Qwen-VL image processors make of an RGB image, with a quarter of their copies and none of their checks."""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from services.renderer.shared_memory import Allocate

_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
# torch resizes bytes in integers there, so that the result does not depend on how the pixels lie in memory.
_INTEGER_RESIZE = ("AVX2", "AVX512")


class QwenPatches:
    """Resizes and cuts as a Qwen-VL processor with these settings does, bit for bit.

    Args:
        settings: As `to_dict` of the processor gives them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._patch = int(settings["patch_size"])
        self._merge = int(settings["merge_size"])
        self._repeat = int(settings["temporal_patch_size"])
        self._least, self._most = int(settings["size"]["shortest_edge"]), int(settings["size"]["longest_edge"])

    @staticmethod
    def suits(processor: Any) -> bool:
        """Whether a processor is one that this class stands for, on this machine."""
        settings = json.loads(processor.to_json_string())
        return (
            type(processor).__name__ in _PROCESSORS
            and bool(settings.get("do_resize"))
            and settings.get("resample") == Image.Resampling.BICUBIC
            and torch.backends.cpu.get_cpu_capability() in _INTEGER_RESIZE
        )

    def __call__(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """`pixel_values` uint8 [patches, width] and `image_grid_thw` int64 [1, 3] of one RGB image."""
        height, width = smart_resize(
            image.height, image.width, self._patch * self._merge, min_pixels=self._least, max_pixels=self._most
        )
        if (width, height) == image.size:
            channels = [np.asarray(channel) for channel in image.split()]
        else:
            channels = list(self._resized(image, height, width))
        rows, columns = height // self._patch, width // self._patch
        size = len(channels) * self._repeat * self._patch**2
        pixel_values = allocate("pixel_values", (rows * columns, size), np.uint8)
        self._cut(channels, rows, columns, pixel_values)
        grid = allocate("image_grid_thw", (1, 3), np.int64)
        grid[:] = 1, rows, columns
        return {"pixel_values": pixel_values, "image_grid_thw": grid}

    def _resized(self, image: Image.Image, height: int, width: int) -> npt.NDArray[np.uint8]:
        pixels = functional.pil_to_tensor(image)
        resized = functional.resize(pixels, [height, width], InterpolationMode.BICUBIC, antialias=True)
        channels: npt.NDArray[np.uint8] = resized.contiguous().numpy()
        return channels

    def _cut(
        self, channels: list[npt.NDArray[np.uint8]], rows: int, columns: int, pixel_values: npt.NDArray[np.uint8]
    ) -> None:
        """Moves whole lines of a patch at a time: G rows / merge, g columns / merge, m merge, T times, p lines."""
        line = np.dtype((np.void, self._patch))
        blocks = (rows // self._merge, self._merge, self._patch, columns // self._merge, self._merge)  # GmpGm
        shape = (blocks[0], blocks[3], self._merge, self._merge, len(channels), self._repeat, self._patch)
        patches = pixel_values.view(line).reshape(shape)
        for index, channel in enumerate(channels):
            lines = np.ascontiguousarray(channel).view(line).reshape(blocks)
            patches[..., index, :, :] = lines.transpose(0, 3, 1, 4, 2)[..., None, :]
