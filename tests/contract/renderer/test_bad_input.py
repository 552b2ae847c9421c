"""Errors name the chunk, the reason and the fix, and do not affect other requests."""

import pytest

from fovea.api.v1 import model_input_pb2
from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea.wire.errors import ContextOverflow, FoveaError, InvalidInput, NotFound
from tests.contract.renderer.inputs import image, model_input, reference, text, token_ids
from tests.served_renderer import Served
from tests.unit.renderer.pictures import encoded, picture, png
from tests.unit.renderer.test_image_header import png_header

Chunks = list[model_input_pb2.Chunk]

GOOD = png(224, 224, seed=9)
JPEG = encoded(picture(64, 64), "JPEG")
ANIMATED = encoded(picture(8, 8), save_all=True, append_images=[picture(8, 8, 1)])


def bare(data: bytes) -> model_input_pb2.Chunk:
    return model_input_pb2.Chunk(image=model_input_pb2.ImageChunk(data=data))


BAD: list[tuple[str, Chunks, type[FoveaError], str]] = [
    ("nothing", [], InvalidInput, "no tokens; send at least one"),
    ("only empty text", [text(), text()], InvalidInput, "no tokens"),
    ("empty chunk", [text(1), model_input_pb2.Chunk()], InvalidInput, r"chunks\[1\]: the chunk is empty"),
    ("half a token", [model_input_pb2.Chunk(tokens=model_input_pb2.TokenChunk(tokens=b"12345"))], InvalidInput,
     r"chunks\[0\].tokens has 5 bytes, which is not a multiple of 4"),
    ("vocabulary", [text(1), text(2, 1280)], InvalidInput,
     r"chunks\[1\]: token 1 is 1280, outside the vocabulary; ids lie in 0..1279"),
    ("negative id", [text(-1)], InvalidInput, r"chunks\[0\]: token 0 is -1, outside the vocabulary"),
    ("context", [text(*[1] * 8200), image(GOOD)], ContextOverflow,
     r"8264 tokens \(8200 of text, 64 of images\), above the context of 8192"),
    ("context by image", [text(1), image(png_header(7000, 7000))], ContextOverflow, "16384 of images"),
    ("corrupt PNG", [text(1), image(GOOD[:2000] + b"damage" + GOOD[2006:])], InvalidInput,
     r"chunks\[1\]: the PNG is truncated or corrupt"),
    ("truncated PNG", [text(1), image(GOOD[:3000])], InvalidInput, r"chunks\[1\]: the PNG is truncated or corrupt"),
    ("truncated JPEG", [image(JPEG[:700], "JPEG")], InvalidInput, r"chunks\[0\]: the JPEG is truncated or corrupt"),
    ("header alone", [image(png_header(64, 64))], InvalidInput, r"chunks\[0\]: the PNG is truncated or corrupt"),
    ("PNG as JPEG", [image(GOOD, "JPEG")], InvalidInput, r"chunks\[0\]: the image is declared JPEG but is PNG"),
    ("JPEG as PNG", [image(JPEG)], InvalidInput, r"chunks\[0\]: the image is declared PNG but is JPEG"),
    ("WebP", [image(encoded(picture(64, 64), "WEBP"))], InvalidInput, r"chunks\[0\]: the image is WebP; send PNG or"),
    ("no format", [bare(GOOD)], InvalidInput, r"chunks\[0\]: image format 0 is not supported"),
    ("animated", [image(ANIMATED)], InvalidInput, r"chunks\[0\]: the PNG is animated \(2 frames\)"),
    ("no bytes", [image(b"")], InvalidInput, r"chunks\[0\]: the image has no bytes"),
    ("bomb", [image(png_header(30_000, 30_000))], InvalidInput, r"chunks\[0\]: the image is 30000x30000.*above the"),
    ("no pixels", [image(png_header(0, 7))], InvalidInput, r"chunks\[0\]: the image is 0x7; it needs"),
    ("thin", [image(png(1, 201))], InvalidInput, r"chunks\[0\]: the image is 1x201; its sides may differ by"),
    ("count too low", [text(1), image(GOOD, expected=63)], InvalidInput,
     r"chunks\[1\]: expected_tokens is 63 but the image takes 64 tokens.*; send 64 or leave it out"),
    ("count too high", [text(1), image(GOOD, expected=65)], InvalidInput, "expected_tokens is 65 but"),
    ("count of zero", [image(GOOD, expected=0)], InvalidInput, "expected_tokens is 0 but the image takes 64"),
    ("not held", [text(1), reference(sha256="ab" * 32)], NotFound,
     rf"chunks\[1\]: no image with SHA-256 {'ab' * 32} is held; send it by PutImage"),
    ("no location", [reference()], InvalidInput, r"chunks\[0\]: the image reference has neither sha256 nor uri"),
    ("host", [text(1), reference(uri="http://images.example/a.png")], InvalidInput,
     r"chunks\[1\]: host 'images.example' is not in the renderer's setting image_hosts"),
    ("second image", [image(GOOD), text(1), image(GOOD[:3000])], InvalidInput, r"chunks\[2\]: the PNG is truncated"),
]  # fmt: skip


