"""Training in Tinker's JSON and protobuf formats: bodies of commands, datums and losses.

A field that Fovea does not support raises an error that names it.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from fovea.api.v1 import gateway_pb2, tensor_pb2, trainer_pb2
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import tensors
from fovea.wire.conventions import MESSAGE_BYTES
from fovea.wire.errors import InvalidInput, PayloadTooLarge
from fovea_gateway.http.model_inputs import LoraConfig, fill_chunk
from fovea_gateway.http.request_body import Body, ModelNumber, Number
from fovea_gateway.sampling.recordings import STABLE_REINFORCE
from fovea_gateway.sessions.future import ResultEncoder, in_order, split_messages

_DTYPES: dict[int, np.dtype] = {tinker_pb2.DTYPE_FLOAT32: np.dtype("<f4"), tinker_pb2.DTYPE_INT64: np.dtype("<i8")}
_ELEMENT_TYPES: dict[int, "tensor_pb2.ElementType"] = {
    tinker_pb2.DTYPE_FLOAT32: tensor_pb2.ELEMENT_TYPE_FLOAT32,
    tinker_pb2.DTYPE_INT64: tensor_pb2.ELEMENT_TYPE_INT64,
}
_WIDEST_BYTES = 8
_TOKEN_BYTES, _TARGET_BYTES = 4, 8
_SPAN_LISTS = ("model_input_spans", "loss_fn_input_spans")
_OUTPUT_TYPE = "TorchLossReturn"
_RESULT_DTYPES: dict[int, "tinker_pb2.DType"] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: tinker_pb2.DTYPE_FLOAT32,
    tensor_pb2.ELEMENT_TYPE_INT64: tinker_pb2.DTYPE_INT64,
    tensor_pb2.ELEMENT_TYPE_INT32: tinker_pb2.DTYPE_INT32,
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: tinker_pb2.DTYPE_BFLOAT16,
}


class CreateModel(Body):
    """The body of POST create_model."""

    session_id: str
    model_seq_id: ModelNumber
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None
    type: str = ""


class GetInfo(Body):
    """The body of POST get_info."""

    model_id: str
    type: str = ""


@with_config(ConfigDict(extra="forbid"))
class AdamParams(TypedDict, total=False):
    """Parameters of one AdamW step. Absent fields stay absent: trainer.proto has the defaults, which are the SDK's."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class OptimStep(Body):
    """The body of POST optim_step."""

    model_id: str
    seq_id: Number
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = ""


class SaveWeights(Body):
    """The body of POST save_weights."""

    model_id: str
    seq_id: Number
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveWeightsForSampler(Body):
    """The body of POST save_weights_for_sampler."""

    model_id: str
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveWeightsExternal(Body):
    """The body of POST save_weights_external."""

    model_id: str
    seq_id: Number
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: str = ""


class LoadWeights(Body):
    """The body of POST load_weights.

    Form A creates a model (session_id, model_seq_id); form B loads into an existing one (model_id, seq_id).
    """

    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: ModelNumber | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: str = ""


class CustomLossInput(Body):
    """An input of a traced loss."""

    name: str
    rank: int = Field(ge=0, le=2)


class CreateCustomLoss(Body):
    """The body of POST create_custom_loss. `CustomLosses` checks the graph before it stores it."""

    session_id: str
    custom_loss_seq_id: Number
    name: str
    inputs: list[CustomLossInput]
    graph: dict[str, Any]
    type: str = ""


def check_dense_size(data: Sequence[tinker_pb2.Datum], most_bytes: int) -> None:
    """Raises PayloadTooLarge if the sparse tensors would use more than `most_bytes` in total as dense tensors."""
    named = (item for datum in data for item in datum.loss_fn_inputs.items() if item[0] != tensors.SUPPORT)
    sparse = (tensor for _, tensor in named if tensor.WhichOneof("encoding") == "sparse_csr")
    size_bytes = sum(abs(math.prod(tensor.shape)) * _WIDEST_BYTES for tensor in sparse)
    if size_bytes > most_bytes:
        raise PayloadTooLarge(f"the sparse tensors of data have {size_bytes} bytes when dense; at most {most_bytes}")


