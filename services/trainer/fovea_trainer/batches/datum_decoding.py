"""Decoding of training examples. Every datum is checked before any rank computes.

Shapes: N tokens of one datum, K targets per position, L layers with experts, k experts per token and layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import tensor_pb2, trainer_pb2
from fovea.vision.vision_family import VisionFamily
from fovea.wire import rendered_input, tensors
from fovea.wire.errors import InvalidInput
from fovea.wire.rendered_input import ImageSpan
from fovea_trainer.losses import TARGETS, Loss

EXPERTS = "routed_experts"
"""An input of every loss: the experts that computed each token when it was sampled."""

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Support:
    """The ids from which each of N targets was drawn.

    Args:
        ids: int64 [M], ascending within a row.
        offsets: int64 [N + 1]: row i is `ids[offsets[i]:offsets[i + 1]]`; an empty row is the whole vocabulary.
    """

    ids: IntArray
    offsets: IntArray


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a model: `k` of `count` experts compute a token at each of `layers` layers."""

    layers: int
    k: int
    count: int


@dataclass(frozen=True)
class DatumLimits:
    """The limits of the model that a datum must respect.

    Args:
        vocabulary_size: Token ids are below this number.
        max_context_length: Maximum number of tokens of a datum.
        vision: The family of a vision-language model; None for a text-only model.
        experts: The experts of the model; None for a model without experts.
    """

    vocabulary_size: int
    max_context_length: int
    vision: VisionFamily | None
    experts: ExpertShape | None = None


@dataclass(frozen=True)
class DatumSize:
    """The computing cost of a datum.

    Args:
        token_count: Tokens after rendering, at least 1.
        patch_count: Vision patches of all images, 0 for text.
    """

    token_count: int
    patch_count: int


@dataclass(frozen=True)
class Datum:
    """One checked example.

    Args:
        index: Index of the datum in the call.
        tokens: int64 [N].
        positions: int64 [rows, N], or None for 0 .. N-1.
        spans: Images in order of offset.
        patch_count: Number of vision tower patches of all images.
        targets: int64 [N, K].
        inputs: Inputs of the loss, keyed by input name. An input is float32 and has the shape in which the targets were
            sent, unless the loss declares its rank. Missing optional inputs have their defaults.
        flat_targets: True if the targets were sent as [N]. The log-probabilities are then returned as [N] too.
        experts: int16 [N, L, k], the experts to use; None if the model's router decides.
        support: The support of each position's targets; None if all were drawn from the whole vocabulary.
    """

    index: int
    tokens: IntArray
    positions: IntArray | None
    spans: tuple[ImageSpan, ...]
    patch_count: int
    targets: IntArray
    inputs: dict[str, npt.NDArray]
    flat_targets: bool
    experts: npt.NDArray[np.int16] | None = None
    support: Support | None = None

    @property
    def size(self) -> DatumSize:
        """The computing cost of the datum, for `micro_batch.plan`."""
        return DatumSize(len(self.tokens), self.patch_count)

    @classmethod
    def blank(cls, length: int) -> "Datum":
        """Returns a text datum of `length` zeros with targets of zero and no loss inputs."""
        zeros = np.zeros(length, np.int64)
        return cls(0, zeros, None, (), 0, zeros[:, None], {}, True)


def decode_datum(datum: trainer_pb2.Datum, index: int, loss: Loss, limits: DatumLimits) -> Datum:
    """Decodes and checks one example.

    Args:
        datum: The message.
        index: Index of the datum in the call.
        loss: The loss of the call.
        limits: Limits of the model.

    Raises:
        InvalidInput: The datum cannot be computed. The error names the field as `datum[index].field`.
    """
    path = f"datum[{index}]"
    taken = rendered_input.InputLimits(limits.vocabulary_size, limits.max_context_length)
    given = rendered_input.check(datum.input, taken, limits.vision, f"{path}.input")
    tokens = given.tokens.astype(np.int64)
    positions = None if given.positions is None else given.positions.astype(np.int64)
    targets, flat = _targets(datum, loss, limits, len(tokens), f"{path}.loss_inputs.{TARGETS}")
    shape = targets.shape[:1] if flat else targets.shape
    inputs = _loss_inputs(datum, loss, shape, f"{path}.loss_inputs")
    vision = limits.vision
    patch_count = 0 if vision is None else sum(vision.patch_count(span.embedding_count) for span in given.spans)
    experts = _experts(datum, limits.experts, len(tokens), f"{path}.loss_inputs.{EXPERTS}")
    support = _support(datum, targets, limits.vocabulary_size, f"{path}.loss_inputs.{tensors.SUPPORT}")
    return Datum(index, tokens, positions, given.spans, patch_count, targets, inputs, flat, experts, support)


