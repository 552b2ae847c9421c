"""Pictures of rows in each input form."""

import base64
import io
import pathlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from fovea.wire.errors import InvalidInput
from fovea_data import read_picture
from fovea_rollout.messages import Picture
from tests.unit.fovea_data.pictures import encoded, image, write

PNG = encoded("PNG")


@pytest.mark.parametrize("form", ["path", "text", "file URL", "data URL", "bytes", "{bytes}", "{path}", "{url}", "PIL"])
def test_every_form_is_the_same_picture(form: str, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "of blue" / "a.png", PNG)
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    forms = {
        "path": path,
        "text": "of blue/a.png",
        "file URL": path.as_uri(),
        "data URL": url,
        "bytes": PNG,
        "{bytes}": {"bytes": PNG, "path": None},
        "{path}": {"bytes": None, "path": "of blue/a.png"},
        "{url}": {"url": url, "detail": "auto"},
        "PIL": Image.open(io.BytesIO(PNG)),
    }
    assert read_picture(forms[form], folder=tmp_path).data == PNG


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_what_the_api_takes_stays_as_it_is(kind: str) -> None:
    data = encoded(kind)
    assert read_picture(data) == Picture(data, kind.lower())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["WEBP", "BMP", "TIFF", "GIF"])
def test_other_formats_become_png(kind: str) -> None:
    arguments = {"lossless": True} if kind == "WEBP" else {}
    picture = read_picture(encoded(kind, **arguments))
    assert picture.format == "png"
    shown = np.asarray(Image.open(io.BytesIO(picture.data)).convert("RGB"))
    np.testing.assert_array_equal(shown, np.asarray(image(200)))


def test_pixels_are_a_picture() -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    shown = Image.open(io.BytesIO(read_picture(pixels).data))
    np.testing.assert_array_equal(np.asarray(shown), pixels)


@pytest.mark.parametrize(("size", "shown"), [((40, 20), (16, 8)), ((20, 40), (8, 16)), ((16, 16), (16, 16))])
def test_large_pictures_are_shrunk(size: tuple[int, int], shown: tuple[int, int]) -> None:
    assert read_picture(encoded("JPEG", size=size), max_side=16).size == shown


def test_shrinking_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for side in (40, 17, 15, 40):
        read_picture(encoded("PNG", size=(side, 8)), max_side=17)
    said = ["pictures with more than 17 pixels on the longer side are shrunk; max_side sets the limit"]
    assert caplog.messages == said


def test_a_turned_photograph_stays_upright_when_it_is_shrunk() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert read_picture(encoded("JPEG", size=(40, 20), exif=exif), max_side=16).size == (8, 16)


def test_sixteen_bits_keep_their_high_byte() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 32), 0x80FF, np.uint16)).save(buffer, "PNG")
    shown = Image.open(io.BytesIO(read_picture(buffer.getvalue(), max_side=16).data))
    assert set(np.asarray(shown).ravel()) == {0x80}


def film() -> bytes:
    buffer = io.BytesIO()
    image(0).save(buffer, "GIF", save_all=True, append_images=[image(200)])
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (PNG[:40], "rows:3 cannot be read as a picture"),
        (b"not a picture", "rows:3 cannot be read as a picture: cannot identify image file$"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "rows:3 is a HEIC file, which Pillow cannot read: convert it to JPEG"),
        (film(), "rows:3 is animated: give one of its 2 frames"),
        ("missing.png", "rows:3: .*No such file"),
        ("https://example.org/a.png", "rows:3 is a web address, https://example.org/a.png: download"),
        ("data:image/png;base64,***", "rows:3 is not base64"),
        ("data:image/svg+xml,<svg/>", "rows:3 is a data: URL that is not base64"),
        (17, "rows:3 has type int; give a path"),
        ({"bytes": None, "path": None}, "rows:3 has type NoneType; give a path"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(value: object, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_picture(value, "rows:3", folder=tmp_path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Image.fromarray(np.zeros((4, 4), np.int32)), r"32-bit pixels \(mode I\)"),
        (Image.fromarray(np.zeros((4, 4), np.float32)), r"32-bit pixels \(mode F\)"),
        (np.zeros((4, 4), np.float32), r"32-bit pixels \(mode F\)"),
        (np.zeros((4, 4, 3), np.float32), r"array of float32 \[4, 4, 3\]; it must be uint8"),
        (np.zeros((4, 4, 5), np.uint8), r"array of uint8 \[4, 4, 5\]"),
    ],
)
def test_pixels_that_would_be_clipped_are_refused_by_name(value: object, words: str) -> None:
    """Before this check, they became black and white silently."""
    with pytest.raises(InvalidInput, match=f"^rows.7. .*{words}"):
        read_picture(value, "rows[7]")
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, "TIFF")
        with pytest.raises(InvalidInput, match=words):
            read_picture(buffer.getvalue(), "rows[7]")


@pytest.mark.parametrize("form", ["object", "file"])
def test_an_animation_is_refused_in_every_form(form: str) -> None:
    buffer = io.BytesIO()
    image(200).save(buffer, "GIF", save_all=True, append_images=[image(10)])
    value = Image.open(buffer) if form == "object" else buffer.getvalue()
    with pytest.raises(InvalidInput, match="picture is animated: give one of its 2 frames"):
        read_picture(value)


def test_a_truncated_object_is_named() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (100, 100, 3), np.uint8)).save(buffer, "PNG")
    value = Image.open(io.BytesIO(buffer.getvalue()[:20_000]))
    with pytest.raises(InvalidInput, match=r"^rows.7. cannot be read as a picture"):
        read_picture(value, "rows[7]")


def test_metadata_that_is_too_large_is_named() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("workflow", "x" * 2_000_000, zip=True)
    buffer = io.BytesIO()
    image(200).save(buffer, "PNG", pnginfo=info)
    with pytest.raises(InvalidInput, match=r"too much metadata"):
        read_picture(buffer.getvalue())