def header_from_proto(body: tinker_pb2.ForwardBackwardRequest) -> gateway_pb2.SubmitForwardBackwardHeader:
    """Returns the header of a protobuf body without the settings of its loss, which may be invalid."""
    return gateway_pb2.SubmitForwardBackwardHeader(
        model_id=body.model_id, seq_id=body.seq_id, loss_function=body.loss_fn, backward=not body.forward_only
    )


def data_from_proto(
    body: tinker_pb2.ForwardBackwardRequest, header: gateway_pb2.SubmitForwardBackwardHeader
) -> list[gateway_pb2.InputDatum]:
    """Converts the training examples of a body, and completes its header with the settings of the loss.

    Raises InvalidInput or Unimplemented that names the field.
    """
    config, header.custom_loss_id = loss_config_from_proto(body)
    header.loss_config.update(config)
    data = [datum_from_proto(datum, f"data[{index}]") for index, datum in enumerate(body.data)]
    if body.loss_fn == STABLE_REINFORCE:
        for datum, whole in zip(body.data, data, strict=True):
            whole.input_spans.extend(map(_span, datum.model_input_spans))
            whole.target_spans.extend(map(_span, datum.loss_fn_input_spans))
    return data


def _span(span: tinker_pb2.ProvenanceSpan) -> gateway_pb2.SequenceSpan:
    is_sampled = span.WhichOneof("span") == "sampled_tokens"
    of = span.sampled_tokens if is_sampled else span.prompt_tokens
    return gateway_pb2.SequenceSpan(sequence_id=of.sequence_id, sampled=is_sampled, offset=of.offset, length=of.length)


def datum_from_proto(datum: tinker_pb2.Datum, field: str) -> gateway_pb2.InputDatum:
    """Converts a training example from a protobuf body. Raises InvalidInput or Unimplemented that names the field."""
    check_provenance(datum, field)
    whole = gateway_pb2.InputDatum()
    for index, chunk in enumerate(datum.model_input):
        fill_chunk(chunk, whole.input.chunks.add(), f"{field}.model_input.chunks[{index}]")
    for name, tensor in datum.loss_fn_inputs.items():
        is_support = name == tensors.SUPPORT and tensor.WhichOneof("encoding") == "sparse_csr"
        fill = _fill_support if is_support else _fill_tensor
        fill(tensor, whole.loss_inputs[name], f"{field}.loss_fn_inputs.{name}")
    return whole


def tensor_from_proto(tensor: tinker_pb2.Tensor, field: str) -> tensor_pb2.Tensor:
    """Converts a tensor to a dense int64 or float32 tensor. Absent cells of a sparse tensor become 0.

    Raises InvalidInput that names `field` for another dtype, or if the bytes, the shape and the indices do not match.
    """
    message = tensor_pb2.Tensor()
    _fill_tensor(tensor, message, field)
    return message