def check_digests(datums: Iterable[Datum]) -> None:
    """Checks that each image digest comes with the same tensors throughout a call.

    Raises:
        InvalidInput: One digest comes with two different sets of tensors.
    """
    tensors_of: dict[str, str] = {}
    for datum in datums:
        for number, span in enumerate(datum.spans):
            known = tensors_of.setdefault(span.feature.digest, span.feature.tensors_sha256)
            if known != span.feature.tensors_sha256:
                raise _invalid(
                    f"datum[{datum.index}].input.spans[{number}].feature.tensors_sha256",
                    f"is {span.feature.tensors_sha256}, but the same digest came with {known} earlier in this call",
                )


def _invalid(field: str, problem: str) -> InvalidInput:
    return InvalidInput(f"{field} {problem}", field=field)


def _loss_inputs(datum: trainer_pb2.Datum, loss: Loss, shape: tuple[int, ...], path: str) -> dict[str, npt.NDArray]:
    known = {TARGETS, EXPERTS, tensors.SUPPORT, *(given.name for given in loss.inputs)}
    for name in sorted(datum.loss_inputs):
        if name not in known and not loss.accepts_extra_inputs:
            raise _invalid(f"{path}.{name}", f"is unknown for {loss.name}; known: {', '.join(sorted(known))}")
    inputs: dict[str, npt.NDArray] = {}
    for wanted in loss.inputs:
        field = f"{path}.{wanted.name}"
        if wanted.name not in datum.loss_inputs:
            if wanted.required:
                raise _invalid(field, f"is missing: {loss.name} requires it")
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
    datum: trainer_pb2.Datum, loss: Loss, limits: DatumLimits, token_count: int, field: str
) -> tuple[IntArray, bool]:
    if TARGETS not in datum.loss_inputs:
        raise _invalid(field, f"is missing: {loss.name} requires it")
    targets = tensors.decode(datum.loss_inputs[TARGETS], field)
    if targets.dtype.kind != "i":
        raise _invalid(field, f"has type {targets.dtype.name}, but must be int64")
    if targets.ndim not in loss.target_ranks:
        wanted = " or ".join({1: "[N]", 2: "[N, K]"}[rank] for rank in loss.target_ranks)
        raise _invalid(field, f"has shape {list(targets.shape)}, but {loss.name} accepts {wanted}")
    if targets.shape[0] != token_count:
        raise _invalid(field, f"has {targets.shape[0]} rows, but the input has {token_count} tokens")
    if targets.ndim == 2 and not targets.shape[1]:
        raise _invalid(field, "has no target at any position")
    ids: IntArray = targets.astype(np.int64)
    rendered_input.check_ids(ids, limits.vocabulary_size, field)
    return ids.reshape(token_count, -1), targets.ndim == 1


