"""Validation of rendered inputs, which every model server does with the same messages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.api.v1 import model_input_pb2
from fovea.wire import tensors
from fovea.wire.errors import ContextOverflow, InvalidInput
from fovea.wire.rendered_input import CheckedInput, InputLimits, check, check_ids
from tests.vision_families import IMAGE, OPENER, PAD, VIDEO, small_qwen3_vl

VISION = small_qwen3_vl()
LIMITS = InputLimits(100, max_context_length=50, needs_positions=False, max_images=2, max_image_tokens=8)
SHA = "0" * 64
Change = Callable[[model_input_pb2.RenderedInput], object]


def rendered(image_count: int = 1) -> model_input_pb2.RenderedInput:
    """Returns two tokens, then images of four tokens with a token after each."""
    result = model_input_pb2.RenderedInput()
    ids = [1, 2]
    for _ in range(image_count):
        feature = model_input_pb2.VisionFeature(digest=SHA, token_count=4, tensors_sha256=SHA)
        result.spans.add(offset=len(ids), length=4, feature=feature)
        ids += [IMAGE] * 4 + [3]
    result.tokens = tensors.encode_tokens(ids)
    return result


def checked(given: model_input_pb2.RenderedInput, limits: InputLimits = LIMITS) -> CheckedInput:
    """Returns the checker's result for an input with the field name `prompt`."""
    return check(given, limits, VISION, "prompt")


def text(ids: Sequence[int]) -> model_input_pb2.RenderedInput:
    """Returns tokens without images."""
    return model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(ids))


def positions(array: np.ndarray) -> Change:
    """Sets these positions in an input."""
    return lambda given: given.positions.CopyFrom(tensors.encode(array))


def mask(value: bytes) -> Change:
    """Sets this mask in the first image."""
    return lambda given: setattr(given.spans[0].feature, "embedding_mask", value)


def test_a_good_input() -> None:
    given = rendered(2)
    positions(np.ones((3, 12), np.int32))(given)
    found = checked(given)
    assert found.tokens.tolist() == [1, 2, 90, 90, 90, 90, 3, 90, 90, 90, 90, 3]
    assert [(span.offset, span.length, span.embedding_count) for span in found.spans] == [(2, 4, 4), (7, 4, 4)]
    assert found.positions is not None
    assert checked(rendered()).positions is None


def test_ids_around_embeddings_may_be_any() -> None:
    given = rendered()
    given.tokens = tensors.encode_tokens([1, 2, 7, IMAGE, IMAGE, 8, 3])
    with pytest.raises(InvalidInput, match="covers tokens other than"):
        checked(given)
    mask(b"\0\1\1\0")(given)
    (span,) = checked(given).spans
    assert (span.offset, span.length, span.embedding_count) == (2, 4, 2)
    assert span.is_embedding.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: setattr(r, "tokens", b"abc"), "tokens has 3 bytes"),
        (lambda r: setattr(r, "tokens", b""), "tokens has no tokens"),
        (lambda r: setattr(r.spans[0].feature, "digest", "0" * 63), "spans[0].feature.digest must be 64"),
        (lambda r: setattr(r.spans[0].feature, "digest", "A" * 64), "spans[0].feature.digest must be 64"),
        (lambda r: setattr(r.spans[0].feature, "digest", SHA + "\n"), "spans[0].feature.digest must be 64"),
        (lambda r: setattr(r.spans[0].feature, "tensors_sha256", ""), "spans[0].feature.tensors_sha256 must be 64"),
        (lambda r: setattr(r.spans[0].feature, "token_count", -4), "spans[0].feature.token_count is -4"),
        (lambda r: setattr(r.spans[0], "length", 3), "spans[0].length is 3, but feature.token_count is 4"),
        (mask(b"\1\0\1"), "spans[0].feature.embedding_mask has 3 bytes, but token_count is 4"),
        (mask(b"\1\0\2\1"), "spans[0].feature.embedding_mask must contain only 0 and 1, and at least one 1"),
        (mask(bytes(4)), "spans[0].feature.embedding_mask must contain only 0 and 1, and at least one 1"),
        (lambda r: setattr(r.spans[0], "offset", -1), "spans[0].offset is -1"),
        (lambda r: setattr(r.spans[0], "offset", 4), "spans[0].offset is 4"),
        (lambda r: setattr(r.spans[0], "offset", 1), "spans[0] covers tokens other than the image placeholder 90"),
        (lambda r: r.spans.add().CopyFrom(r.spans[0]), "spans[1].offset is 2"),
        (lambda r: r.spans.extend([r.spans[0]] * 2), "spans has 3 images; at most 2"),
        (positions(np.zeros((3, 6), np.int32)), "positions is int32 [3, 6]; it must be int32 [3, 7]"),
        (positions(np.zeros((3, 7), np.int64)), "positions is int64 [3, 7]"),
        (positions(np.full((3, 7), -2, np.int32)), "positions has the negative value -2"),
    ],
)
def test_what_is_wrong_is_named(change: Change, message: str) -> None:
    given = rendered()
    change(given)
    with pytest.raises(InvalidInput) as caught:
        checked(given)
    assert caught.value.message.startswith(f"prompt.{message}")
    assert caught.value.field == "prompt." + message.split()[0]