def _fill_tensor(tensor: tinker_pb2.Tensor, message: tensor_pb2.Tensor, field: str) -> None:
    """Writes what `tensor_from_proto` returns into a message that is part of another one, which saves a copy."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidInput(f"{field} has dtype {tensor.dtype}; it must be float32 or int64", field=field)
    given_shape = tensors.check_shape(tensor.shape, field)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        message.CopyFrom(tensors.encode(_densify(tensor, dtype, field)))
        return
    data = tensor.dense
    count = _values(data, dtype, field).size
    # The SDK omits the shape of a one-dimensional tensor.
    shape = given_shape or (count,)
    if math.prod(shape) != count:
        raise InvalidInput(f"{field} has {count} values, but its shape is {list(shape)}", field=field)
    # Both wires have the same little-endian values.
    message.element_type = _ELEMENT_TYPES[tensor.dtype]
    message.shape.extend(shape)
    message.data = data


def _values(data: bytes, dtype: np.dtype, field: str) -> npt.NDArray:
    if len(data) % dtype.itemsize:
        raise InvalidInput(f"{field} has {len(data)} bytes, not a multiple of {dtype.itemsize}", field=field)
    return np.frombuffer(data, dtype)


def _fill_support(tensor: tinker_pb2.Tensor, message: tensor_pb2.Tensor, field: str) -> None:
    """Writes the columns of each row of a sparse tensor [N, vocabulary] as packed supports. Ignores its values."""
    csr = tensor.sparse_csr
    offsets, ids = tensors.read_csr(csr.crow_indices, csr.col_indices, tensor.shape, None, field)
    message.CopyFrom(tensors.encode(np.frombuffer(tensors.pack_support(ids, offsets), np.uint8)))


def _densify(tensor: tinker_pb2.Tensor, dtype: np.dtype, field: str) -> npt.NDArray:
    shape = list(tensor.shape)
    if len(shape) != 2 or math.prod(shape) * dtype.itemsize > MESSAGE_BYTES:
        raise InvalidInput(f"{field} is sparse with shape {shape}; it must be 2-D and at most 4 MiB", field=field)
    csr, values = tensor.sparse_csr, _values(tensor.sparse_csr.values, dtype, field)
    rows, columns = tensors.read_csr(csr.crow_indices, csr.col_indices, shape, values.size, field)
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def loss_config_from_proto(request: tinker_pb2.ForwardBackwardRequest) -> tuple[dict[str, float], str]:
    """Returns the numeric settings of the loss, and the id of a traced loss or "". The newer map has precedence.

    Raises InvalidInput for a text value, unless it is the `loss_id` of `custom`.
    """
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config), ""
    config, loss_id = {}, ""
    for name, value in request.loss_fn_config_v2.items():
        match value.WhichOneof("value"):
            case "number":
                config[name] = value.number
            case "text" if name == "loss_id" and request.loss_fn == "custom":
                loss_id = value.text
            case _:
                field, seen = f"loss_fn_config.{name}", repr(value.text[:80])
                raise InvalidInput(f"{field} is {seen}; {request.loss_fn} accepts numbers only", field=field)
    return config, loss_id


def check_provenance(datum: tinker_pb2.Datum, field: str) -> None:
    """Raises InvalidInput that names the list unless both lists of spans are absent or both tile their sequences.

    Provenance spans state the sampled sequence from which the positions of a training example came. Only the loss
    stable_reinforce reads them. The cookbook (since 0.6.1) attaches spans to the examples of every loss. The gateway
    therefore accepts them if they fulfil the promise of the SDK's Datum.with_provenance.
    """
    here = [name for name in _SPAN_LISTS if getattr(datum, name)]
    if len(here) == 1:
        raise InvalidInput(
            f"{field} has {here[0]} only; set both lists of spans or neither", field=f"{field}.{here[0]}"
        )
    if not here:
        return
    model_input = _spans_length(datum.model_input_spans, f"{field}.model_input_spans")
    loss_inputs = _spans_length(datum.loss_fn_input_spans, f"{field}.loss_fn_input_spans")
    _tile(model_input, _input_length(datum.model_input), f"{field}.model_input_spans", "the input")
    _tile(loss_inputs, _target_length(datum), f"{field}.loss_fn_input_spans", "target_tokens")


def _spans_length(spans: Iterable[tinker_pb2.ProvenanceSpan], field: str) -> int:
    total = 0
    for index, one in enumerate(spans):
        kind = one.WhichOneof("span")
        if kind is None:
            raise InvalidInput(f"{field}[{index}] is neither a prompt span nor a span of sampled tokens", field=field)
        span = one.prompt_tokens if kind == "prompt_tokens" else one.sampled_tokens
        if not span.sequence_id or span.offset < 0 or span.length < 0:
            seen = f"sequence_id {span.sequence_id!r}, offset {span.offset}, length {span.length}"
            raise InvalidInput(f"{field}[{index}] has {seen}; it needs an id and no negative number", field=field)
        total += span.length
    return total


def _tile(covered: int, length: int | None, field: str, what: str) -> None:
    if length is not None and covered != length:
        raise InvalidInput(f"{field} covers {covered} positions, but {what} has {length}", field=field)


def _input_length(chunks: Iterable[tinker_pb2.Chunk]) -> int | None:
    """Returns the number of positions of an input; None if an image does not state its number of tokens."""
    total = 0
    for chunk in chunks:
        if chunk.WhichOneof("chunk") == "encoded_text":
            total += len(chunk.encoded_text.tokens) // _TOKEN_BYTES
        elif chunk.image.HasField("expected_tokens"):
            total += chunk.image.expected_tokens
        else:
            return None
    return total


def _target_length(datum: tinker_pb2.Datum) -> int | None:
    """Returns the length of target_tokens [N]; None for other forms, since the SDK does not check spans of those."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None or targets.dtype != tinker_pb2.DTYPE_INT64:
        return None
    if targets.WhichOneof("encoding") != "dense" or len(targets.shape) > 1:
        return None
    return len(targets.dense) // _TARGET_BYTES


