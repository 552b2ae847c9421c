"""Image headers are read and bounded before decoding."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea_renderer import image_header
from fovea_renderer.image_header import ImageFormat, ImageHeader, InvalidChunk
from tests.unit.renderer.pictures import encoded, picture, png


def png_header(width: int, height: int) -> bytes:
    """Returns a PNG that declares a size and contains no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"comment": b"x" * 60_000}, {"exif": b"Exif\0\0" + b"y" * 9_000}]
)
def test_reads_jpeg_sizes_behind_any_segments(options: dict[str, object]) -> None:
    assert image_header.read(encoded(picture(31, 17), "JPEG", **options), "JPEG") == ImageHeader("JPEG", 31, 17)


def test_reads_png_sizes() -> None:
    assert image_header.read(png(31, 17), "PNG") == ImageHeader("PNG", 31, 17)


def test_scans_are_counted_and_nothing_that_looks_like_them() -> None:
    data = encoded(picture(31, 17), "JPEG", progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    within = image_header.MAX_SCANS - data.count(b"\xff\xda")
    image_header.read(
        data[:-2] + last * within + data[-2:] + last * 500, "JPEG"
    )  # sizes after the end belong to an animation
    image_header.read(encoded(picture(31, 17), "JPEG", comment=b"\xff\xda" * 500), "JPEG")
    with pytest.raises(InvalidChunk, match="more than 100 scans") as refused:
        image_header.read(data[:-2] + last * (within + 1) + data[-2:], "JPEG")
    assert refused.value.cause == "scans"


@pytest.mark.parametrize(
    ("data", "declared", "cause", "message"),
    [
        (b"", "PNG", "empty_image", "no bytes"),
        (b"\x89PNG" + b"\0" * (MAX_IMAGE_BYTES - 3), "PNG", "size_bytes", f"above the limit of {MAX_IMAGE_BYTES}"),
        (png(8, 8), "JPEG", "format_mismatch", "declared JPEG but is PNG"),
        (encoded(picture(8, 8), "JPEG"), "PNG", "format_mismatch", "declared PNG but is JPEG"),
        (encoded(picture(8, 8), "GIF"), "PNG", "unknown_format", "is GIF; send PNG or JPEG"),
        (encoded(picture(8, 8), "WEBP"), "PNG", "unknown_format", "is WebP"),
        (encoded(picture(8, 8), "TIFF"), "JPEG", "unknown_format", "is TIFF"),
        (encoded(picture(8, 8), "BMP"), "JPEG", "unknown_format", "is BMP"),
        (b"\0\0\0\x20ftypavif" + b"\0" * 20, "JPEG", "unknown_format", "AVIF"),
        (b"hello, world", "PNG", "unknown_format", "68 65 6c 6c 6f"),
        (png(8, 8)[:20], "PNG", "corrupt", "no complete IHDR"),
        (encoded(picture(8, 8), "JPEG")[:25], "JPEG", "corrupt", "no complete frame header"),
        (png_header(0, 5), "PNG", "empty_image", "0x5"),
        (png_header(30_000, 30_000), "PNG", "pixels", "30000x30000, 900000000 pixels, above the limit of 64000000"),
        (png_header(2**31, 2**31), "PNG", "pixels", "above the limit"),
        (png(201, 1), "PNG", "aspect_ratio", "201x1.*factor of 200"),
    ],
)  # fmt: skip
def test_refuses_what_cannot_be_an_image(data: bytes, declared: ImageFormat, cause: str, message: str) -> None:
    with pytest.raises(InvalidChunk, match=message) as refused:
        image_header.read(data, declared)
    assert refused.value.cause == cause


def test_takes_the_longest_shape() -> None:
    assert image_header.read(png(200, 1), "PNG").width == 200


def test_says_the_size_of_a_jpeg_as_stored_before_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert image_header.read(encoded(picture(30, 20), "JPEG", exif=exif), "JPEG") == ImageHeader("JPEG", 30, 20)


@given(
    st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b""]),
    st.binary(max_size=200),
    st.sampled_from(["PNG", "JPEG"]),
)
def test_any_bytes_are_a_header_or_a_refusal(signature: bytes, rest: bytes, declared: ImageFormat) -> None:
    try:
        header = image_header.read(signature + rest, declared)
    except InvalidChunk:
        return
    assert header.width > 0
    assert header.height > 0
