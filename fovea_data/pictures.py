"""Pictures of a dataset, in whichever form a row has them, as what the Tinker API takes: a PNG or a JPEG file."""

from __future__ import annotations

import base64
import binascii
import io
import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Picture

_FORMS = "a path, file: or data: URL, bytes, {'bytes': ...}, {'path': ...}, {'url': ...}, a PIL image or uint8 pixels"


_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""Kinds of HEIC and HEIF files, as bytes 8 to 12 of the file name them."""


def read_picture(
    value: Any, where: str = "picture", *, folder: pathlib.Path | None = None, max_side: int | None = None
) -> Picture:
    """A picture from a path, a `file:` or `data:` URL, a file's bytes, a mapping with one of these (as Hugging Face
    `datasets` and OpenAI have it), a PIL image, or pixels, uint8 [height, width, 3].

    PNG and JPEG files stay as they are; what else Pillow reads (WebP, BMP, TIFF) becomes a PNG.

    Args:
        value: The picture.
        where: Names it in errors.
        folder: What relative paths begin at; the working directory by default.
        max_side: Pixels that the longer side may have; larger pictures are shrunk. None keeps every size.

    Raises:
        InvalidInput: Naming `where`, for what is no picture, cannot be read to its end, or is animated.
    """
    if isinstance(value, Picture):
        data = value.data
    elif isinstance(value, Image.Image):
        return _encoded(value, where, max_side)
    elif isinstance(value, np.ndarray):
        return _encoded(Image.fromarray(value), where, max_side)
    else:
        data = _file_bytes(value, where, folder or pathlib.Path())
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()  # a file that ends too early is told here
            # A JPEG of several frames is a photograph with its preview (MPO), of which the first is shown.
            if image.format not in ("JPEG", "MPO") and getattr(image, "n_frames", 1) > 1:
                raise InvalidInput(f"{where} is animated: give one of its {image.n_frames} frames", field=where)  # type: ignore[attr-defined]
            if image.format in ("PNG", "JPEG", "MPO") and (max_side is None or max(image.size) <= max_side):
                return value if isinstance(value, Picture) else Picture.of_bytes(data, where)
            return _encoded(image, where, max_side)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
            raise InvalidInput(
                f"{where} is a HEIC file, which Pillow does not read: convert it to JPEG, or install pillow-heif and"
                " call pillow_heif.register_heif_opener() first",
                field=where,
            ) from None
        raise InvalidInput(f"{where} cannot be read as a picture: {error}", field=where) from error


def _file_bytes(value: Any, where: str, folder: pathlib.Path) -> bytes:
    if isinstance(value, Mapping):
        # Hugging Face writes {"bytes": ..., "path": ...} with either of them null.
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, pathlib.Path):
        return _read_file(folder / value, where)
    if not isinstance(value, str):
        raise InvalidInput(f"{where} is {type(value).__name__}; give {_FORMS}", field=where)
    if value.startswith("data:"):
        header, _, encoded = value.partition(",")
        if not header.endswith(";base64"):
            raise InvalidInput(f"{where} is a data: URL without base64: write data:image/png;base64,...", field=where)
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise InvalidInput(f"{where} is not base64: {error}", field=where) from None
    if value.startswith(("http://", "https://")):
        raise InvalidInput(f"{where} is an address, {value[:60]}: download the picture, and give its path", field=where)
    if value.startswith("file:"):
        value = urllib.parse.unquote(urllib.parse.urlsplit(value).path)
    return _read_file(folder / value, where)


def _read_file(path: pathlib.Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise InvalidInput(f"{where}: {error}", field=where) from None


def _encoded(image: Image.Image, where: str, max_side: int | None) -> Picture:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow clips these to 8 bits; their high byte is what servers keep
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode not in ("RGB", "RGBA", "L"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if max_side is not None and max(image.size) > max_side:
        image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Picture.of_bytes(buffer.getvalue(), where)
