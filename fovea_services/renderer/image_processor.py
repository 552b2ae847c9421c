"""The model's own processor of images, or a faster equal. Runs in image workers only."""

import hashlib
import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, features
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
from transformers import AutoImageProcessor, AutoProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from fovea.vision.processor_vl import IDS, ProcessorVL
from fovea.vision.vision_family import image_margin
from fovea_services.renderer import model_directory
from fovea_services.renderer.chunk_errors import InvalidChunk
from fovea_services.renderer.pixels import DECODER_VERSION
from fovea_services.renderer.worker_protocol import Allocate

logger = logging.getLogger(__name__)

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


# What acts on pixels between the encoded bytes and the patches.
_LIBRARIES = ("pillow", "torch", "torchvision", "transformers")
# As it is, enlarged, shrunk: each in another proportion.
_PROBE_SIZES = ((256, 320), (50, 21), (333, 1000))


class ImageProcessor(Protocol):
    """Makes the tensors of images for one checkpoint.

    Attributes:
        settings: Those of the checkpoint's image processor.
        fingerprint: SHA-256 over them and every library that acts on pixels, lower-case hexadecimal.
    """

    settings: dict[str, Any]
    fingerprint: str

    def tensors(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """Processes one RGB image; the tensors lie where `allocate` says."""


def open_processor(model_dir: Path) -> ImageProcessor:
    """The processor of a checkpoint with images. Raises what transformers raises for one that it cannot load."""
    family = model_directory.read(model_dir).family
    return WholeProcessor(model_dir, family) if isinstance(family, ProcessorVL) else ImagePatcher(model_dir)


class WholeProcessor:
    """The checkpoint's processor with its tokenizer: turns its image token and one image into ids and tensors.

    The ids are without the processor's whitespace around an image, which is text: see `image_margin`.
    """

    def __init__(self, model_dir: Path, family: ProcessorVL) -> None:
        self._processor = AutoProcessor.from_pretrained(model_dir, trust_remote_code=False)
        self._family = family
        tokenizer = self._processor.tokenizer
        self._margin: list[int] = tokenizer.encode(image_margin(tokenizer), add_special_tokens=False)
        self.settings: dict[str, Any] = json.loads(self._processor.image_processor.to_json_string())
        # The tokenizer's part is small: of the whole processor, what it makes of a known image says it.
        ids = self._run(Image.new("RGB", _PROBE_SIZES[0]))[IDS]
        self.fingerprint = _fingerprint(self._processor, [self.settings, ids.tolist()])

    def tensors(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """The family's tensors as the processor names and makes them, and `input_ids`, int32 [L].

        Raises InvalidChunk for an image of which the processor makes something that its model cannot take.
        """
        made = self._run(image)
        if problem := self._family.tensors_problem(made):
            raise InvalidChunk(
                "processor",
                f"the model's processor makes of the {image.width}x{image.height} image what the model cannot take"
                f" ({problem}); send it in other proportions",
            )
        return _placed(made, allocate)

    def _run(self, image: Image.Image) -> dict[str, npt.NDArray[Any]]:
        token = self._processor.image_token
        with torch.inference_mode():
            made = self._processor(text=[token], images=[image], return_tensors="pt", add_special_tokens=False)
        ids = made[IDS][0].numpy().astype(np.int32)
        if count := len(self._margin):
            if not ids[:count].tolist() == ids[-count:].tolist() == self._margin:
                raise ValueError(f"{type(self._processor).__name__} does not write {self._margin} around an image")
            ids = ids[count:-count]
        return {name: made[name].numpy() for name in self._family.declared} | {IDS: ids}


class ImagePatcher:
    """Turns RGB images into uint8 patches, as the Hugging Face image processor of one checkpoint does."""

    def __init__(self, model_dir: Path) -> None:
        self._processor = AutoImageProcessor.from_pretrained(model_dir, trust_remote_code=False)
        self.settings: dict[str, Any] = json.loads(self._processor.to_json_string())
        self.fingerprint = _fingerprint(self._processor, self.settings)
        self._patches = QwenPatches(self.settings) if QwenPatches.suits(self._processor) else None
        if self._patches and not all(self._agree(*size) for size in _PROBE_SIZES):
            logger.warning("%s makes other patches than expected; it is used itself", type(self._processor).__name__)
            self._patches = None

    def tensors(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """Processes one RGB image; the tensors lie where `allocate` says.

        Returns:
            `pixel_values` uint8 [rows, width], one row per patch, neither rescaled nor normalised, and
            `image_grid_thw` int64 [1, 3], the patch grid before merging.

        Raises TypeError if the processor does not keep bytes as bytes.
        """
        if self._patches:
            return self._patches(image, allocate)
        return _placed(self._own(image), allocate)

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


def _placed(tensors: dict[str, npt.NDArray[Any]], allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
    """The same tensors where `allocate` says."""
    for name, array in tensors.items():
        tensors[name] = allocate(name, array.shape, array.dtype)
        tensors[name][:] = array
    return tensors


def _fingerprint(processor: Any, settings: Any) -> str:
    """SHA-256 over a processor's settings and every library that acts on pixels, lower-case hexadecimal."""
    facts = {
        "processor": type(processor).__name__,
        "settings": settings,
        "decoder": DECODER_VERSION,
        "libraries": {name: version(name) for name in _LIBRARIES},
        "jpeg": f"{features.version('jpg')} turbo {features.version('libjpeg_turbo')}",
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def anywhere(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocates a tensor in memory of its own."""
    return np.empty(shape, dtype)