def test_the_context() -> None:
    checked(text([1] * 50))
    with pytest.raises(ContextOverflow, match=r"^prompt.tokens has 51 tokens; the model's context window is 50$"):
        checked(text([1] * 51))
    checked(text([1] * 51), replace(LIMITS, max_context_length=None))


def test_an_image_above_the_budget() -> None:
    given = rendered()
    with pytest.raises(
        InvalidInput, match=r"spans\[0\].length is 4, 4 of them embeddings; at most 3 embeddings per image are allowed"
    ):
        checked(given, replace(LIMITS, max_image_tokens=3))


def test_positions_are_required_if_the_limits_need_them() -> None:
    given = rendered()
    with pytest.raises(InvalidInput, match=r"prompt.positions is missing: .* int32 \[3, 7\]"):
        checked(given, replace(LIMITS, needs_positions=True))
    checked(text([1]), replace(LIMITS, needs_positions=True))
    positions(np.zeros((3, 7), np.int32))(given)
    checked(given, replace(LIMITS, needs_positions=True))
    plain = text([1])
    positions(np.zeros((3, 1), np.int32))(plain)
    with pytest.raises(InvalidInput, match="no multimodal RoPE"):
        check(plain, LIMITS, None, "prompt")


def test_a_text_model_takes_no_images() -> None:
    with pytest.raises(InvalidInput, match=r"^prompt.spans has images, but the model does not accept images$"):
        check(rendered(), LIMITS, None, "prompt")


@pytest.mark.parametrize("placeholder", [IMAGE, VIDEO, PAD])
def test_a_placeholder_in_the_place_of_an_image(placeholder: int) -> None:
    with pytest.raises(InvalidInput, match=rf"tokens has the image placeholder {placeholder} at position 2, but no"):
        checked(text([1, OPENER, placeholder]))
    assert checked(text([OPENER, 1, placeholder])).tokens.tolist() == [OPENER, 1, placeholder]


@given(offset=st.integers(-(2**31), 2**31 - 1), length=st.integers(-(2**31), 2**31 - 1))
def test_only_the_right_span_passes(offset: int, length: int) -> None:
    given = rendered()
    given.spans[0].offset, given.spans[0].length = offset, length
    if (offset, length) == (2, 4):
        checked(given)
    else:
        with pytest.raises(InvalidInput):
            checked(given)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
def test_ids_lie_in_the_vocabulary(ids: list[int]) -> None:
    is_lost = any(pair in [(OPENER, IMAGE), (OPENER, VIDEO), (OPENER, PAD)] for pair in pairwise(ids))
    if all(0 <= token < 100 for token in ids) and not is_lost:
        assert checked(text(ids)).tokens.tolist() == ids
    else:
        with pytest.raises(InvalidInput):
            checked(text(ids))


def test_an_id_is_named_with_its_place() -> None:
    with pytest.raises(InvalidInput, match=r"^x has token id 100 at position 1, 0; the vocabulary is 0 .. 99$"):
        check_ids(np.array([[1, 2], [100, 3]]), 100, "x")
