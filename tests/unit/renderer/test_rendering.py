"""Splicing: for any chunks, ids are exact, images are at their places, and positions match."""

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.wire.errors import ContextOverflow, InvalidInput, ResourceExhausted
from fovea_renderer.image_header import ImageHeader
from fovea_renderer.image_sources import FeatureCache, ImageCache, ImageFetcher
from fovea_renderer.input_messages import Chunk, ImageChunk, Rendered
from fovea_renderer.rendering import ImageSupport, Renderer, ServedModel
from fovea_renderer.worker_pool import ProcessedImage
from tests.unit.renderer.checkpoints import IMAGE, PROCESSORS, VOCABULARY_SIZE, family
from tests.unit.renderer.pictures import png

CONTEXT = 400
COUNTS = {(32, 32): 64, (224, 224): 64, (150, 224): 70, (40, 200): 72}
SIZES = list(COUNTS)
IMAGES = {size: png(*size) for size in SIZES}


async def geometry_only(header: ImageHeader, data: bytes, max_side: int) -> ProcessedImage:
    """Processes an image with Qwen3-VL's geometry and one byte per patch instead of pixels."""
    grids = {(32, 32): (16, 16), (224, 224): (16, 16), (150, 224): (20, 14), (40, 200): (36, 8)}
    rows, columns = (4, 4) if max_side else grids[header.width, header.height]
    grid = np.array([[1, rows, columns]], dtype=np.int64)
    pixel_values = np.zeros((rows * columns, 1), dtype=np.uint8)
    return ProcessedImage({"pixel_values": pixel_values, "image_grid_thw": grid}, hashlib.sha256(data).hexdigest(), 0.0)


def make_renderer(cache_bytes: int = 10_000, fingerprint: str = "ab" * 32) -> Renderer:
    qwen3_vl = family("qwen3_vl")
    images = ImageSupport(qwen3_vl, qwen3_vl.token_counter(PROCESSORS["qwen3_vl"]), geometry_only, fingerprint)
    model = ServedModel("model", "qwen3_vl", VOCABULARY_SIZE, CONTEXT, images)
    return Renderer(model, FeatureCache(cache_bytes), ImageCache(1000), ImageFetcher([], 1.0), "renderer:1")


@pytest.fixture(scope="module")
async def renderer() -> Renderer:
    return make_renderer()


def text(*ids: int) -> Chunk:
    return np.array(ids, dtype=np.int32)


def token_count(chunk: Chunk) -> int:
    if isinstance(chunk, ImageChunk):
        return next(COUNTS[size] for size, data in IMAGES.items() if data == chunk.source)
    return len(chunk)


def image(size: tuple[int, int], expected: int | None = None) -> ImageChunk:
    return ImageChunk(IMAGES[size], "PNG", expected)


async def test_a_shrunk_image_has_tensors_and_a_count_of_its_own(renderer: Renderer) -> None:
    whole, small, other, smaller = [
        (await renderer.render([replace(image((150, 224)), max_side=side)])).images[0] for side in (0, 223, 224, 100)
    ]
    assert (whole.length, small.length) == (70, 4)
    assert other.feature.digest == whole.feature.digest  # it is not larger than 224
    assert len({whole.feature.digest, small.feature.digest, smaller.feature.digest}) == 3
    with pytest.raises(InvalidInput, match=r"chunks\[0\]: expected_tokens is 70 but the image takes 4 tokens"):
        await renderer.render([replace(image((150, 224), 70), max_side=223)])


TEXTS = st.lists(st.integers(0, IMAGE - 1), max_size=6).map(lambda ids: text(*ids))
INPUTS = st.lists(st.one_of(TEXTS, st.sampled_from(SIZES).map(image)), min_size=1, max_size=6)