def _forward_backward(blob: bytes) -> tinker_pb2.ForwardBackwardOutput:
    outputs, metrics = _split(blob)
    response = tinker_pb2.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE, metrics=metrics)
    for _, group in groupby(outputs, key=_signature):
        response.loss_fn_outputs.append(_array_record(list(group)))
    return response


def _split(blob: bytes) -> tuple[list[trainer_pb2.DatumOutput], dict[str, float]]:
    parts = split_messages(gateway_pb2.WaitFutureResponse, blob)
    outputs = [part.output for part in parts if part.WhichOneof("record") == "output"]
    return outputs, in_order(parts[-1].metrics.values)


def _signature(output: trainer_pb2.DatumOutput) -> list[tuple[str, int, tuple[int, ...]]]:
    """Returns the key by which datums are grouped: those with the same fields, types and trailing shapes share a
    record.
    """
    return [(name, t.element_type, tuple(t.shape[1:])) for name, t in sorted(output.tensors.items())]


def _array_record(group: list[trainer_pb2.DatumOutput]) -> tinker_pb2.ArrayRecord:
    record = tinker_pb2.ArrayRecord(type_tag=_OUTPUT_TYPE, num_datums=len(group))
    for name, element_type, trailing_shape in _signature(group[0]):
        parts = [output.tensors[name].data for output in group]
        offsets = np.cumsum([0, *map(len, parts)], dtype="<i8")
        record.fields[name].CopyFrom(
            tinker_pb2.BatchedTensor(
                data=b"".join(parts),
                offsets=offsets.tobytes(),
                dtype=_RESULT_DTYPES[element_type],
                trailing_shape=trailing_shape,
            )
        )
    return record


def _forward_backward_json(blob: bytes) -> dict[str, Any]:
    outputs, metrics = _split(blob)
    listed = [{name: _tensor_json(tensor) for name, tensor in sorted(output.tensors.items())} for output in outputs]
    return {"loss_fn_output_type": _OUTPUT_TYPE, "loss_fn_outputs": listed, "metrics": metrics}


def _tensor_json(tensor: tensor_pb2.Tensor) -> dict[str, Any]:
    array = tensors.decode(tensor)
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    return {"data": array.ravel().tolist(), "dtype": dtype, "shape": list(array.shape)}


def _forward_backward_proto(blob: bytes) -> bytes:
    return _forward_backward(blob).SerializeToString(deterministic=True)


LOSSES = ResultEncoder(_forward_backward_json, _forward_backward_proto)
"""Encodes the results of forward and forward_backward."""
