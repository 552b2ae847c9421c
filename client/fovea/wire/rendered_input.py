"""Checks rendered inputs before a model computes on them, in the gateway, the sampler and the trainer.

An input that passes is safe to compute on, once the tensors of its images have passed `FeatureCache.check`: ids are in
the vocabulary, and placeholders match images. N is the number of tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import model_input_pb2
from fovea.vision.vision_family import VisionFamily
from fovea.wire import tensors
from fovea.wire.errors import ContextOverflow, InvalidInput

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class InputLimits:
    """Limits of one model.

    Attributes:
        vocabulary_size: Token ids must be below it.
        max_context_length: Largest number of tokens; None if the caller checks the context, including new tokens.
        needs_positions: Whether an input with images must contain positions if the model has multimodal RoPE.
        max_images: Largest number of images per input.
        max_image_tokens: Largest number of embeddings per image.
    """

    vocabulary_size: int
    max_context_length: int | None = None
    needs_positions: bool = True
    max_images: int | None = None
    max_image_tokens: int | None = None


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of one image: ids `offset` to `offset + length` replace it, and `feature` identifies its tensors.

    Attributes:
        is_embedding: bool [length], true where an embedding of the vision tower replaces the id's own embedding.
    """

    offset: int
    is_embedding: npt.NDArray[np.bool_]
    feature: model_input_pb2.VisionFeature

    @property
    def length(self) -> int:
        """Number of ids that replace the image."""
        return len(self.is_embedding)

    @property
    def embedding_count(self) -> int:
        """Number of embeddings from the vision tower."""
        return int(np.count_nonzero(self.is_embedding))


@dataclass(frozen=True)
class CheckedInput:
    """A rendered input that passed all checks.

    Attributes:
        tokens: int32 [N].
        spans: Images in order of offset.
        positions: int32 [rows, N], or None for 0 .. N-1.
    """

    tokens: npt.NDArray[np.int32]
    spans: tuple[ImageSpan, ...]
    positions: npt.NDArray[np.int32] | None


def check(
    rendered: model_input_pb2.RenderedInput, limits: InputLimits, vision: VisionFamily | None, field: str
) -> CheckedInput:
    """Decodes and checks a rendered input.

    Args:
        rendered: The input.
        limits: Limits of the model.
        vision: Vision family of the model; None for a text model.
        field: Name of the input in error messages.

    Raises:
        InvalidInput: Names the invalid component of `field`.
        ContextOverflow: There are too many tokens.
    """
    ids = check_tokens(rendered.tokens, limits.vocabulary_size, limits.max_context_length, f"{field}.tokens")
    spans: tuple[ImageSpan, ...] = ()
    if vision is not None:
        spans = _check_spans(rendered.spans, ids, limits, vision, f"{field}.spans")
        _check_no_image_is_lost(ids, spans, vision, f"{field}.tokens")
    elif rendered.spans:
        raise _wrong(f"{field}.spans", "has images, but the model does not accept images")
    return CheckedInput(ids, spans, _check_positions(rendered, ids.size, vision, limits, f"{field}.positions"))


def check_tokens(
    data: bytes, vocabulary_size: int, max_context_length: int | None, field: str
) -> npt.NDArray[np.int32]:
    """Decodes token ids, int32 [N]. Raises InvalidInput or ContextOverflow, which name `field`."""
    ids = tensors.decode_tokens(data, field)
    if not ids.size:
        raise _wrong(field, "has no tokens; at least one is required")
    if max_context_length is not None and ids.size > max_context_length:
        raise ContextOverflow(
            f"{field} has {ids.size} tokens; the model's context window is {max_context_length}", field=field
        )
    check_ids(ids, vocabulary_size, field)
    return ids


def check_ids(ids: npt.NDArray, vocabulary_size: int, field: str) -> None:
    """Raises InvalidInput, naming `field` and the position, for an id outside the vocabulary. `ids` has any shape."""
    outside = np.argwhere((ids < 0) | (ids >= vocabulary_size))
    if outside.size:
        place = tuple(int(index) for index in outside[0])
        raise _wrong(
            field,
            f"has token id {ids[place]} at position {', '.join(map(str, place))}; the vocabulary is "
            f"0 .. {vocabulary_size - 1}",
        )


