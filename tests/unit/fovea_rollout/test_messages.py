"""Messages and their pictures. The size of a picture comes from the header of its file."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Picture, parse_message

PNG = Picture.of_pixels(np.zeros((4, 8, 3), np.uint8))


def test_a_png_has_the_size_of_its_pixels() -> None:
    assert PNG.size == (8, 4)


def test_a_jpeg_that_is_shown_turned_has_the_size_that_is_shown() -> None:
    image = Image.new("RGB", (8, 4))
    exif = image.getexif()
    sizes = []
    for orientation in (1, 6):
        exif[0x0112] = orientation
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", exif=exif)
        sizes.append(Picture.of_bytes(buffer.getvalue()).size)
    assert sizes == [(8, 4), (4, 8)]


def webp(**options: Any) -> bytes:
    pixels = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "WEBP", lossless=True, **options)
    return buffer.getvalue()


def test_a_webp_becomes_a_png_of_the_same_pixels() -> None:
    uri = f"data:image/webp;base64,{base64.b64encode(webp()).decode()}"
    part = {"type": "image_url", "image_url": {"url": uri}}
    (picture,) = parse_message({"role": "user", "content": [part]}).pictures
    assert (picture.format, picture.size) == ("png", (8, 4))
    with Image.open(io.BytesIO(picture.data)) as image:
        assert np.asarray(image).ravel().tolist() == list(range(4 * 8 * 3))


def test_a_webp_that_is_shown_turned_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert Picture.of_bytes(webp(exif=exif)).size == (4, 8)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (webp()[:30], "image is a WebP file that cannot be read"),
        (webp(save_all=True, append_images=[Image.new("RGB", (8, 4))]), "image is animated and has 2 frames"),
        (b"GIF89a", "image is not a PNG, JPEG or WebP file"),
    ],
)
def test_other_files_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Picture.of_bytes(data)


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\nnothing", PNG.data[:20]])
def test_a_file_without_a_header_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        _ = Picture(data, "png").size


def test_a_picture_gives_back_the_pixels_that_it_was_made_of() -> None:
    pixels = np.random.default_rng(0).integers(256, size=(5, 7, 3)).astype(np.uint8)
    np.testing.assert_array_equal(Picture.of_pixels(pixels).pixels, pixels)
