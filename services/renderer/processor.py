"""The model's own image processor, without rescaling and normalising. Runs in image workers only."""

import hashlib
import json
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, features
from transformers import AutoImageProcessor

from services.renderer.pixels import DECODER_VERSION

# What acts on pixels between the encoded bytes and the patches.
_LIBRARIES = ("pillow", "torch", "torchvision", "transformers")


class ImagePatcher:
    """Turns RGB images into uint8 patches, as the Hugging Face image processor of one checkpoint does."""

    def __init__(self, model_directory: str) -> None:
        self._processor = AutoImageProcessor.from_pretrained(model_directory)
        self.settings: dict[str, Any] = json.loads(self._processor.to_json_string())

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

    def tensors(self, image: Image.Image) -> dict[str, npt.NDArray[Any]]:
        """Processes one RGB image.

        Returns:
            `pixel_values` uint8 [rows, width], one row a patch, neither rescaled nor normalised, and
            `image_grid_thw` int64 [1, 3], the patch grid before merging.

        Raises TypeError if the processor does not keep bytes as bytes.
        """
        with torch.inference_mode():
            batch = self._processor([image], return_tensors="pt", do_rescale=False, do_normalize=False)
        pixel_values = batch["pixel_values"].numpy()
        if pixel_values.dtype != np.uint8:
            raise TypeError(f"{type(self._processor).__name__} gives {pixel_values.dtype} patches, not uint8")
        return {
            "pixel_values": np.ascontiguousarray(pixel_values),
            "image_grid_thw": batch["image_grid_thw"].numpy().astype(np.int64),
        }
