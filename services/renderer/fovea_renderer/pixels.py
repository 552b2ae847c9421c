"""Decodes images to RGB pixels. Only image workers import this module. Change `DECODER_VERSION` with any change here.

Images that are not plain RGB are converted as follows:

    alpha of any kind (RGBA, LA, palette or tRNS transparency)  composited on white
    grey (L, 1 bit)                                             repeated to three channels
    16-bit grey                                                 high byte, as libpng does for 16-bit colour
    CMYK JPEG                                                   Pillow's conversion, ICC profiles ignored
    EXIF orientation                                            applied, so that the image is upright
    animated PNG                                                refused
    JPEG with several pictures (MPO)                            the first picture

vLLM's ImageMediaIO also composites alpha on white. vLLM and transformers' `load_image` also apply the EXIF orientation.
transformers' image processor alone would drop alpha and show the colours that transparency hides.
vLLM 0.32.0 and Pillow's convert("RGB") clip 16-bit grey at 255, which turns almost every such image white.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image, ImageOps, PngImagePlugin

from fovea_renderer.image_header import ImageFormat, InvalidChunk, check_size

DECODER_VERSION = 1

WHITE = (255, 255, 255)
_GREY_16_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")

# Pillow's own limit is not needed, because `image_header` has refused larger images.
Image.MAX_IMAGE_PIXELS = None
_METADATA_TOO_LARGE = ("ecompressed data too large", "MAX_TEXT_MEMORY")


def decode(data: bytes, declared: ImageFormat, width: int, height: int, max_side: int = 0) -> Image.Image:
    """Decodes an image to mode RGB.

    Args:
        data: The encoded file.
        declared: Its format; no other decoder is tried.
        width: The width that `image_header` has read. The image is refused if the decoder reads another size.
        height: The height that `image_header` has read.
        max_side: The most pixels of the longer side; a larger image is shrunk. 0 keeps the size.

    Raises InvalidChunk if the bytes are corrupt, truncated or animated, or if the shrunk image has an extreme aspect
    ratio.
    """
    try:
        image = _load(data, declared, width, height)
    except (InvalidChunk, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise almost any exception for hostile bytes
        if any(words in str(error) for words in _METADATA_TOO_LARGE):
            raise InvalidChunk(
                "size_bytes",
                "the PNG's metadata (texts, colour profile) is larger than 64 MiB; save the image without metadata",
            ) from error
        raise InvalidChunk("corrupt", f"the {declared} is truncated or corrupt: {error}") from error
    return _to_rgb(_shrunk(_upright(image), max_side))


def _load(data: bytes, declared: ImageFormat, width: int, height: int) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about metadata (EXIF, MPO); load() raises if pixels are missing
        with _room_for_metadata():
            image = Image.open(io.BytesIO(data), formats=[declared])
        frame_count = getattr(image, "n_frames", 1)
        if declared == "PNG" and frame_count > 1:
            raise InvalidChunk("animated", f"the PNG is animated ({frame_count} frames); send one frame as one image")
        if image.size != (width, height):
            raise InvalidChunk(
                "corrupt", f"the {declared} has a header of {width}x{height}, but its decoder reads {image.size}"
            )
        with _room_for_metadata():
            image.load()
    return image


@contextmanager
def _room_for_metadata() -> Iterator[None]:
    """Increases Pillow's limit on one text or colour profile of a PNG from 1 MiB to 64 MiB within a block.

    64 MiB is Pillow's limit on all of them together. Some programs write whole workflows into PNGs. The memory limit of
    the worker protects the service.
    """
    before = PngImagePlugin.MAX_TEXT_CHUNK
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
    try:
        yield
    finally:
        PngImagePlugin.MAX_TEXT_CHUNK = before


def _upright(image: Image.Image) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # otherwise each unusual image would add lines to the log
        try:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        except Exception:  # an unreadable EXIF block contains no orientation; the pixels may still be good
            orientation = 1
    if orientation not in range(2, 9):
        return image
    return ImageOps.exif_transpose(image)


def _shrunk(image: Image.Image, max_side: int) -> Image.Image:
    """Returns the image, shrunk if its longer side exceeds `max_side`; 0 keeps the size.

    The steps are the same as in `fovea_rollout.pictures.read_picture`, so that a model sees exactly the pixels of its
    training rows. The image keeps its alpha while it shrinks; `_to_rgb` composites it on white afterwards.
    """
    if not 0 < max_side < max(image.size):
        return image
    if image.mode in _GREY_16_MODES:
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    elif image.mode not in ("RGB", "RGBA", "L"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    check_size(*image.size)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in _GREY_16_MODES:
        return _grey_16_to_rgb(image)
    if image.has_transparency_data:
        return _on_white(image.convert("RGBA"))
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    flat = Image.new("RGB", image.size, WHITE)
    flat.paste(image, mask=image.getchannel("A"))
    return flat


def _grey_16_to_rgb(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.uint16)
    grey = (values >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")
