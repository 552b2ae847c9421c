"""Tinker's chunks and tensors, as JSON or protobuf, into Fovea's. Whatever has no meaning here is refused by name."""

import base64
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import gateway_pb2, model_input_pb2, tensor_pb2
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput, PayloadTooLarge, Unimplemented
from fovea.wire.limits import MESSAGE_BYTES
from gateway.http import bodies
from gateway.training.provenance import check_spans

_FORMATS = {"png": model_input_pb2.IMAGE_FORMAT_PNG, "jpeg": model_input_pb2.IMAGE_FORMAT_JPEG}
_DTYPES: dict[int, np.dtype] = {tinker_pb2.DTYPE_FLOAT32: np.dtype("<f4"), tinker_pb2.DTYPE_INT64: np.dtype("<i8")}

_WIDEST_BYTES = 8


def image_format(name: str, field: str) -> "model_input_pb2.ImageFormat":
    """The format by Tinker's name. Raises InvalidInput for any other."""
    if name not in _FORMATS:
        raise InvalidInput(f"{field} is {name!r}; it must be 'png' or 'jpeg'", field=field)
    return _FORMATS[name]


def input_from_json(prompt: bodies.ModelInput, field: str = "prompt") -> model_input_pb2.ModelInput:
    """A prompt out of a JSON body. Raises InvalidInput or Unimplemented naming the chunk."""
    whole = model_input_pb2.ModelInput()
    for index, chunk in enumerate(prompt.chunks):
        _json_chunk(chunk, whole.chunks.add(), f"{field}.chunks[{index}]")
    return whole


def _json_chunk(chunk: bodies.Chunk, message: model_input_pb2.Chunk, field: str) -> None:
    match chunk:
        case bodies.EncodedTextChunk():
            message.tokens.tokens = _token_bytes(chunk.tokens, field)
        case bodies.ImageChunk():
            try:
                message.image.data = base64.b64decode(chunk.data, validate=True)
            except ValueError as error:
                raise InvalidInput(f"{field}.data is not base64: {error}", field=f"{field}.data") from None
            message.image.format = image_format(chunk.format, f"{field}.format")
            if chunk.expected_tokens is not None:
                message.image.expected_token_count = _count(chunk.expected_tokens, field)
        case bodies.ImageAssetPointerChunk():
            message.image_reference.uri = chunk.location
            message.image_reference.format = image_format(chunk.format, f"{field}.format")
            if chunk.expected_tokens is not None:
                message.image_reference.expected_token_count = _count(chunk.expected_tokens, field)
        case bodies.DmelChunk():
            raise _no_dmel(field)


def _token_bytes(ids: list[int], field: str) -> bytes:
    try:
        return tensors.encode_tokens(ids)
    except OverflowError:
        raise InvalidInput(f"{field}.tokens has an id that no vocabulary has", field=f"{field}.tokens") from None


def _count(expected_tokens: int, field: str) -> int:
    if not 0 < expected_tokens < 2**31:
        raise InvalidInput(f"{field}.expected_tokens is {expected_tokens}", field=f"{field}.expected_tokens")
    return expected_tokens


def check_dense_size(data: Sequence[tinker_pb2.Datum], most_bytes: int) -> None:
    """Raises PayloadTooLarge for sparse tensors of a few bytes each that are more than `most_bytes` once dense."""
    sparse = (t for datum in data for t in datum.loss_fn_inputs.values() if t.WhichOneof("encoding") == "sparse_csr")
    size_bytes = sum(abs(math.prod(tensor.shape)) * _WIDEST_BYTES for tensor in sparse)
    if size_bytes > most_bytes:
        raise PayloadTooLarge(f"the sparse tensors of data have {size_bytes} bytes when dense; at most {most_bytes}")


def datum_from_proto(datum: tinker_pb2.Datum, field: str) -> gateway_pb2.InputDatum:
    """A training example out of a protobuf body. Raises InvalidInput or Unimplemented naming the part."""
    check_spans(datum, field)
    whole = gateway_pb2.InputDatum()
    for index, chunk in enumerate(datum.model_input):
        _proto_chunk(chunk, whole.input.chunks.add(), f"{field}.model_input.chunks[{index}]")
    for name, tensor in datum.loss_fn_inputs.items():
        whole.loss_inputs[name].CopyFrom(tensor_from_proto(tensor, f"{field}.loss_fn_inputs.{name}"))
    return whole


def _proto_chunk(chunk: tinker_pb2.Chunk, message: model_input_pb2.Chunk, field: str) -> None:
    match chunk.WhichOneof("chunk"):
        case "encoded_text":
            tensors.decode_tokens(chunk.encoded_text.tokens, f"{field}.tokens")
            message.tokens.tokens = chunk.encoded_text.tokens
        case "image":
            if chunk.image.HasField("override_dimensions"):
                raise Unimplemented(f"{field}.override_dimensions is not supported", field=field)
            message.image.data = chunk.image.data
            message.image.format = image_format(chunk.image.format, f"{field}.format")
            if chunk.image.HasField("expected_tokens"):
                message.image.expected_token_count = _count(chunk.image.expected_tokens, field)
        case "dmel":
            raise _no_dmel(field)
        case _:
            raise InvalidInput(f"{field} is neither text nor an image", field=field)


def _no_dmel(field: str) -> Unimplemented:
    return Unimplemented(f"{field} is a dmel (audio) chunk; this model takes text and images", field=field)


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
    if rows.size != shape[0] + 1 or rows[0] != 0 or rows[-1] != values.size or (np.diff(rows) < 0).any():
        raise InvalidInput(f"{field}.crow_indices do not describe {values.size} values in {shape[0]} rows", field=field)
    if columns.size != values.size or (columns.size and not (columns.min() >= 0 and columns.max() < shape[1])):
        raise InvalidInput(f"{field}.col_indices do not fit {values.size} values in {shape[1]} columns", field=field)
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
