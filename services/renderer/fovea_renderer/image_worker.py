"""An image worker: `python -m fovea_renderer.image_worker`. Only `worker_pool` starts it.

Image decoders and the image processor run in this separate process. A crash, a leak or a gigabyte of pixels therefore
does not affect the service, and processing pixels does not hold the interpreter lock that its event loop needs.
"""

import argparse
import hashlib
import io
import json
import logging
import resource
import signal
import time
import traceback
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from fovea.runtime.processes import UNUSED, importing, leave

with importing(*UNUSED):
    import numpy as np
    import numpy.typing as npt
    import torch
    from PIL import Image, features
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional
    from transformers import AutoImageProcessor, AutoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    from fovea.runtime.model_files import read_directory
    from fovea.vision.processor_vl import IDS, ProcessorVL
    from fovea.vision.vision_family import image_margin
    from fovea.wire.tensors import tensors_sha256
    from fovea_renderer import pixels
    from fovea_renderer.image_header import ImageHeader, InvalidChunk
    from fovea_renderer.worker_protocol import Allocate, Done, Failed, Invalid, Job, Ready, SharedMemory, send

logger = logging.getLogger(__name__)

WARM_UP_SIZE = (320, 240)
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
# On CPUs with these, torch resizes uint8 with integer arithmetic, so the result does not depend on the memory layout.
_INTEGER_RESIZE = ("AVX2", "AVX512")
# The libraries that change pixels between the encoded bytes and the patches.
_LIBRARIES = ("pillow", "torch", "torchvision", "transformers")
# Sizes that a processor keeps, enlarges or shrinks. Their aspect ratios differ.
_PROBE_SIZES = ((256, 320), (50, 21), (333, 1000))


