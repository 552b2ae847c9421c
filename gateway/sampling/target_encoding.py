"""Tinker's target_prompt_logprobs and prompt_alt_tokens: tensors of a client into tables, and answers back."""

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import gateway_pb2, sampler_pb2
from fovea.tinker.v1 import tinker_pb2
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput
from gateway.http import bodies
from gateway.sampling import target_tables as targets
from gateway.sampling.target_tables import FIELD, NOTHING

_INT32 = np.iinfo(np.int32)


def table_from_json(tensor: bodies.TensorData) -> gateway_pb2.TargetTable:
    """The table of a JSON tensor, int64 [P - 1, K], dense or CSR. Raises InvalidInput naming what is wrong."""
    if tensor.dtype != "int64":
        raise _wrong(f"dtype is {tensor.dtype}; it must be int64")
    shape = tensor.shape
    # Without columns, or with too many, no number of cells would bound the rows.
    if shape is None or len(shape) != 2 or shape[0] < 0 or not 0 < shape[1] <= _INT32.max:
        raise _wrong(f"shape is {shape}; it must be [prompt tokens - 1, K], K from 1")
    values = np.asarray(tensor.data)
    if values.size and values.dtype.kind != "i":
        raise _wrong("data must be whole numbers within 64 bits")
    values = values.astype(np.int64)
    outside = values[(values < NOTHING) | (values > _INT32.max)]
    if outside.size:
        raise _wrong(f"data holds {outside[0]}; a cell is a token id, or -1 to ask for none")
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return _dense(values, shape)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        raise _wrong("sparse_crow_indices and sparse_col_indices go together")
    return _sparse(values, shape, tensor.sparse_crow_indices, tensor.sparse_col_indices)


def _dense(values: npt.NDArray[np.int64], shape: list[int]) -> gateway_pb2.TargetTable:
    if math.prod(shape) != values.size:
        raise _wrong(f"data has {values.size} values, but shape is {shape}")
    rows, columns = np.nonzero(values.reshape(shape) != NOTHING)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=shape[0]))))
    return _table(values[values != NOTHING], columns, offsets, shape[1], is_sparse=False)


def _sparse(
    values: npt.NDArray[np.int64], shape: list[int], crow_indices: list[int], col_indices: list[int]
) -> gateway_pb2.TargetTable:
    is_rising = all(low <= high for low, high in pairwise(crow_indices))
    if len(crow_indices) != shape[0] + 1 or crow_indices[0] != 0 or crow_indices[-1] != values.size or not is_rising:
        raise _wrong(f"sparse_crow_indices do not describe {values.size} values in {shape[0]} rows")
    if len(col_indices) != values.size or not all(0 <= column < shape[1] for column in col_indices):
        raise _wrong(f"sparse_col_indices do not fit {values.size} values in {shape[1]} columns")
    return _table(values, np.asarray(col_indices, np.int64), np.asarray(crow_indices), shape[1], is_sparse=True)


def _table(
    ids: npt.NDArray, columns: npt.NDArray, offsets: npt.NDArray, column_count: int, is_sparse: bool
) -> gateway_pb2.TargetTable:
    return gateway_pb2.TargetTable(
        tokens=sampler_pb2.TargetTokens(
            token_ids=tensors.encode(ids.astype("<i4")), row_offsets=tensors.encode(offsets.astype("<i8"))
        ),
        column_count=column_count,
        column_indices=tensors.encode(columns.astype("<i4")),
        sparse=is_sparse,
    )


def fill_targets(table: gateway_pb2.TargetTable, logprobs: bytes, message: tinker_pb2.Tensor) -> None:
    """The answer to a table, float32, in its own shape and layout; 0.0 in cells that asked for nothing."""
    cells = targets.read(table)
    values = targets.spread(cells, logprobs)
    row_count = cells.offsets.size - 1
    message.dtype = tinker_pb2.DTYPE_FLOAT32
    message.shape.extend([row_count, table.column_count])
    if table.sparse:
        message.sparse_csr.values = tensors.encode_floats(values)
        message.sparse_csr.crow_indices = cells.offsets.astype("<i8").tobytes()
        message.sparse_csr.col_indices = cells.columns.astype("<i8").tobytes()
        return
    dense = np.zeros((row_count, table.column_count), np.float32)
    dense[np.repeat(np.arange(row_count), np.diff(cells.offsets)), cells.columns] = values
    message.dense = tensors.encode_floats(dense)


def fill_alt_tokens(alt: sampler_pb2.AltTokens, message: tinker_pb2.PromptAltTokens) -> None:
    """Drawn tokens, int32, and their log-probabilities, float32, each [P - 1, k]."""
    for source, target, dtype in (
        (alt.token_ids, message.tokens, tinker_pb2.DTYPE_INT32),
        (alt.logprobs, message.logprobs, tinker_pb2.DTYPE_FLOAT32),
    ):
        target.dense, target.dtype = source.data, dtype
        target.shape.extend(source.shape)


def tensor_json(tensor: tinker_pb2.Tensor) -> dict[str, object]:
    """A tensor as JSON values; int32 goes by int64 there, which is the only whole type that JSON tensors have."""
    is_sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    data = tensor.sparse_csr.values if is_sparse else tensor.dense
    is_float = tensor.dtype == tinker_pb2.DTYPE_FLOAT32
    values = tensors.decode_floats(data) if is_float else tensors.decode_tokens(data)
    answer: dict[str, object] = {
        "data": values.tolist(),
        "dtype": "float32" if is_float else "int64",
        "shape": list(tensor.shape),
    }
    if is_sparse:
        answer["sparse_crow_indices"] = np.frombuffer(tensor.sparse_csr.crow_indices, "<i8").tolist()
        answer["sparse_col_indices"] = np.frombuffer(tensor.sparse_csr.col_indices, "<i8").tolist()
    return answer


def _wrong(message: str) -> InvalidInput:
    return InvalidInput(f"{FIELD}: {message}", field=FIELD)
