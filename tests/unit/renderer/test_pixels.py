"""Every kind of PNG and JPEG decodes to the RGB that a viewer shows."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from fovea_renderer import pixels
from fovea_renderer.image_header import ImageFormat, InvalidChunk
from fovea_rollout.pictures import read_picture
from tests.unit.renderer.pictures import encoded, picture, pixels_of

WIDTH, HEIGHT = 24, 16
RGB = picture(WIDTH, HEIGHT)
GREY = RGB.convert("L")
ALPHA = Image.fromarray(np.linspace(0, 255, WIDTH * HEIGHT).astype(np.uint8).reshape(HEIGHT, WIDTH))


def decoded(data: bytes, declared: ImageFormat = "PNG", width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    image = pixels.decode(data, declared, width, height)
    assert image.mode == "RGB"
    return pixels_of(image)


def on_white(colour: Image.Image, alpha: Image.Image) -> np.ndarray:
    """Returns colour * alpha + white * (1 - alpha), the formula of compositing, as floats."""
    share = np.asarray(alpha, dtype=np.float64)[..., None] / 255
    return np.asarray(colour.convert("RGB"), dtype=np.float64) * share + 255 * (1 - share)


def test_rgb_png_is_itself() -> None:
    assert np.array_equal(decoded(encoded(RGB)), pixels_of(RGB))


def test_interlaced_png_is_itself() -> None:
    # Adam7 by hand, because Pillow writes no interlaced PNG.
    assert np.array_equal(decoded(interlaced_png(pixels_of(RGB))), pixels_of(RGB))


def test_grey_is_repeated() -> None:
    assert np.array_equal(decoded(encoded(GREY)), np.repeat(pixels_of(GREY)[..., None], 3, axis=2))


def test_grey_jpeg_is_repeated() -> None:
    values = decoded(encoded(GREY, "JPEG"), "JPEG")
    assert np.array_equal(values[..., 0], values[..., 2])
    assert np.abs(values[..., 0].astype(int) - pixels_of(GREY)).mean() < 8


def test_one_bit_is_black_and_white() -> None:
    bits = GREY.convert("1")
    assert np.array_equal(decoded(encoded(bits))[..., 1], np.asarray(bits).astype(np.uint8) * 255)


def test_16_bit_grey_keeps_its_high_byte() -> None:
    values = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH)
    assert np.array_equal(decoded(encoded(Image.fromarray(values)))[..., 0], (values >> 8).astype(np.uint8))


def test_palette_without_transparency_is_its_colours() -> None:
    palette = RGB.quantize(32)
    assert np.array_equal(decoded(encoded(palette)), pixels_of(palette.convert("RGB")))


def test_palette_with_a_transparent_entry_shows_white_there() -> None:
    palette = RGB.quantize(32)
    values = decoded(encoded(palette, transparency=5))
    transparent = np.asarray(palette) == 5
    assert transparent.any()
    assert (values[transparent] == 255).all()
    assert np.array_equal(values[~transparent], pixels_of(palette.convert("RGB"))[~transparent])


def test_palette_with_graded_transparency_is_composited() -> None:
    palette = RGB.quantize(32)
    grades = bytes(range(0, 256, 8))
    alpha = Image.fromarray(np.frombuffer(grades, np.uint8)[np.asarray(palette)])
    assert np.abs(decoded(encoded(palette, transparency=grades)) - on_white(palette, alpha)).max() <= 1


def test_rgba_is_composited_on_white() -> None:
    image = RGB.copy()
    image.putalpha(ALPHA)
    assert np.abs(decoded(encoded(image)) - on_white(RGB, ALPHA)).max() <= 1


def test_grey_with_alpha_is_composited_on_white() -> None:
    image = GREY.copy()
    image.putalpha(ALPHA)
    assert image.mode == "LA"
    assert np.abs(decoded(encoded(image)) - on_white(GREY, ALPHA)).max() <= 1


@pytest.mark.parametrize("colour", [RGB, GREY])
def test_a_transparent_colour_shows_white(colour: Image.Image) -> None:
    key = colour.getpixel((3, 3))
    values = decoded(encoded(colour, transparency=key))
    assert (values[3, 3] == 255).all()
    elsewhere = np.any(np.atleast_3d(pixels_of(colour)) != np.atleast_1d(key), axis=-1)
    assert np.array_equal(values[elsewhere], pixels_of(colour.convert("RGB"))[elsewhere])


def test_cmyk_jpeg_has_its_colours() -> None:
    values = decoded(encoded(RGB.convert("CMYK"), "JPEG", quality=100), "JPEG")
    assert np.abs(values.astype(int) - pixels_of(RGB)).mean() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    plain = decoded(encoded(RGB, "JPEG"), "JPEG")
    turned = {
        1: plain,
        2: plain[:, ::-1],
        3: plain[::-1, ::-1],
        4: plain[::-1],
        5: plain.transpose(1, 0, 2),
        6: np.rot90(plain, -1),
        7: plain[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(plain),
    }[orientation]
    assert np.array_equal(decoded(encoded(RGB, "JPEG", exif=exif), "JPEG"), turned)


def test_unreadable_exif_leaves_the_picture_as_stored() -> None:
    broken = encoded(RGB, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    assert np.array_equal(decoded(broken, "JPEG"), decoded(encoded(RGB, "JPEG"), "JPEG"))


def with_metadata(size_bytes: int, compressed: bool) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("workflow", "x" * size_bytes, zip=compressed)
    return encoded(RGB, pnginfo=info)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_long_text_of_a_png_says_nothing_against_its_pixels(compressed: bool) -> None:
    assert np.array_equal(decoded(with_metadata(3_000_000, compressed)), pixels_of(RGB))


def test_a_text_that_would_fill_the_memory_is_refused_as_metadata() -> None:
    with pytest.raises(InvalidChunk, match=r"metadata .* is larger than 64 MiB"):
        decoded(with_metadata(70 * 2**20, compressed=True))


def test_animated_png_is_refused() -> None:
    animated = encoded(RGB, save_all=True, append_images=[GREY.convert("RGB"), RGB.rotate(180)])
    with pytest.raises(InvalidChunk, match=r"animated .3 frames.; send one frame"):
        decoded(animated)


def test_multi_picture_jpeg_shows_its_first() -> None:
    several = encoded(RGB, "MPO", save_all=True, append_images=[RGB.rotate(180)])
    assert np.array_equal(decoded(several, "JPEG"), decoded(encoded(RGB, "JPEG"), "JPEG"))


def test_a_size_other_than_the_header_said_is_refused() -> None:
    with pytest.raises(InvalidChunk, match="has a header of 25x16"):
        decoded(encoded(RGB), width=WIDTH + 1)


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("declared", ["PNG", "JPEG"])
def test_truncated_files_are_refused(declared: ImageFormat, kept: float) -> None:
    data = encoded(picture(200, 100), declared)
    with pytest.raises(InvalidChunk, match=f"the {declared} is truncated or corrupt"):
        decoded(data[: int(len(data) * kept)], declared, 200, 100)


@settings(max_examples=300)
@given(st.sampled_from(["PNG", "JPEG"]), st.integers(0, 2**31), st.binary(min_size=1, max_size=8))
def test_damaged_files_decode_or_are_refused(declared: ImageFormat, where: int, damage: bytes) -> None:
    data = bytearray(encoded(RGB, declared))
    where %= len(data)
    data[where : where + len(damage)] = damage
    try:
        values = decoded(bytes(data), declared)
    except InvalidChunk:
        return
    assert values.size == WIDTH * HEIGHT * 3


def interlaced_png(values: np.ndarray) -> bytes:
    """Returns an Adam7 PNG (PNG specification, section 8.2) of uint8 [height, width, 3]."""
    import struct
    import zlib

    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    rows = [
        b"\0" + row.tobytes()
        for top, left, row_step, column_step in passes
        for row in values[top::row_step, left::column_step]
        if row.size
    ]

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    size = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 8, 2, 0, 0, 1)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(b"".join(rows)))
        + chunk(b"IEND", b"")
    )


def upright(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def clear(colour: Image.Image) -> Image.Image:
    image = picture(300, 200).convert(colour.mode)
    image.putalpha(ALPHA.resize(image.size))
    return image


LARGE = picture(300, 200)
GREY_16 = Image.fromarray(np.linspace(0, 65535, 300 * 200).astype(np.uint16).reshape(200, 300))
FILES: dict[str, tuple[bytes, ImageFormat]] = {
    "RGB": (encoded(LARGE), "PNG"),
    "L": (encoded(LARGE.convert("L")), "PNG"),
    "one bit": (encoded(LARGE.convert("1")), "PNG"),
    "palette": (encoded(LARGE.quantize(32)), "PNG"),
    "palette with alpha": (encoded(LARGE.quantize(32), transparency=bytes(range(0, 256, 8))), "PNG"),
    "RGBA": (encoded(clear(RGB)), "PNG"),
    "LA": (encoded(clear(GREY)), "PNG"),
    "a transparent colour": (encoded(LARGE, transparency=LARGE.getpixel((3, 3))), "PNG"),
    "a transparent grey": (encoded(LARGE.convert("L"), transparency=80), "PNG"),
    "16 bits": (encoded(GREY_16), "PNG"),
    "16 bits, one transparent": (encoded(GREY_16, transparency=300), "PNG"),
    "CMYK": (encoded(LARGE.convert("CMYK"), "JPEG"), "JPEG"),
    **{f"EXIF {one}": (encoded(LARGE, "JPEG", exif=upright(one)), "JPEG") for one in range(1, 9)},
}


@pytest.mark.parametrize("side", [0, 1, 64, 97, 200, 299, 300])
@pytest.mark.parametrize("name", FILES)
def test_a_shrunk_image_is_the_one_that_the_client_would_send(name: str, side: int) -> None:
    data, kind = FILES[name]
    sent = read_picture(data, max_side=side or None)
    expected = decoded(sent.data, "PNG" if sent.format == "png" else "JPEG", *stored_size(sent.data))
    found = pixels.decode(data, kind, 300, 200, side)
    assert found.mode == "RGB"
    assert np.array_equal(pixels_of(found), expected)
    assert max(found.size) == (side or 300)


def stored_size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.size


def test_an_image_that_shrinks_to_a_line_is_refused() -> None:
    with pytest.raises(InvalidChunk, match="420x2; its sides may differ by a factor of 200 at most"):
        pixels.decode(encoded(picture(1000, 5)), "PNG", 1000, 5, 420)
