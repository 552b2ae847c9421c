"""Reads the format and the size of an encoded image from its header, without decoding a pixel.

This refuses decompression bombs (few bytes, many pixels) before memory is allocated for them. Only PNG and JPEG are
supported. `InvalidChunk` is the error for all inputs that cannot be rendered.
"""

import io
import re
from dataclasses import dataclass
from typing import Literal

import imagesize

from fovea.wire.conventions import MAX_IMAGE_ASPECT_RATIO, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from fovea.wire.errors import InvalidInput

Cause = Literal[
    "animated",
    "aspect_ratio",
    "chunk",
    "corrupt",
    "empty_image",
    "expected_tokens",
    "format_mismatch",
    "no_images",
    "pixels",
    "processor",
    "reserved_token",
    "scans",
    "size_bytes",
    "unknown_format",
    "uri",
    "vocabulary",
]

ImageFormat = Literal["PNG", "JPEG"]

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_SIGNATURE = b"\xff\xd8\xff"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")  # except byte stuffing and markers without a segment
_START_OF_SCAN, _END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
MAX_SCANS = 100
"""The most scans of a progressive JPEG. Encoders write about ten. A scan of a hundred bytes costs a decoder a pass over
all pixels, so a small file with many scans would keep a worker busy."""
_OTHER_SIGNATURES = (
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"%PDF", "PDF"),
)


class InvalidChunk(Exception):
    """The error for an image or another chunk that cannot be rendered. `at` adds the chunk's position in its request.

    Args:
        cause: The label in the metric of refused inputs.
        message: The problem and the fix, for the client.
    """

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(cause, message)
        self.cause: Cause = cause
        self.message = message

    def at(self, chunk_index: int) -> InvalidInput:
        """Returns the error for the client. It names the chunk."""
        field = chunk_field(chunk_index)
        return InvalidInput(f"{field}: {self.message}", field=field, cause=self.cause)


def chunk_field(index: int) -> str:
    """Returns the path of a chunk in error messages."""
    return f"chunks[{index}]"


@dataclass(frozen=True)
class ImageHeader:
    """The format and the size of an image, in pixels as stored, before its EXIF orientation is applied."""

    format: ImageFormat
    width: int
    height: int


def read(data: bytes, declared: ImageFormat) -> ImageHeader:
    """Reads and checks the header of an encoded image.

    Raises InvalidChunk for an image with too many bytes, another format than declared, a broken header, no pixels, too
    many pixels, an extreme aspect ratio, or too many scans.
    """
    if not data:
        raise InvalidChunk("empty_image", "the image has no bytes")
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidChunk(
            "size_bytes", f"the image has {len(data)} bytes, above the limit of {MAX_IMAGE_BYTES}; send a smaller one"
        )
    found = _format(data)
    if found != declared:
        raise InvalidChunk(
            "format_mismatch", f"the image is declared {declared} but is {found}; declare it {found}, or re-encode it"
        )
    # This is the size as stored. The EXIF orientation is applied after decoding.
    width, height = imagesize.get(io.BytesIO(data), exif_rotation=False)
    if min(width, height) < 0:
        part = {"PNG": "IHDR", "JPEG": "frame"}[found]
        raise InvalidChunk("corrupt", f"the {found} is truncated or corrupt: it has no complete {part} header")
    check_size(width, height)
    if found == "JPEG":
        _check_scans(data)
    return ImageHeader(found, width, height)


def _format(data: bytes) -> ImageFormat:
    if data.startswith(_PNG_SIGNATURE):
        return "PNG"
    if data.startswith(_JPEG_SIGNATURE):
        return "JPEG"
    name = next((name for signature, name in _OTHER_SIGNATURES if data.startswith(signature)), None)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        name = "WebP"
    elif data[4:8] == b"ftyp":
        name = "AVIF, HEIC or a video"
    what = f"is {name}" if name else f"starts with the bytes {data[:8].hex(' ')}, which no supported format does"
    raise InvalidChunk("unknown_format", f"the image {what}; send PNG or JPEG")


def check_size(width: int, height: int) -> None:
    """Raises InvalidChunk for a size, in pixels, that is empty, too large, or of an extreme aspect ratio."""
    if width == 0 or height == 0:
        raise InvalidChunk("empty_image", f"the image is {width}x{height}; it needs at least one pixel")
    if width * height > MAX_IMAGE_PIXELS:
        raise InvalidChunk(
            "pixels",
            f"the image is {width}x{height}, {width * height} pixels, above the limit of {MAX_IMAGE_PIXELS};"
            " send a smaller one",
        )
    if max(width, height) > MAX_IMAGE_ASPECT_RATIO * min(width, height):
        raise InvalidChunk(
            "aspect_ratio",
            f"the image is {width}x{height}; its sides may differ by a factor of {MAX_IMAGE_ASPECT_RATIO} at most;"
            " crop or pad it",
        )


def _check_scans(data: bytes) -> None:
    """Raises InvalidChunk if the first image of a JPEG has more than `MAX_SCANS` scans.

    Data after that image, such as the video of a phone's photo, is ignored.

    Source: ITU T.81, annex B.
    """
    count, position = 0, len(_JPEG_SIGNATURE) - 1
    while (marker := _JPEG_MARKER.search(data, position)) and marker[0] != _END_OF_IMAGE:
        count += marker[0] == _START_OF_SCAN
        if count > MAX_SCANS:
            raise InvalidChunk("scans", f"the JPEG has more than {MAX_SCANS} scans; re-encode it")
        # The length of a segment includes the two bytes of the length itself.
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
