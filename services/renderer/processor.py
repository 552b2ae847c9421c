"""The model's own image processor, without rescaling and normalising. Runs in image workers only."""

import hashlib
import json
import logging
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, features
from transformers import AutoImageProcessor

from services.renderer.patches import QwenPatches
from services.renderer.pixels import DECODER_VERSION
from services.renderer.shared_memory import Allocate

logger = logging.getLogger(__name__)

# What acts on pixels between the encoded bytes and the patches.
_LIBRARIES = ("pillow", "torch", "torchvision", "transformers")
# As it is, enlarged, shrunk: each in another proportion.
_PROBE_SIZES = ((256, 320), (50, 21), (333, 1000))


class ImagePatcher:
    """Turns RGB images into uint8 patches, as the Hugging Face image processor of one checkpoint does."""

    def __init__(self, model_directory: str) -> None:
        self._processor = AutoImageProcessor.from_pretrained(model_directory)
        self.settings: dict[str, Any] = json.loads(self._processor.to_json_string())
        self._patches = QwenPatches(self.settings) if QwenPatches.suits(self._processor) else None
        if self._patches and not all(self._agree(*size) for size in _PROBE_SIZES):
            logger.warning("%s makes other patches than expected; it is used itself", type(self._processor).__name__)
            self._patches = None

    def fingerprint(self) -> str:
        """SHA-256 over the processor's settings and every library that acts on pixels, lower-case hexadecimal."""
        facts = {
            "processor": type(self._processor).__name__,
            "settings": self.settings,
            "decoder": DECODER_VERSION,
            "libraries": {name: version(name) for name in _LIBRARIES},
            "jpeg": f"{features.version('jpg')} turbo {features.version('libjpeg_turbo')}",
        }
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def tensors(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """Processes one RGB image; the tensors lie where `allocate` says.

        Returns:
            `pixel_values` uint8 [rows, width], one row a patch, neither rescaled nor normalised, and
            `image_grid_thw` int64 [1, 3], the patch grid before merging.

        Raises TypeError if the processor does not keep bytes as bytes.
        """
        if self._patches:
            return self._patches(image, allocate)
        tensors = self._own(image)
        for name, array in tensors.items():
            tensors[name] = allocate(name, array.shape, array.dtype)
            tensors[name][:] = array
        return tensors

    def _agree(self, width: int, height: int) -> bool:
        assert self._patches
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
        own, ours = self._own(image), self._patches(image, anywhere)
        return all(np.array_equal(ours[name], own[name]) for name in own)

    def _own(self, image: Image.Image) -> dict[str, npt.NDArray[Any]]:
        with torch.inference_mode():
            batch = self._processor([image], return_tensors="pt", do_rescale=False, do_normalize=False)
        pixel_values = batch["pixel_values"].numpy()
        if pixel_values.dtype != np.uint8:
            raise TypeError(f"{type(self._processor).__name__} gives {pixel_values.dtype} patches, not uint8")
        return {
            "pixel_values": pixel_values,
            "image_grid_thw": batch["image_grid_thw"].numpy().astype(np.int64),
        }


def anywhere(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocates a tensor in memory of its own."""
    return np.empty(shape, dtype)
