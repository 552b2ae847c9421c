"""Training examples off the wire: decoded and checked before anything is computed.

Shapes: N tokens of one datum, K targets a position.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import model_input_pb2, tensor_pb2, trainer_pb2
from fovea.vision.vision_family import find_lost_image
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput
from services.trainer.batches.packing import DatumSize
from services.trainer.losses import TARGETS, Loss

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Patches = npt.NDArray[np.uint8]
"""Of an image, [P, W]: P patches of W bytes."""
Grid = tuple[int, int, int]
"""Time, height and width of an image in patches."""


@dataclass(frozen=True)
class InputLimits:
    """What the model can take.

    Args:
        vocabulary_size: Token ids lie below it.
        max_context_length: The most tokens of a datum.
        merge_size: Patches along each side of the square that becomes one token; 0 for a text model.
        uses_mrope: Whether an input with images must bring positions [3, N].
        reserved_ids: Token ids that stand for a piece of an image.
        image_opener_id: The token id that an image follows, if there is one.
    """

    vocabulary_size: int
    max_context_length: int
    merge_size: int
    uses_mrope: bool
    reserved_ids: frozenset[int] = frozenset()
    image_opener_id: int | None = None


@dataclass(frozen=True)
class Span:
    """Where an image stands in a datum, and which tensors belong there."""

    offset: int
    length: int
    grid_thw: Grid
    feature: model_input_pb2.VisionFeature

    @property
    def patch_count(self) -> int:
        """Patches before merging."""
        return math.prod(self.grid_thw)


@dataclass(frozen=True)
class Datum:
    """One checked example.

    Args:
        index: Its place in the call.
        tokens: int64 [N].
        positions: int64 [3, N], or None for 0 .. N-1.
        spans: Images in order of offset.
        targets: int64 [N, K].
        inputs: By name, float32 and shaped as the targets came, or as the loss says; optional ones that were not given
            are at their defaults.
        flat_targets: Whether the targets came as [N]; log-probabilities then have that shape.
    """

    index: int
    tokens: IntArray
    positions: IntArray | None
    spans: tuple[Span, ...]
    targets: IntArray
    inputs: dict[str, npt.NDArray]
    flat_targets: bool

    @property
    def size(self) -> DatumSize:
        """What it costs."""
        return DatumSize(len(self.tokens), sum(span.patch_count for span in self.spans))

    @classmethod
    def blank(cls, length: int) -> "Datum":
        """Text of `length` zeros with targets of zero, without inputs for a loss."""
        zeros = np.zeros(length, np.int64)
        return cls(0, zeros, None, (), zeros[:, None], {}, True)


def decode_datum(datum: trainer_pb2.Datum, index: int, loss: Loss, limits: InputLimits) -> Datum:
    """Decodes one example. Raises InvalidInput naming `datum[index].field` for anything that is not computable."""
    path = f"datum[{index}]"
    tokens = _tokens(datum.input, limits, f"{path}.input.tokens")
    spans = _spans(datum.input, len(tokens), limits, f"{path}.input.spans")
    _check_no_image_is_lost(tokens, spans, limits, f"{path}.input.tokens")
    positions = _positions(datum.input, len(tokens), bool(spans), limits, f"{path}.input.positions")
    targets, flat = _targets(datum, loss, limits, len(tokens), f"{path}.loss_inputs.{TARGETS}")
    shape = targets.shape[:1] if flat else targets.shape
    inputs = _loss_inputs(datum, loss, shape, f"{path}.loss_inputs")
    return Datum(index, tokens, positions, spans, targets, inputs, flat)


def check_digests(datums: Iterable[Datum]) -> None:
    """Raises InvalidInput if one image, by its digest, is said to have two grids within a call."""
    grids: dict[str, Grid] = {}
    for datum in datums:
        for number, span in enumerate(datum.spans):
            known = grids.setdefault(span.feature.digest, span.grid_thw)
            if known != span.grid_thw:
                raise _invalid(
                    f"datum[{datum.index}].input.spans[{number}].feature.grid_thw",
                    f"is {list(span.grid_thw)}, but the same digest came with {list(known)} before",
                )


def _invalid(field: str, problem: str) -> InvalidInput:
    return InvalidInput(f"{field} {problem}", field=field)


def _tokens(rendered: model_input_pb2.RenderedInput, limits: InputLimits, field: str) -> IntArray:
    tokens = tensors.decode_tokens(rendered.tokens, field).astype(np.int64)
    if not len(tokens):
        raise _invalid(field, "is empty: at least one token is needed")
    if len(tokens) > limits.max_context_length:
        raise _invalid(field, f"has {len(tokens)} tokens, the context takes {limits.max_context_length}")
    _check_ids(tokens, limits, field)
    return tokens


def _check_ids(ids: IntArray, limits: InputLimits, field: str) -> None:
    wrong = (ids < 0) | (ids >= limits.vocabulary_size)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        place = ", ".join(map(str, where))
        raise _invalid(field, f"has id {ids[where]} at [{place}], ids lie in 0 .. {limits.vocabulary_size - 1}")


def _spans(
    rendered: model_input_pb2.RenderedInput, token_count: int, limits: InputLimits, field: str
) -> tuple[Span, ...]:
    if rendered.spans and not limits.merge_size:
        raise _invalid(field, "has images, but the model takes text only")
    spans: list[Span] = []
    end = 0
    for number, span in enumerate(rendered.spans):
        place = f"{field}[{number}]"
        grid = tuple(span.feature.grid_thw)
        if len(grid) != 3 or min(grid) < 1 or grid[1] % limits.merge_size or grid[2] % limits.merge_size:
            raise _invalid(
                f"{place}.feature.grid_thw",
                f"is {list(grid)}, needs time, height, width above 0, the last two multiples of {limits.merge_size}",
            )
        expected = math.prod(grid) // limits.merge_size**2
        if span.length != expected or span.feature.token_count != expected:
            raise _invalid(
                f"{place}.length",
                f"is {span.length} and token_count {span.feature.token_count}, but grid {list(grid)} makes {expected}",
            )
        if span.offset < end or span.offset + span.length > token_count:
            raise _invalid(
                f"{place}.offset",
                f"is {span.offset}: spans of {span.length} must rise from {end} and end by {token_count}",
            )
        end = span.offset + span.length
        spans.append(Span(span.offset, span.length, grid, span.feature))
    return tuple(spans)


def _check_no_image_is_lost(tokens: IntArray, spans: tuple[Span, ...], limits: InputLimits, field: str) -> None:
    outside = tokens.copy()
    for span in spans:
        outside[span.offset : span.offset + span.length] = -1
    if (place := find_lost_image(outside, limits.image_opener_id, limits.reserved_ids)) is not None:
        raise _invalid(field, f"has the image placeholder {tokens[place]} at [{place}], but no image is there")


def _positions(
    rendered: model_input_pb2.RenderedInput, token_count: int, has_images: bool, limits: InputLimits, field: str
) -> IntArray | None:
    if not rendered.HasField("positions"):
        if has_images and limits.uses_mrope:
            raise _invalid(field, "is missing: an input with images needs positions [3, N] for this model")
        return None
    if not limits.uses_mrope:
        raise _invalid(field, "is set, but this model has no multimodal RoPE")
    positions = tensors.decode(rendered.positions, field)
    if positions.dtype.kind != "i" or positions.shape != (3, token_count):
        raise _invalid(field, f"is {positions.dtype.name} {list(positions.shape)}, needs int32 [3, {token_count}]")
    if positions.min() < 0:
        raise _invalid(field, f"has a negative value {positions.min()}")
    return positions.astype(np.int64)


def _loss_inputs(datum: trainer_pb2.Datum, loss: Loss, shape: tuple[int, ...], path: str) -> dict[str, npt.NDArray]:
    known = {TARGETS, *(given.name for given in loss.inputs)}
    for name in sorted(datum.loss_inputs):
        if name not in known and not loss.takes_others:
            raise _invalid(f"{path}.{name}", f"is unknown for {loss.name}; known: {', '.join(sorted(known))}")
    inputs: dict[str, npt.NDArray] = {}
    for wanted in loss.inputs:
        field = f"{path}.{wanted.name}"
        if wanted.name not in datum.loss_inputs:
            if wanted.required:
                raise _invalid(field, f"is missing: {loss.name} needs it")
            inputs[wanted.name] = np.full(shape, wanted.default, np.float32)
        elif wanted.rank is None:
            inputs[wanted.name] = _numbers(datum.loss_inputs[wanted.name], shape, field)
        else:
            inputs[wanted.name] = _free_numbers(datum.loss_inputs[wanted.name], wanted.rank, field)
    try:
        loss.check(inputs)
    except InvalidInput as error:
        raise _invalid(f"{path}.{error.field}", error.message) from None
    return inputs


def _targets(
    datum: trainer_pb2.Datum, loss: Loss, limits: InputLimits, token_count: int, field: str
) -> tuple[IntArray, bool]:
    if TARGETS not in datum.loss_inputs:
        raise _invalid(field, f"is missing: {loss.name} needs it")
    targets = tensors.decode(datum.loss_inputs[TARGETS], field)
    if targets.dtype.kind != "i":
        raise _invalid(field, f"is {targets.dtype.name}, needs int64")
    if targets.ndim not in loss.target_ranks:
        wanted = " or ".join({1: "[N]", 2: "[N, K]"}[rank] for rank in loss.target_ranks)
        raise _invalid(field, f"has shape {list(targets.shape)}, {loss.name} takes {wanted}")
    if targets.shape[0] != token_count:
        raise _invalid(field, f"has {targets.shape[0]} rows, the input has {token_count} tokens")
    if targets.ndim == 2 and not targets.shape[1]:
        raise _invalid(field, "has no target at any position")
    ids: IntArray = targets.astype(np.int64)
    _check_ids(ids, limits, field)
    return ids.reshape(token_count, -1), targets.ndim == 1


def _numbers(tensor: tensor_pb2.Tensor, shape: tuple[int, ...], field: str) -> FloatArray:
    values = tensors.decode(tensor, field)
    if values.dtype.kind not in "fi":
        raise _invalid(field, f"is {values.dtype.name}, needs float32")
    if values.shape != shape:
        raise _invalid(field, f"has shape {list(values.shape)}, needs {list(shape)} as {TARGETS}")
    numbers: FloatArray = values.astype(np.float32)
    finite = np.isfinite(numbers)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise _invalid(field, f"has {numbers[where]} at [{', '.join(map(str, where))}], needs finite numbers")
    return numbers


def _free_numbers(tensor: tensor_pb2.Tensor, rank: int, field: str) -> npt.NDArray:
    values = tensors.decode(tensor, field)
    if values.dtype.kind not in "fi":
        raise _invalid(field, f"is {values.dtype.name}, needs float32 or int64")
    if values.ndim == 1 and values.size == 1 and rank == 0:
        return values.reshape(())  # The SDK leaves the shape of a number out, as it does for one dimension.
    if values.ndim != rank:
        raise _invalid(field, f"has shape {list(values.shape)}, the loss says that it has {rank} dimensions")
    return values
