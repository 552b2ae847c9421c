"""Reads pictures of a dataset in any common form, and makes them PNG or JPEG files, which the Tinker API accepts."""

from __future__ import annotations

import base64
import binascii
import io
import logging
import pathlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Message, Part, Picture, picture_problem

logger = logging.getLogger(__name__)

IMAGE_MARK = "<image>"
"""Represents a picture of the row's column in a text, as in the datasets of verl and EasyR1."""
_FORMS = "a path, file: or data: URL, bytes, {'bytes': ...}, {'path': ...}, {'url': ...}, a PIL image or uint8 pixels"


_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""Types of HEIC and HEIF files, in bytes 8 to 12 of the file."""


def read_picture(
    value: Any, where: str = "picture", *, folder: pathlib.Path | None = None, max_side: int | None = None
) -> Picture:
    """Reads a picture.

    The value is a path, a `file:` or `data:` URL, the bytes of a file, a mapping with one of these (as in Hugging Face
    `datasets` and OpenAI's format), a `Picture`, a PIL image, or pixels as uint8 [height, width, 3].

    PNG and JPEG files within `max_side` are not changed. All other pictures that Pillow reads become PNG.

    Args:
        value: The picture.
        where: Name of the picture in errors.
        folder: Folder of relative paths; the working directory by default.
        max_side: The most pixels of the longer side. Larger pictures are shrunk, which is logged once. None does not
            limit the size.

    Raises:
        InvalidInput: The value is not a picture, is cut off, or is animated. The error names `where`.
    """
    if isinstance(value, Picture):
        data = value.data
    elif isinstance(value, Image.Image):
        return _of_object(value, where, max_side)
    elif isinstance(value, np.ndarray):
        return _of_array(value, where, max_side)
    else:
        data = _file_bytes(value, where, folder or pathlib.Path())
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()  # raises an error if the file is cut off
            _refuse_animation(image, where)
            if image.format in ("PNG", "JPEG", "MPO") and (max_side is None or max(image.size) <= max_side):
                return value if isinstance(value, Picture) else Picture.of_bytes(data, where)
            return _encoded(image, where, max_side)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
            raise InvalidInput(
                f"{where} is a HEIC file, which Pillow cannot read: convert it to JPEG, or install pillow-heif and"
                " call pillow_heif.register_heif_opener() first",
                field=where,
            ) from None
        if "ecompressed data too large" in str(error):  # Pillow's limit for texts and profiles of a PNG
            raise InvalidInput(
                f"{where} is a PNG with too much metadata (texts, colour profile): save it without metadata, as"
                " mogrify -strip does",
                field=where,
            ) from error
        raise InvalidInput(f"{where} cannot be read as a picture: {picture_problem(error)}", field=where) from error


def _file_bytes(value: Any, where: str, folder: pathlib.Path) -> bytes:
    if isinstance(value, Mapping):
        # Hugging Face writes {"bytes": ..., "path": ...}, and one of the two is null.
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, pathlib.Path):
        return _read_file(folder / value, where)
    if not isinstance(value, str):
        raise InvalidInput(f"{where} has type {type(value).__name__}; give {_FORMS}", field=where)
    if value.startswith("data:"):
        header, _, encoded = value.partition(",")
        if not header.endswith(";base64"):
            raise InvalidInput(
                f"{where} is a data: URL that is not base64: write data:image/png;base64,...", field=where
            )
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise InvalidInput(f"{where} is not base64: {error}", field=where) from None
    if value.startswith(("http://", "https://")):
        raise InvalidInput(
            f"{where} is a web address, {value[:60]}: download the picture and give its path", field=where
        )
    if value.startswith("file:"):
        value = urllib.parse.unquote(urllib.parse.urlsplit(value).path)
    return _read_file(folder / value, where)


def _read_file(path: pathlib.Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise InvalidInput(f"{where}: {error}", field=where) from None


def _of_object(image: Image.Image, where: str, max_side: int | None) -> Picture:
    try:
        _refuse_animation(image, where)
        return _encoded(image, where, max_side)
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:  # Pillow decodes the image only here
        raise InvalidInput(f"{where} cannot be read as a picture: {picture_problem(error)}", field=where) from error


def _of_array(pixels: np.ndarray, where: str, max_side: int | None) -> Picture:
    try:
        image = Image.fromarray(pixels)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"{where} is an array of {pixels.dtype} {list(pixels.shape)}; it must be uint8 [height, width, 3]",
            field=where,
        ) from error
    return _encoded(image, where, max_side)


def _refuse_animation(image: Image.Image, where: str) -> None:
    # A JPEG with several frames (MPO) is a photograph with its preview, and the first frame is the photograph.
    if image.format not in ("JPEG", "MPO") and (frames := getattr(image, "n_frames", 1)) > 1:
        raise InvalidInput(f"{where} is animated: give one of its {frames} frames", field=where)


def _encoded(image: Image.Image, where: str, max_side: int | None) -> Picture:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow clips to 8 bits here, but servers use the high byte
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):  # Pillow clips at 255 here too, and the range of the values is unknown
        raise InvalidInput(
            f"{where} has 32-bit pixels (mode {image.mode}): scale them to 8 bits, for instance with"
            " Image.fromarray((255 * values / values.max()).astype('uint8'))",
            field=where,
        )
    if image.mode not in ("RGB", "RGBA", "L"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if max_side is not None and max(image.size) > max_side:
        _note_shrinking(max_side)
        image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Picture.of_bytes(buffer.getvalue(), where)


@cache
def _note_shrinking(max_side: int) -> None:
    logger.warning("pictures with more than %d pixels on the longer side are shrunk; max_side sets the limit", max_side)


class PictureColumn:
    """The pictures of a row's column `images` or `image`, which its messages use one after another.

    Args:
        row: The row. A column with an empty list exists; a null or missing column does not.
        where: Name of the messages in errors.
        read: Reads one picture. Its second argument is the name of the picture in errors.

    Raises:
        InvalidInput: Both columns have pictures, or a picture cannot be read.
    """

    def __init__(self, row: Mapping[str, Any], where: str, read: Callable[[Any, str], Picture]) -> None:
        several, single = _listed(row.get("images")), _listed(row.get("image"))
        if several and single:
            raise InvalidInput(
                f"{where}: both images and image of the row have pictures: leave one of them empty", field=where
            )
        self._is_there = several is not None or single is not None
        self._pictures = [
            read(value, f"{where}: picture {index} of the row") for index, value in enumerate(several or single or [])
        ]
        self._where, self._taken, self.is_touched = where, 0, False

    def take(self, where: str) -> Picture:
        """Returns the next picture. Raises InvalidInput if none is left."""
        self.is_touched = True
        if self._taken == len(self._pictures):
            raise InvalidInput(f"{where} has no picture: the column of the row has only {self._taken}", field=where)
        self._taken += 1
        return self._pictures[self._taken - 1]

    def spliced(self, text: str) -> Iterator[Part]:
        """Yields the parts of a text in which pictures replace the marks. Without a column, marks stay text."""
        for place, run in enumerate(text.split(IMAGE_MARK) if self._is_there else [text]):
            if place:
                yield self.take(f"{self._where}: {IMAGE_MARK}")
            if run:
                yield run

    def placed(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages. If no picture is used yet, they come first in the first user message.

        Raises InvalidInput if there is no user message, or if some of the pictures are used but not all.
        """
        read, left = list(messages), self._pictures[self._taken :]
        if not left:
            return read
        if self.is_touched:
            raise InvalidInput(
                f"{self._where} does not use {len(left)} pictures of the row: add {IMAGE_MARK} for each",
                field=self._where,
            )
        first = next((index for index, one in enumerate(read) if one.role == "user"), None)
        if first is None:
            raise InvalidInput(f"{self._where} has no user message for the pictures of the row", field=self._where)
        read[first] = replace(read[first], parts=(*left, *read[first].parts))
        return read


def _listed(found: Any) -> list[Any] | None:
    return None if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
