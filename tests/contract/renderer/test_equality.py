"""The renderer's output equals the output of the family's own processor for the whole prompt, token for token and bit
for bit.
"""

import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoProcessor

from fovea.api.v1 import model_input_pb2
from fovea.wire.errors import InvalidInput
from fovea_rollout.pictures import read_picture
from tests.contract.renderer.inputs import image, model_input, positions, text, token_ids
from tests.served_renderer import Served
from tests.unit.renderer.pictures import encoded, picture

SIZES = [
    (224, 224),
    (150, 224),
    (400, 300),
    (480, 360),
    (32, 32),
    (1, 1),
    (640, 33),
    (199, 1),
    (511, 769),
    (28, 1000),
]


@cache
def own_processor(directory: Path) -> Any:
    return AutoProcessor.from_pretrained(directory)


@cache
def own_model(directory: Path) -> Any:
    """The model without weights: `get_rope_index` only needs the configuration."""
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.from_pretrained(directory))


@dataclass(frozen=True)
class Reference:
    """The output of the family's own processor and model for a prompt with images."""

    ids: list[int]
    pixel_values: np.ndarray
    grids: list[list[int]]
    positions: np.ndarray


def reference(directory: Path, prompt: str, files: list[bytes]) -> Reference:
    images = [Image.open(io.BytesIO(file)) for file in files]
    batch = own_processor(directory)(
        text=[prompt], images=images, return_tensors="pt", do_rescale=False, do_normalize=False,
        return_mm_token_type_ids=True,
    )  # fmt: skip
    rope, _ = own_model(directory).get_rope_index(
        batch["input_ids"], batch["mm_token_type_ids"], image_grid_thw=batch["image_grid_thw"]
    )
    return Reference(
        batch["input_ids"][0].tolist(),
        batch["pixel_values"].numpy(),
        batch["image_grid_thw"].tolist(),
        rope[:, 0].numpy(),
    )


def chunks_of(directory: Path, prompt: str, files: list[bytes], image_format: str) -> list[model_input_pb2.Chunk]:
    """Returns the prompt as a client sends it: encoded text around the images, without placeholders."""
    tokenizer = own_processor(directory).tokenizer
    texts = prompt.split("<|image_pad|>")
    assert len(texts) == len(files) + 1
    chunks: list[model_input_pb2.Chunk] = []
    for index, piece in enumerate(texts):
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
        if ids:
            chunks.append(text(*ids))
        if index < len(files):
            chunks.append(image(files[index], image_format))
    return chunks


async def check_equal(served: Served, prompt: str, files: list[bytes], image_format: str = "PNG") -> None:
    expected = reference(served.directory, prompt, files)
    chunks = chunks_of(served.directory, prompt, files, image_format)
    rendered = await served.client.render(model_input(*chunks))
    assert token_ids(rendered) == expected.ids
    assert positions(rendered).dtype == np.int32
    assert np.array_equal(positions(rendered), expected.positions)
    features = await served.client.fetch_features([span.feature.digest for span in rendered.spans])
    patches = [features[span.feature.digest]["pixel_values"] for span in rendered.spans]
    grids = [features[span.feature.digest]["image_grid_thw"][0].tolist() for span in rendered.spans]
    assert grids == expected.grids
    assert expected.pixel_values.dtype == patches[0].dtype == np.uint8
    assert np.array_equal(np.concatenate(patches), expected.pixel_values)


def chat(directory: Path, *words: str) -> str:
    """Returns a user's message, with an image for each None, through the model's own chat template."""
    content = [{"type": "text", "text": word} if word else {"type": "image"} for word in words]
    messages = [{"role": "user", "content": content}]
    prompt: str = own_processor(directory).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return prompt


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_one_image_of_any_size(vision: Served, size: tuple[int, int]) -> None:
    await check_equal(vision, chat(vision.directory, "", "What is this?"), [encoded(picture(*size))])


async def test_jpeg(vision: Served) -> None:
    await check_equal(vision, chat(vision.directory, "", "And this?"), [encoded(picture(300, 200), "JPEG")], "JPEG")


async def test_two_images(vision: Served) -> None:
    files = [encoded(picture(150, 224, seed=1)), encoded(picture(400, 100, seed=2))]
    await check_equal(vision, chat(vision.directory, "Compare ", "", " with ", "", "."), files)


async def test_the_same_image_twice(vision: Served) -> None:
    await check_equal(vision, chat(vision.directory, "", "", "same?"), [encoded(picture(90, 70))] * 2)


