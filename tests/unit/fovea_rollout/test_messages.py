"""The size of a picture is read from the header of its file."""

import io

import numpy as np
import pytest
from PIL import Image

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Picture

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


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\nnothing", PNG.data[:20]])
def test_a_file_without_a_header_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        _ = Picture(data, "png").size
