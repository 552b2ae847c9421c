"""Training in Tinker's JSON and protobuf: the bodies of commands, datums in, losses out. What has no meaning here is
refused by name.
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
from fovea_gateway.futures.future import ResultEncoder, in_order, split_messages
from fovea_gateway.http.model_inputs import LoraConfig, fill_chunk
from fovea_gateway.http.request_body import Body, ModelNumber, Number

_DTYPES: dict[int, np.dtype] = {tinker_pb2.DTYPE_FLOAT32: np.dtype("<f4"), tinker_pb2.DTYPE_INT64: np.dtype("<i8")}
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
    """POST create_model."""

    session_id: str
    model_seq_id: ModelNumber
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None
    type: str = ""


class GetInfo(Body):
    """POST get_info."""

    model_id: str
    type: str = ""


@with_config(ConfigDict(extra="forbid"))
class AdamParams(TypedDict, total=False):
    """Parameters of one AdamW step. What is left out stays so: trainer.proto names the defaults, the SDK's."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class OptimStep(Body):
    """POST optim_step."""

    model_id: str
    seq_id: Number
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = ""


class SaveWeights(Body):
    """POST save_weights."""

    model_id: str
    seq_id: Number
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveWeightsForSampler(Body):
    """POST save_weights_for_sampler."""

    model_id: str
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveWeightsExternal(Body):
    """POST save_weights_external."""

    model_id: str
    seq_id: Number
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: str = ""


class LoadWeights(Body):
    """POST load_weights: form A makes a model (session_id, model_seq_id), form B loads into one (model_id, seq_id)."""

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
    """What a traced loss takes."""

    name: str
    rank: int = Field(ge=0, le=2)


class CreateCustomLoss(Body):
    """POST create_custom_loss. The graph is checked where it is kept."""

    session_id: str
    custom_loss_seq_id: Number
    name: str
    inputs: list[CustomLossInput]
    graph: dict[str, Any]
    type: str = ""


def check_dense_size(data: Sequence[tinker_pb2.Datum], most_bytes: int) -> None:
    """Raises PayloadTooLarge for sparse tensors of a few bytes each that are more than `most_bytes` once dense."""
    sparse = (t for datum in data for t in datum.loss_fn_inputs.values() if t.WhichOneof("encoding") == "sparse_csr")
    size_bytes = sum(abs(math.prod(tensor.shape)) * _WIDEST_BYTES for tensor in sparse)
    if size_bytes > most_bytes:
        raise PayloadTooLarge(f"the sparse tensors of data have {size_bytes} bytes when dense; at most {most_bytes}")


def datum_from_proto(datum: tinker_pb2.Datum, field: str) -> gateway_pb2.InputDatum:
    """A training example out of a protobuf body. Raises InvalidInput or Unimplemented naming the part."""
    check_provenance(datum, field)
    whole = gateway_pb2.InputDatum()
    for index, chunk in enumerate(datum.model_input):
        fill_chunk(chunk, whole.input.chunks.add(), f"{field}.model_input.chunks[{index}]")
    for name, tensor in datum.loss_fn_inputs.items():
        whole.loss_inputs[name].CopyFrom(tensor_from_proto(tensor, f"{field}.loss_fn_inputs.{name}"))
    return whole


def tensor_from_proto(tensor: tinker_pb2.Tensor, field: str) -> tensor_pb2.Tensor:
    """A dense tensor: int64 or float32. Sparse ones are made dense, each by its own pattern, absent cells 0.

    Raises InvalidInput naming `field` for another type, or for bytes, shape and indices that do not belong together.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidInput(f"{field} has dtype {tensor.dtype}; it must be float32 or int64", field=field)
    given_shape = tensors.check_shape(tensor.shape, field)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return tensors.encode(_densify(tensor, dtype, field))
    values = _flat(tensor.dense, dtype, field)
    # The SDK leaves the shape out for one dimension.
    shape = given_shape or (values.size,)
    if math.prod(shape) != values.size:
        raise InvalidInput(f"{field} has {values.size} values, but shape {list(shape)}", field=field)
    return tensors.encode(values.reshape(shape))


def _flat(data: bytes, dtype: np.dtype, field: str) -> npt.NDArray:
    if len(data) % dtype.itemsize:
        raise InvalidInput(f"{field} has {len(data)} bytes, no multiple of {dtype.itemsize}", field=field)
    return np.frombuffer(data, dtype)


def _densify(tensor: tinker_pb2.Tensor, dtype: np.dtype, field: str) -> npt.NDArray:
    shape = list(tensor.shape)
    if len(shape) != 2 or math.prod(shape) * dtype.itemsize > MESSAGE_BYTES:
        raise InvalidInput(f"{field} is sparse with shape {shape}; 2-D of at most 4 MiB is taken", field=field)
    index_type = np.dtype("<i8")
    values = _flat(tensor.sparse_csr.values, dtype, field)
    rows = _flat(tensor.sparse_csr.crow_indices, index_type, f"{field}.crow_indices")
    columns = _flat(tensor.sparse_csr.col_indices, index_type, f"{field}.col_indices")
    tensors.check_row_offsets(rows, values.size, shape[0], f"{field}.crow_indices")
    tensors.check_column_indices(columns, values.size, shape[1], f"{field}.col_indices")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def loss_config_from_proto(request: tinker_pb2.ForwardBackwardRequest) -> tuple[dict[str, float], str]:
    """Settings of the loss, and the id of a traced one, if it is that. The newer map wins.

    Raises InvalidInput for text, which only the `loss_id` of `custom` is.
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
                raise InvalidInput(f"{field} is {seen}; {request.loss_fn} takes numbers only", field=field)
    return config, loss_id


def check_provenance(datum: tinker_pb2.Datum, field: str) -> None:
    """Raises InvalidInput naming the list unless both are absent or both tile what they describe.

    Provenance spans say which sampled sequence the positions of a training example came from. Only the loss
    stable_reinforce reads them, and it is refused by name. The cookbook (from 0.6.1 on) attaches them to the examples
    of every loss, so they are taken, once they are what the SDK's Datum.with_provenance promises.
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
            raise InvalidInput(f"{field}[{index}] is neither of a prompt nor of sampled tokens", field=field)
        span = one.prompt_tokens if kind == "prompt_tokens" else one.sampled_tokens
        if not span.sequence_id or span.offset < 0 or span.length < 0:
            seen = f"sequence_id {span.sequence_id!r}, offset {span.offset}, length {span.length}"
            raise InvalidInput(f"{field}[{index}] has {seen}; it needs an id and no negative number", field=field)
        total += span.length
    return total


def _tile(covered: int, length: int | None, field: str, what: str) -> None:
    if length is not None and covered != length:
        raise InvalidInput(f"{field} cover {covered} positions, but {what} has {length}", field=field)


def _input_length(chunks: Iterable[tinker_pb2.Chunk]) -> int | None:
    """Positions of an input; None if an image does not say how many it takes."""
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
    """Length of target_tokens [N]; None for others, whose tiling the SDK does not check either."""
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
    """Datums of one signature fit into one record: same fields, types and trailing shapes."""
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
"""Results of forward and forward_backward."""
