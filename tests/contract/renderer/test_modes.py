"""Unusual encodings of a picture give the same tensors as the plain picture."""

import numpy as np
import pytest
from PIL import Image

from tests.contract.renderer.inputs import image, model_input
from tests.served_renderer import Served
from tests.unit.renderer.pictures import encoded, picture
from tests.unit.renderer.test_pixels import interlaced_png

RGB = picture(120, 90, seed=5)
VALUES = np.asarray(RGB)
GREY = RGB.convert("L")
TURNED = Image.Exif()
TURNED[0x0112] = 6
HOLE = (np.add.outer(np.arange(90), np.arange(120)) % 7 == 0).astype(np.uint8)


def with_hole(colour: Image.Image) -> Image.Image:
    image = colour.copy()
    image.putalpha(Image.fromarray((1 - HOLE) * 255))
    return image


def white_in_hole(colour: Image.Image) -> Image.Image:
    return Image.fromarray(np.where(HOLE[..., None] == 1, 255, np.asarray(colour.convert("RGB"))).astype(np.uint8))


PALETTE = RGB.quantize(16)
PALETTE_HOLE = np.where((np.asarray(PALETTE) == 3)[..., None], 255, np.asarray(PALETTE.convert("RGB"))).astype(np.uint8)
DEEP = np.linspace(0, 65535, 120 * 90).astype(np.uint16).reshape(90, 120)
GREY_JPEG, CMYK_JPEG = encoded(GREY, "JPEG"), encoded(RGB.convert("CMYK"), "JPEG")


def reopened(data: bytes) -> Image.Image:
    import io

    return Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize(
    ("data", "image_format", "plain"),
    [
        pytest.param(encoded(GREY), "PNG", GREY.convert("RGB"), id="grey"),
        pytest.param(GREY_JPEG, "JPEG", reopened(GREY_JPEG), id="grey JPEG"),
        pytest.param(
            encoded(Image.fromarray(DEEP)), "PNG",
            Image.fromarray((DEEP >> 8).astype(np.uint8)).convert("RGB"), id="16-bit grey",
        ),
        pytest.param(encoded(GREY.convert("1")), "PNG", GREY.convert("1").convert("RGB"), id="1-bit"),
        pytest.param(encoded(PALETTE), "PNG", PALETTE.convert("RGB"), id="palette"),
        pytest.param(
            encoded(PALETTE, transparency=3), "PNG", Image.fromarray(PALETTE_HOLE), id="palette with transparency"
        ),
        pytest.param(encoded(with_hole(GREY)), "PNG", white_in_hole(GREY), id="LA"),
        pytest.param(encoded(with_hole(RGB)), "PNG", white_in_hole(RGB), id="RGBA"),
        pytest.param(CMYK_JPEG, "JPEG", reopened(CMYK_JPEG), id="CMYK JPEG"),
        pytest.param(encoded(RGB, exif=TURNED), "PNG", RGB.rotate(-90, expand=True), id="EXIF PNG"),
        pytest.param(
            encoded(RGB, "JPEG", exif=TURNED), "JPEG",
            reopened(encoded(RGB, "JPEG")).rotate(-90, expand=True), id="EXIF JPEG",
        ),
        pytest.param(interlaced_png(VALUES), "PNG", RGB, id="interlaced"),
        pytest.param(
            encoded(RGB, "JPEG", progressive=True), "JPEG", reopened(encoded(RGB, "JPEG", progressive=True)),
            id="progressive JPEG",
        ),
    ],
)  # fmt: skip
async def test_odd_encodings(qwen3_vl: Served, data: bytes, image_format: str, plain: Image.Image) -> None:
    both = await qwen3_vl.client.render(model_input(image(data, image_format), image(encoded(plain))))
    odd, expected = (span.feature for span in both.spans)
    assert odd.digest != expected.digest
    assert odd.tensors_sha256 == expected.tensors_sha256
    assert odd.token_count == expected.token_count