@pytest.mark.parametrize(("chunks", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
async def test_bad_input_is_named_and_the_next_request_works(
    qwen3_vl: Served, chunks: Chunks, error: type[FoveaError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        await qwen3_vl.client.render(model_input(*chunks))
    assert type(raised.value) is error
    assert raised.value.field is not None
    assert raised.value.field.startswith("chunks")
    good = await qwen3_vl.client.render(model_input(text(1, 2), image(GOOD, expected=64), text(3)))
    assert (len(token_ids(good)), good.spans[0].offset) == (67, 2)


@pytest.mark.parametrize("name", ["<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"])
async def test_a_pad_token_in_the_place_of_an_image_is_refused_by_name(vision: Served, name: str) -> None:
    family = vision.family
    reserved = {title: token_id for token_id, title in family.reserved_ids.items()}
    assert family.opener_id is not None
    message = rf"chunks\[1\]: token 2 is {reserved[name]} \({name.replace('|', '[|]')}\), which stands for an image"
    with pytest.raises(InvalidInput, match=message):
        await vision.client.render(model_input(image(GOOD), text(1, family.opener_id, reserved[name])))
    with pytest.raises(InvalidInput, match=r"chunks\[2\]: token 0"):
        await vision.client.render(model_input(text(family.opener_id), text(), text(reserved[name])))


async def test_a_pad_token_by_itself_is_a_token_that_a_model_may_have_sampled(vision: Served) -> None:
    pad = next(iter(vision.family.reserved_ids))
    rendered = await vision.client.render(model_input(image(GOOD), text(1, pad, 2)))
    assert token_ids(rendered)[-3:] == [1, pad, 2]
    assert len(rendered.spans) == 1


async def test_a_text_only_model_takes_no_images(qwen3: Served) -> None:
    message = r"chunks\[1\]: .*\(qwen3\) is a text-only model and takes no images"
    with pytest.raises(InvalidInput, match=message):
        await qwen3.client.render(model_input(text(1), image(GOOD)))
    with pytest.raises(InvalidInput, match=message):
        await qwen3.client.render(model_input(text(1), reference(sha256="ab" * 32)))
    assert token_ids(await qwen3.client.render(model_input(text(1)))) == [1]


async def test_an_image_above_the_byte_limit_is_refused_while_it_comes(qwen3_vl: Served) -> None:
    with pytest.raises(InvalidInput, match=f"more than {MAX_IMAGE_BYTES} bytes, the limit"):
        await qwen3_vl.client.put_image(GOOD + bytes(MAX_IMAGE_BYTES))
    await qwen3_vl.client.render(model_input(image(GOOD)))