@settings(max_examples=150)
@given(chunks=INPUTS)
async def test_splicing_keeps_every_id_and_places_every_image(renderer: Renderer, chunks: list[Chunk]) -> None:
    length = sum(map(token_count, chunks))
    if not 0 < length <= CONTEXT:
        with pytest.raises(InvalidInput, match="above the context" if length else "has no tokens"):
            await renderer.render(chunks)
        return
    rendered = await renderer.render(chunks)
    assert len(rendered.tokens) == length
    offset, placed = 0, iter(rendered.images)
    for chunk in chunks:
        if isinstance(chunk, ImageChunk):
            span = next(placed)
            assert span.offset == offset
            assert span.length == int(np.prod(span.feature.tensors["image_grid_thw"])) // 4
            assert not span.embedding_mask
            assert rendered.tokens[offset : offset + span.length].tolist() == [IMAGE] * span.length
            offset += span.length
        else:
            assert rendered.tokens[offset : offset + len(chunk)].tolist() == chunk.tolist()
            offset += len(chunk)
    assert next(placed, None) is None
    assert rendered.tokens.dtype == np.int32
    assert len(rendered.tokens) == offset
    check_positions(rendered)


def check_positions(rendered: Rendered) -> None:
    """Checks that text counts up by one in all rows, an image starts at the next text position, and text continues
    above the image's maximum.
    """
    if not rendered.images:
        assert rendered.positions is None
        return
    positions = rendered.positions
    assert positions is not None
    assert positions.shape == (3, len(rendered.tokens))
    assert positions.min() == 0
    covered = np.zeros(len(rendered.tokens), dtype=bool)
    for span in rendered.images:
        covered[span.offset : span.offset + span.length] = True
    texts = positions[:, ~covered]
    assert (texts[0] == texts[1]).all()
    assert (texts[0] == texts[2]).all()
    assert (np.diff(texts[0]) > 0).all()
    for span in rendered.images:
        inside = positions[:, span.offset : span.offset + span.length]
        before = positions[:, : span.offset].max() if span.offset else -1
        assert (inside.min(axis=1) == before + 1).all()
        assert len(np.unique(inside, axis=1).T) == span.length


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, IMAGE - 1), min_size=1, max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
async def test_several_text_chunks_equal_one(renderer: Renderer, ids: list[int], cuts: list[int]) -> None:
    borders = sorted({0, *(min(cut, len(ids)) for cut in cuts), len(ids)})
    pieces = [text(*ids[start:end]) for start, end in itertools.pairwise(borders)]
    tail = image((32, 32))
    whole, cut = await renderer.render([text(*ids), tail]), await renderer.render([*pieces, text(), tail])
    assert whole.tokens.tolist() == cut.tokens.tolist()
    assert whole.images == cut.images
    assert whole.positions is not None
    assert cut.positions is not None
    assert np.array_equal(whole.positions, cut.positions)


async def test_the_context_is_a_limit_not_a_border(renderer: Renderer) -> None:
    full = text(*[1] * (CONTEXT - 64))
    assert len((await renderer.render([full, image((32, 32))])).tokens) == CONTEXT
    with pytest.raises(ContextOverflow, match=r"401 tokens \(337 of text, 64 of images\), above the context of 400"):
        await renderer.render([full, text(1), image((32, 32))])


async def test_the_first_chunk_in_order_is_the_one_named(renderer: Renderer) -> None:
    with pytest.raises(InvalidInput, match=r"chunks\[1\]: expected_tokens is 1 but the image takes 64 tokens"):
        await renderer.render([text(1), image((32, 32), 1), image((224, 224), 2)])


async def test_digests_differ_by_bytes_and_by_processor(renderer: Renderer) -> None:
    other = make_renderer(fingerprint="cd" * 32)
    one, two = await renderer.render([image((32, 32)), image((224, 224))]), await other.render([image((32, 32))])
    digests = [placed.feature.digest for placed in (*one.images, *two.images)]
    assert len(set(digests)) == 3
    assert digests[0] == hashlib.sha256(bytes.fromhex("ab" * 32) + IMAGES[32, 32]).hexdigest()


async def test_images_that_never_fit_together_are_refused() -> None:
    tight = make_renderer(cache_bytes=500)
    await tight.render([image((32, 32)), image((32, 32))])
    with pytest.raises(ResourceExhausted, match="feature_cache_bytes"):
        await tight.render([image((32, 32)), image((224, 224))])