async def test_image_first(vision: Served) -> None:
    await check_equal(vision, "<|image_pad|> then words", [encoded(picture(100, 120))])


async def test_image_last(vision: Served) -> None:
    await check_equal(vision, "words, then <|image_pad|>", [encoded(picture(100, 120))])


async def test_image_alone(vision: Served) -> None:
    await check_equal(vision, "<|image_pad|>", [encoded(picture(100, 120))])


async def test_image_after_long_text(vision: Served) -> None:
    await check_equal(vision, chat(vision.directory, "long words " * 300, "", "end"), [encoded(picture(100, 120))])


@pytest.mark.parametrize(("size", "count"), [((224, 224), 64), ((150, 224), 70), ((400, 300), 108)])
async def test_qwen3_vl_counts(qwen3_vl: Served, size: tuple[int, int], count: int) -> None:
    rendered = await qwen3_vl.client.render(model_input(text(1), image(encoded(picture(*size)), expected=count)))
    (span,) = rendered.spans
    assert (span.offset, span.length, span.feature.token_count) == (1, count, count)
    assert span.feature.source == qwen3_vl.client.address
    assert span.feature.size_bytes == count * 4 * 1536 + 24


async def test_two_images_without_text_between(qwen3_vl: Served) -> None:
    first, second = image(encoded(picture(224, 224))), image(encoded(picture(150, 224)))
    rendered = await qwen3_vl.client.render(model_input(first, second))
    assert [(span.offset, span.length) for span in rendered.spans] == [(0, 64), (64, 70)]
    assert positions(rendered)[:, 64].tolist() == [8, 8, 8]


async def test_several_text_chunks_equal_one_and_text_needs_no_positions(qwen3: Served, qwen3_vl: Served) -> None:
    for served in (qwen3, qwen3_vl):
        rendered = await served.client.render(model_input(text(5, 6), text(), text(7), text(8, 9)))
        assert token_ids(rendered) == [5, 6, 7, 8, 9]
        assert not rendered.spans
        assert not rendered.HasField("positions")


async def test_vision_start_and_end_are_plain_text(qwen3_vl: Served) -> None:
    tokenizer = own_processor(qwen3_vl.directory).tokenizer
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("<|vision_start|>", "<|vision_end|>")]
    assert token_ids(await qwen3_vl.client.render(model_input(text(*ids)))) == ids


def turned(width: int, height: int) -> bytes:
    """Returns a JPEG with the EXIF orientation of a quarter turn."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(width, height), "JPEG", exif=exif)


def transparent(width: int, height: int) -> bytes:
    image = picture(width, height)
    image.putalpha(picture(width, height, seed=3).convert("L"))
    return encoded(image)


SHRUNK = {
    "JPEG that EXIF turns": (turned(700, 450), "JPEG"),
    "RGBA": (transparent(333, 600), "PNG"),
    "L": (encoded(picture(640, 480).convert("L")), "PNG"),
    "above the limit of a message": (encoded(picture(900, 700)), "PNG"),
    "no larger": (encoded(picture(60, 128)), "PNG"),
    "tiny": (encoded(picture(1, 1)), "PNG"),
}


@pytest.mark.parametrize("side", [0, 128, 129])
@pytest.mark.parametrize("name", SHRUNK)
async def test_a_shrunk_image_is_the_one_that_the_client_would_send(vision: Served, name: str, side: int) -> None:
    data, kind = SHRUNK[name]
    sent = read_picture(data, max_side=side or None)
    expected = await vision.client.render(model_input(text(1), image(sent.data, sent.format.upper()), text(2)))
    rendered = await vision.client.render(model_input(text(1), image(data, kind, max_side=side), text(2)))
    assert token_ids(rendered) == token_ids(expected)
    assert np.array_equal(positions(rendered), positions(expected))
    (span,), (other,) = rendered.spans, expected.spans
    assert span.feature.tensors_sha256 == other.feature.tensors_sha256
    assert (span.feature.digest == other.feature.digest) == (sent.data == data)


async def test_a_shrunk_image_is_refused_like_any_other(qwen3_vl: Served) -> None:
    large = encoded(picture(300, 200))
    with pytest.raises(InvalidInput, match=r"chunks\[1\]: the PNG is truncated"):
        await qwen3_vl.client.render(model_input(text(1), image(large[:5000], max_side=100)))
    with pytest.raises(InvalidInput, match=r"chunks\[0\]: max_side is -1"):
        await qwen3_vl.client.render(model_input(image(large, max_side=-1)))
