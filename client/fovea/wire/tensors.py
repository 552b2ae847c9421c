"""Tensors as bytes: little-endian, row-major, and checked against their shape before use.

Sparse tensors are compressed rows (CSR): row i is `values[offsets[i]:offsets[i + 1]]`, and for rows with columns,
`columns[j]` is the column of `values[j]`.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import tensor_pb2
from fovea.wire.errors import InvalidInput

_DTYPES: dict[int, np.dtype] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.ELEMENT_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.ELEMENT_TYPE_INT32: np.dtype("<i4"),
    # numpy has no bfloat16, so its bits are stored as uint16.
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: np.dtype("<u2"),
    tensor_pb2.ELEMENT_TYPE_UINT8: np.dtype("u1"),
}
_ELEMENT_TYPES = {dtype: element_type for element_type, dtype in _DTYPES.items()}
_MOST_DIMENSIONS = 8
_MOST_ELEMENTS = 2**48

Array = npt.NDArray[np.generic]


def encode(array: npt.NDArray) -> tensor_pb2.Tensor:
    """Encodes an array of float32, int64, int32, uint8, or uint16 (the bits of bfloat16).

    Raises TypeError for any other dtype, which only a bug in Fovea can cause.
    """
    return tensor_pb2.Tensor(
        element_type=_element_type(array.dtype), shape=array.shape, data=np.ascontiguousarray(array).tobytes()
    )


def header(array: npt.NDArray) -> tensor_pb2.Tensor:
    """Returns the type and shape of an array as a message without data."""
    return tensor_pb2.Tensor(element_type=_element_type(array.dtype), shape=array.shape)


def decode(tensor: tensor_pb2.Tensor, field: str = "tensor") -> npt.NDArray:
    """Decodes a tensor as a read-only view of the message's bytes; bfloat16 as uint16 bits.

    Raises:
        InvalidInput: The type is unknown, the shape is impossible, or the number of bytes does not match type and
            shape. Names `field`.
    """
    return from_bytes(tensor.data, tensor, field)


def from_bytes(data: bytes | bytearray, header: tensor_pb2.Tensor, field: str = "tensor") -> npt.NDArray:
    """Returns a view of `data` with the type and shape of `header`. Raises the errors of `decode`."""
    dtype = _DTYPES.get(header.element_type)
    if dtype is None:
        raise InvalidInput(f"{field}.element_type {header.element_type} is not supported", field=field)
    shape = check_shape(header.shape, field)
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InvalidInput(
            f"{field}.data has {len(data)} bytes, but shape {list(shape)} of {dtype.name} needs {expected}", field=field
        )
    return np.frombuffer(data, dtype).reshape(shape)


def check_shape(shape: Sequence[int], field: str) -> tuple[int, ...]:
    """Returns the shape as a tuple. Raises InvalidInput, naming `field`, if no array can have it, even an empty one."""
    if len(shape) > _MOST_DIMENSIONS:
        raise InvalidInput(
            f"{field}.shape has {len(shape)} dimensions; at most {_MOST_DIMENSIONS} are allowed", field=field
        )
    if any(extent < 0 for extent in shape):
        raise InvalidInput(f"{field}.shape {list(shape)} has a negative size", field=field)
    # Check the other dimensions even if one is 0: the byte count cannot bound them in an empty array.
    if math.prod(extent or 1 for extent in shape) > _MOST_ELEMENTS:
        raise InvalidInput(f"{field}.shape {list(shape)} is too large", field=field)
    return tuple(shape)


def encode_tokens(ids: Sequence[int] | npt.NDArray) -> bytes:
    """Encodes token ids as int32 bytes. Raises OverflowError for ids outside int32."""
    array = np.asarray(ids, dtype=np.int64)
    if array.size and (array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min):
        raise OverflowError("a token id does not fit into int32")
    return array.astype("<i4").tobytes()


def decode_tokens(data: bytes, field: str = "tokens") -> npt.NDArray[np.int32]:
    """Decodes token ids, int32 [N]. Raises InvalidInput if the length is not a multiple of 4."""
    return _decode_flat(data, np.dtype("<i4"), field)


def encode_floats(values: Sequence[float] | npt.NDArray) -> bytes:
    """Encodes numbers as float32 bytes."""
    return np.asarray(values, dtype="<f4").tobytes()


def decode_floats(data: bytes, field: str = "values") -> npt.NDArray[np.float32]:
    """Decodes numbers, float32 [N]. Raises InvalidInput if the length is not a multiple of 4."""
    return _decode_flat(data, np.dtype("<f4"), field)


def check_row_offsets(offsets: npt.NDArray, value_count: int, row_count: int | None, field: str) -> None:
    """Raises InvalidInput, naming `field`, unless `offsets` divides `value_count` values into rows.

    Args:
        offsets: Integers [row_count + 1] that rise from 0 to `value_count`.
        value_count: Number of values.
        row_count: Number of rows; None for any number.
        field: Name of the tensor in error messages.
    """
    is_list = offsets.ndim == 1 and offsets.dtype.kind in "iu" and offsets.size > 0
    if not is_list or (row_count is not None and offsets.size != row_count + 1):
        needed = "at least 1" if row_count is None else row_count + 1
        raise InvalidInput(
            f"{field} is {offsets.dtype.name} {list(offsets.shape)}; it must be a list of {needed} integers, "
            "one more than there are rows",
            field=field,
        )
    if offsets[0] != 0 or offsets[-1] != value_count or np.any(offsets[1:] < offsets[:-1]):
        raise InvalidInput(f"{field} must rise from 0 to {value_count}, the number of values", field=field)


def check_column_indices(columns: npt.NDArray, value_count: int, column_count: int, field: str) -> None:
    """Raises InvalidInput, naming `field`, unless `columns` has an integer below `column_count` for each value."""
    if columns.shape != (value_count,):
        raise InvalidInput(f"{field} has shape {list(columns.shape)}, but there are {value_count} values", field=field)
    if not columns.size:
        return
    if columns.dtype.kind not in "iu" or columns.min() < 0 or columns.max() >= column_count:
        raise InvalidInput(f"{field} must contain integers in 0 .. {column_count - 1}", field=field)


def _decode_flat(data: bytes, dtype: np.dtype, field: str) -> npt.NDArray:
    if len(data) % dtype.itemsize:
        raise InvalidInput(f"{field} has {len(data)} bytes, which is not a multiple of {dtype.itemsize}", field=field)
    return np.frombuffer(data, dtype)


def _element_type(dtype: np.dtype) -> tensor_pb2.ElementType:
    element_type = _ELEMENT_TYPES.get(dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype)
    if element_type is None:
        raise TypeError(f"no element type for {dtype}")
    return tensor_pb2.ElementType.ValueType(element_type)  # type: ignore[return-value]