def _experts(
    datum: trainer_pb2.Datum, shape: ExpertShape | None, token_count: int, field: str
) -> npt.NDArray[np.int16] | None:
    """Returns expert ids, int16 [N, L, k].

    A client sends them as ids, or as bytes packed into int64 [N, words], because the SDK supports int64.
    """
    if EXPERTS not in datum.loss_inputs:
        return None
    if shape is None:
        raise _invalid(field, "is set, but the model has no experts: leave it out")
    given = tensors.decode(datum.loss_inputs[EXPERTS], field)
    id_type = np.dtype(np.uint8 if shape.count <= 256 else "<i4")
    row_bytes = shape.layers * shape.k * id_type.itemsize
    plain, packed = (token_count, shape.layers, shape.k), (token_count, -(-row_bytes // 8))
    if given.shape == packed and given.dtype == np.int64:
        given = given.view(np.uint8)[:, :row_bytes].copy().view(id_type).reshape(plain)
    elif given.shape != plain or given.dtype not in (np.int64, np.int32, np.uint8):
        raise _invalid(
            field,
            f"has type {given.dtype.name} and shape {list(given.shape)}; it must hold ids as int64 {list(plain)}, or"
            f" their bytes as {id_type.name} packed into int64 {list(packed)}",
        )
    outside = np.argwhere((given < 0) | (given >= shape.count))
    if outside.size:
        at = tuple(int(i) for i in outside[0])
        raise _invalid(field, f"has expert {given[at]} at {list(at)}; experts are 0 .. {shape.count - 1}")
    twice = np.argwhere((np.diff(np.sort(given, axis=-1), axis=-1) == 0).any(axis=-1))
    if twice.size:
        raise _invalid(field, f"names an expert twice at {twice[0].tolist()}")
    return given.astype(np.int16)


def _support(datum: trainer_pb2.Datum, targets: IntArray, vocabulary_size: int, field: str) -> Support | None:
    """Returns the support of each position's targets [N, K]. The client sends it packed, as uint8 [bytes]."""
    if tensors.SUPPORT not in datum.loss_inputs:
        return None
    packed = tensors.decode(datum.loss_inputs[tensors.SUPPORT], field)
    if packed.dtype != np.uint8 or packed.ndim != 1:
        raise _invalid(
            field,
            f"is {packed.dtype.name} {list(packed.shape)}, but must be packed rows, uint8 [bytes]; in the Tinker SDK a "
            "sparse tensor [positions, vocabulary]",
        )
    ids, offsets = tensors.unpack_support(packed.tobytes(), field)
    if len(offsets) - 1 != len(targets):
        raise _invalid(field, f"has {len(offsets) - 1} rows, but the input has {len(targets)} tokens")
    rendered_input.check_ids(ids, vocabulary_size, field)
    rows = np.repeat(np.arange(len(targets)), np.diff(offsets))
    # Ids ascend within a row, so these numbers ascend too, and each names a row and an id.
    places = np.append(rows * vocabulary_size + ids, -1)
    wanted = np.arange(len(targets))[:, None] * vocabulary_size + targets
    is_missing = (places[np.searchsorted(places[:-1], wanted)] != wanted) & (np.diff(offsets) > 0)[:, None]
    if is_missing.any():
        row, column = np.argwhere(is_missing)[0]
        raise _invalid(field, f"does not contain the target {targets[row, column]} in row {row}")
    return Support(ids, offsets)


def _numbers(tensor: tensor_pb2.Tensor, shape: tuple[int, ...], field: str) -> FloatArray:
    values = tensors.decode(tensor, field)
    if values.dtype.kind not in "fi":
        raise _invalid(field, f"has type {values.dtype.name}, but must be float32")
    if values.shape != shape:
        raise _invalid(field, f"has shape {list(values.shape)}, but must have the shape {list(shape)} of {TARGETS}")
    numbers: FloatArray = values.astype(np.float32)
    finite = np.isfinite(numbers)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise _invalid(field, f"has {numbers[where]} at [{', '.join(map(str, where))}], but numbers must be finite")
    return numbers


def _free_numbers(tensor: tensor_pb2.Tensor, rank: int, field: str) -> npt.NDArray:
    values = tensors.decode(tensor, field)
    if values.dtype.kind not in "fi":
        raise _invalid(field, f"has type {values.dtype.name}, but must be float32 or int64")
    if values.ndim == 1 and values.size == 1 and rank == 0:
        return values.reshape(())  # The SDK omits the shape of a scalar, as it does for one dimension.
    if values.ndim != rank:
        raise _invalid(field, f"has shape {list(values.shape)}, but the loss declares {rank} dimensions")
    return values
