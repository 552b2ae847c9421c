"""Pictures of a dataset, in whichever form a row has them, as what the Tinker API takes: a PNG or a JPEG file."""

from __future__ import annotations

import base64
import binascii
import io
import pathlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Message, Part, Picture

IMAGE_MARK = "<image>"
"""Stands in a text for a picture of the row's column, as in the datasets of verl and EasyR1."""
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
        return _of_object(value, where, max_side)
    elif isinstance(value, np.ndarray):
        return _of_array(value, where, max_side)
    else:
        data = _file_bytes(value, where, folder or pathlib.Path())
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()  # a file that ends too early is told here
            _refuse_animation(image, where)
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
        if "ecompressed data too large" in str(error):  # Pillow's bound on texts and profiles of a PNG
            raise InvalidInput(
                f"{where} is a PNG whose metadata (texts, colour profile) is too large: save it without metadata, as"
                " mogrify -strip does",
                field=where,
            ) from error
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


def _of_object(image: Image.Image, where: str, max_side: int | None) -> Picture:
    try:
        _refuse_animation(image, where)
        return _encoded(image, where, max_side)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # it is decoded only now
        raise InvalidInput(f"{where} cannot be read as a picture: {error}", field=where) from error


def _of_array(pixels: np.ndarray, where: str, max_side: int | None) -> Picture:
    try:
        image = Image.fromarray(pixels)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"{where} is an array of {pixels.dtype} {list(pixels.shape)}: give uint8 [height, width, 3]", field=where
        ) from error
    return _encoded(image, where, max_side)


def _refuse_animation(image: Image.Image, where: str) -> None:
    # A JPEG of several frames is a photograph with its preview (MPO), of which the first is shown.
    if image.format not in ("JPEG", "MPO") and (frames := getattr(image, "n_frames", 1)) > 1:
        raise InvalidInput(f"{where} is animated: give one of its {frames} frames", field=where)


def _encoded(image: Image.Image, where: str, max_side: int | None) -> Picture:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow clips these to 8 bits; their high byte is what servers keep
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):  # Pillow clips these at 255 too, and their range is not known
        raise InvalidInput(
            f"{where} has pixels of 32 bits, mode {image.mode}: scale them to 8 bits, as in"
            " Image.fromarray((255 * values / values.max()).astype('uint8'))",
            field=where,
        )
    if image.mode not in ("RGB", "RGBA", "L"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if max_side is not None and max(image.size) > max_side:
        image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Picture.of_bytes(buffer.getvalue(), where)


class PictureColumn:
    """The pictures that a row has in its column `images` or `image`, which messages take one after another.

    Args:
        row: A column that is an empty list is there; one that is null or missing is not.
        where: Names the messages in errors.
        read: Reads one picture, given its name for errors.

    Raises:
        InvalidInput: Both columns have pictures, or one cannot be read.
    """

    def __init__(self, row: Mapping[str, Any], where: str, read: Callable[[Any, str], Picture]) -> None:
        several, single = _listed(row.get("images")), _listed(row.get("image"))
        if several and single:
            raise InvalidInput(f"{where}: the row has pictures in both images and image: leave one empty", field=where)
        self._is_there = several is not None or single is not None
        self._pictures = [
            read(value, f"{where}: picture {index} of the row") for index, value in enumerate(several or single or [])
        ]
        self._where, self._taken, self.is_touched = where, 0, False

    def take(self, where: str) -> Picture:
        """The next one. Raises InvalidInput if there is none."""
        self.is_touched = True
        if self._taken == len(self._pictures):
            raise InvalidInput(f"{where} is missing: the row has {self._taken} pictures in its column", field=where)
        self._taken += 1
        return self._pictures[self._taken - 1]

    def spliced(self, text: str) -> Iterator[Part]:
        """Yields a text with pictures in the places of its marks. Without a column, marks are text."""
        for place, run in enumerate(text.split(IMAGE_MARK) if self._is_there else [text]):
            if place:
                yield self.take(f"{self._where}: {IMAGE_MARK}")
            if run:
                yield run

    def placed(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with the column's pictures first in the first user message, if none was taken yet.

        Raises InvalidInput if there is no such message, or if some pictures but not all were taken.
        """
        read, left = list(messages), self._pictures[self._taken :]
        if not left:
            return read
        if self.is_touched:
            raise InvalidInput(
                f"{self._where} leaves {len(left)} pictures of the row without a place", field=self._where
            )
        first = next((index for index, one in enumerate(read) if one.role == "user"), None)
        if first is None:
            raise InvalidInput(f"{self._where} has no user message, to which its pictures belong", field=self._where)
        read[first] = replace(read[first], parts=(*left, *read[first].parts))
        return read


def _listed(found: Any) -> list[Any] | None:
    return None if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