def _check_spans(
    spans: Sequence[model_input_pb2.VisionSpan],
    ids: npt.NDArray[np.int32],
    limits: InputLimits,
    vision: VisionFamily,
    field: str,
) -> tuple[ImageSpan, ...]:
    if limits.max_images is not None and len(spans) > limits.max_images:
        raise _wrong(field, f"has {len(spans)} images; at most {limits.max_images} are allowed")
    checked: list[ImageSpan] = []
    end = 0
    for number, span in enumerate(spans):
        place = f"{field}[{number}]"
        _check_feature(span.feature, f"{place}.feature")
        _check_place(span, end, ids.size, place)
        end = span.offset + span.length
        is_embedding = _read_mask(span.feature, f"{place}.feature.embedding_mask")
        found = ImageSpan(span.offset, is_embedding, span.feature)
        if limits.max_image_tokens is not None and found.embedding_count > limits.max_image_tokens:
            raise _wrong(
                f"{place}.length",
                f"is {span.length}, {found.embedding_count} of them embeddings; at most {limits.max_image_tokens} "
                "embeddings per image are allowed",
            )
        if np.any(ids[span.offset : end][is_embedding] != vision.image_token_id):
            raise _wrong(place, f"covers tokens other than the image placeholder {vision.image_token_id}")
        checked.append(found)
    return tuple(checked)


def _check_no_image_is_lost(
    ids: npt.NDArray[np.int32], spans: Sequence[ImageSpan], vision: VisionFamily, field: str
) -> None:
    outside = ids.copy()
    for span in spans:
        outside[span.offset : span.offset + span.length] = -1
    if (lost := vision.find_lost_image(outside)) is not None:
        raise _wrong(field, f"has the image placeholder {ids[lost]} at position {lost}, but no image for it")


def _check_feature(feature: model_input_pb2.VisionFeature, field: str) -> None:
    for name, value in (("digest", feature.digest), ("tensors_sha256", feature.tensors_sha256)):
        if not _SHA256.fullmatch(value):
            raise _wrong(f"{field}.{name}", "must be 64 lower-case hexadecimal digits")
    if feature.token_count < 1:
        raise _wrong(f"{field}.token_count", f"is {feature.token_count}, must be at least 1")


def _check_place(span: model_input_pb2.VisionSpan, start: int, token_count: int, field: str) -> None:
    if span.length != span.feature.token_count:
        raise _wrong(f"{field}.length", f"is {span.length}, but feature.token_count is {span.feature.token_count}")
    if span.offset < start or span.offset + span.length > token_count:
        raise _wrong(
            f"{field}.offset",
            f"is {span.offset}: the {span.length} tokens of the image must lie in {start} .. {token_count - 1}, after "
            "those of the previous image",
        )


def _read_mask(feature: model_input_pb2.VisionFeature, field: str) -> npt.NDArray[np.bool_]:
    """Returns which of the ids that replace an image are embeddings, bool [token count]."""
    if not feature.embedding_mask:
        return np.ones(feature.token_count, dtype=np.bool_)
    mask = np.frombuffer(feature.embedding_mask, dtype=np.uint8)
    if len(mask) != feature.token_count:
        raise _wrong(field, f"has {len(mask)} bytes, but token_count is {feature.token_count}")
    if mask.max() != 1:
        raise _wrong(field, "must contain only 0 and 1, and at least one 1")
    return mask.astype(np.bool_)


def _check_positions(
    rendered: model_input_pb2.RenderedInput,
    token_count: int,
    vision: VisionFamily | None,
    limits: InputLimits,
    field: str,
) -> npt.NDArray[np.int32] | None:
    rows = 1 if vision is None else vision.position_rows
    shape = f"int32 [{rows}, {token_count}]"
    if not rendered.HasField("positions"):
        if rendered.spans and limits.needs_positions and rows > 1:
            raise _wrong(field, f"is missing: an input with images needs {shape} for this model")
        return None
    if rows == 1:
        raise _wrong(field, "is set, but this model has no multimodal RoPE")
    positions = tensors.decode(rendered.positions, field)
    if positions.dtype != np.int32 or positions.shape != (rows, token_count):
        raise _wrong(field, f"is {positions.dtype.name} {list(positions.shape)}; it must be {shape}")
    if positions.min() < 0:
        raise _wrong(field, f"has the negative value {positions.min()}")
    return positions


def _wrong(field: str, problem: str) -> InvalidInput:
    return InvalidInput(f"{field} {problem}", field=field)