class QwenPatches:
    """Resizes and cuts images bit for bit as a Qwen-VL processor with these settings does, but faster.

    Args:
        settings: The settings of the processor, as its `to_dict` returns them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._patch = int(settings["patch_size"])
        self._merge = int(settings["merge_size"])
        self._repeat = int(settings["temporal_patch_size"])
        self._least, self._most = int(settings["size"]["shortest_edge"]), int(settings["size"]["longest_edge"])

    @staticmethod
    def suits(processor: Any) -> bool:
        """Returns True if this class can replace a processor on this machine."""
        settings = json.loads(processor.to_json_string())
        return (
            type(processor).__name__ in _PROCESSORS
            and bool(settings.get("do_resize"))
            and settings.get("resample") == Image.Resampling.BICUBIC
            and torch.backends.cpu.get_cpu_capability() in _INTEGER_RESIZE
        )

    def __call__(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """Returns `pixel_values` uint8 [patches, width] and `image_grid_thw` int64 [1, 3] of one RGB image."""
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
        """Copies the channels into `pixel_values`, patch by patch, with one line of a patch as the unit.

        Each line of `patch` bytes is one element (np.void), so that numpy moves whole lines instead of bytes. In the
        shape comments, G is rows / merge, g is columns / merge, m is merge, and p is the number of lines of a patch.
        """
        line = np.dtype((np.void, self._patch))
        blocks = (rows // self._merge, self._merge, self._patch, columns // self._merge, self._merge)  # Gmpgm
        shape = (blocks[0], blocks[3], self._merge, self._merge, len(channels), self._repeat, self._patch)
        patches = pixel_values.view(line).reshape(shape)
        for index, channel in enumerate(channels):
            lines = np.ascontiguousarray(channel).view(line).reshape(blocks)
            patches[..., index, :, :] = lines.transpose(0, 3, 1, 4, 2)[..., None, :]


class ImageProcessor(Protocol):
    """Computes the tensors of images for one checkpoint.

    Attributes:
        settings: The settings of the checkpoint's image processor.
        fingerprint: SHA-256 of the settings and of the versions of all libraries that change pixels, in lower-case
            hexadecimal.
    """

    settings: dict[str, Any]
    fingerprint: str

    def tensors(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """Processes one RGB image; writes the tensors to memory from `allocate`."""


def open_processor(model_dir: Path) -> ImageProcessor:
    """Opens the image processor of a checkpoint. Raises any error of transformers if it cannot load it."""
    family = read_directory(model_dir).family
    return WholeProcessor(model_dir, family) if isinstance(family, ProcessorVL) else ImagePatcher(model_dir)


class WholeProcessor:
    """An image processor that runs the checkpoint's processor and its tokenizer on an image token and one image.

    Its ids exclude what the processor writes before and after an image, because that is text: see `image_margin`.
    """

    def __init__(self, model_dir: Path, family: ProcessorVL) -> None:
        self._processor = AutoProcessor.from_pretrained(model_dir, trust_remote_code=False)
        self._family = family
        tokenizer = self._processor.tokenizer
        self._before, self._after = (
            tokenizer.encode(text, add_special_tokens=False) for text in image_margin(tokenizer)
        )
        self.settings: dict[str, Any] = json.loads(self._processor.image_processor.to_json_string())
        # The ids of a known image represent the tokenizer in the fingerprint.
        ids = self._run(Image.new("RGB", _PROBE_SIZES[0]))[IDS]
        self.fingerprint = _fingerprint(self._processor, [self.settings, ids.tolist()])

    def tensors(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """Returns the tensors that the family declares, and `input_ids`, int32 [L], as the processor computes them.

        Raises InvalidChunk if the processor's tensors of the image do not fit the model.
        """
        made = self._run(image)
        if problem := self._family.tensors_problem(made):
            raise InvalidChunk(
                "processor",
                f"the model cannot use what its processor computes for the {image.width}x{image.height} image"
                f" ({problem}); send it with another aspect ratio",
            )
        return _placed(made, allocate)

    def _run(self, image: Image.Image) -> dict[str, npt.NDArray[Any]]:
        token = self._processor.image_token
        with torch.inference_mode():
            made = self._processor(text=[token], images=[image], return_tensors="pt", add_special_tokens=False)
        ids = made[IDS][0].numpy().astype(np.int32)
        start, end = len(self._before), len(ids) - len(self._after)
        if (found := [ids[:start].tolist(), ids[end:].tolist()]) != [self._before, self._after]:
            name, tokenizer = type(self._processor).__name__, self._processor.tokenizer
            texts = tuple(map(tokenizer.decode, found))
            raise ValueError(f"{name} writes {texts} around an image, must be {image_margin(tokenizer)}")
        ids = ids[start:end]
        made.to(torch.float32)  # numpy has no bfloat16, in which Llama 4's processor computes
        return {name: made[name].numpy() for name in self._family.declared} | {IDS: ids}


class ImagePatcher:
    """An image processor that makes the same uint8 patches of RGB images as the checkpoint's own image processor."""

    def __init__(self, model_dir: Path) -> None:
        self._processor = AutoImageProcessor.from_pretrained(model_dir, trust_remote_code=False)
        self.settings: dict[str, Any] = json.loads(self._processor.to_json_string())
        self.fingerprint = _fingerprint(self._processor, self.settings)
        self._patches = QwenPatches(self.settings) if QwenPatches.suits(self._processor) else None
        if self._patches and not all(self._agree(*size) for size in _PROBE_SIZES):
            name = type(self._processor).__name__
            logger.warning("%s computes other patches than Fovea's faster code; using the slower %s", name, name)
            self._patches = None

    def tensors(self, image: Image.Image, allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        """Processes one RGB image; writes the tensors to memory from `allocate`.

        Returns:
            `pixel_values` uint8 [rows, width], one row per patch, neither rescaled nor normalised, and
            `image_grid_thw` int64 [1, 3], the patch grid before merging.

        Raises TypeError if the processor's patches are not uint8.
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
    """Copies the tensors to memory from `allocate`."""
    for name, array in tensors.items():
        tensors[name] = allocate(name, array.shape, array.dtype)
        tensors[name][:] = array
    return tensors


def _fingerprint(processor: Any, settings: Any) -> str:
    """Returns the SHA-256 of a processor's settings and of all libraries that change pixels, in hexadecimal."""
    facts = {
        "processor": type(processor).__name__,
        "settings": settings,
        "decoder": pixels.DECODER_VERSION,
        "libraries": {name: version(name) for name in _LIBRARIES},
        "jpeg": f"{features.version('jpg')} turbo {features.version('libjpeg_turbo')}",
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def anywhere(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocates a tensor in ordinary memory."""
    return np.empty(shape, dtype)


def main() -> None:
    """Processes jobs until the service closes the socket or ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connection", type=int, required=True, help="Inherited descriptor of the socket pair.")
    parser.add_argument("--tensors", type=int, required=True, help="Inherited descriptor of the shared memory.")
    parser.add_argument("--model", required=True, help="Model directory.")
    parser.add_argument("--memory-bytes", type=int, required=True, help="Memory limit in bytes; 0 is no limit.")
    arguments = parser.parse_args()
    # A Ctrl-C reaches the whole process group. The service finishes its calls and then ends its workers: it closes the
    # sockets.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    if arguments.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (arguments.memory_bytes, arguments.memory_bytes))
    processor = open_processor(Path(arguments.model))
    memory = SharedMemory(arguments.tensors)
    _warm_up(processor, memory)
    with Connection(arguments.connection) as connection:
        try:
            send(connection, Ready(processor.settings, processor.fingerprint))
            while True:
                _serve_one(connection, memory, processor)
        except (EOFError, ConnectionError):
            leave(0)


def _serve_one(connection: Connection, memory: SharedMemory, processor: ImageProcessor) -> None:
    job: Job = connection.recv()
    start = time.perf_counter()
    try:
        header = job.header
        image = pixels.decode(job.data, header.format, header.width, header.height, job.max_side)
        memory.clear()
        sha256 = tensors_sha256(processor.tensors(image, memory.allocate))
    except InvalidChunk as error:
        send(connection, Invalid(error.cause, error.message))
        return
    except Exception as error:  # the service waits for an answer, so every error is reported
        out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        send(connection, Failed(traceback.format_exc(), out_of_memory))
        return
    send(connection, Done(memory.positions, sha256, time.perf_counter() - start))


def _warm_up(processor: ImageProcessor, memory: SharedMemory) -> None:
    """Decodes and processes one image of each format, so that a client's first image is not slower than others."""
    image = Image.new("RGB", WARM_UP_SIZE, (120, 60, 30))
    for header in (ImageHeader("PNG", *WARM_UP_SIZE), ImageHeader("JPEG", *WARM_UP_SIZE)):
        file = io.BytesIO()
        image.save(file, header.format)
        memory.clear()
        processor.tensors(pixels.decode(file.getvalue(), header.format, header.width, header.height), memory.allocate)


if __name__ == "__main__":
    main()
