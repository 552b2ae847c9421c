"""Tensors as bytes: little-endian, row-major, and checked against their shape before use.

Sparse tensors are compressed rows (CSR): row i is `values[offsets[i]:offsets[i + 1]]`, and for rows with columns,
`columns[j]` is the column of `values[j]`.

The renderer splits the vision tensors of an image into chunks; sampler and trainer join and check them.

The support of a sampled token is the set of ids from which it was drawn; `pack_support` describes its packed rows.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import model_input_pb2, renderer_pb2, tensor_pb2
from fovea.wire.conventions import PIECE_BYTES
from fovea.wire.errors import Internal, InvalidInput

_DTYPES: dict[int, np.dtype] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.ELEMENT_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.ELEMENT_TYPE_INT32: np.dtype("<i4"),
    # numpy has no bfloat16, so its bits are stored as uint16.
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: np.dtype("<u2"),
    tensor_pb2.ELEMENT_TYPE_UINT8: np.dtype("u1"),
}
_ELEMENT_TYPES = {dtype: element_type for element_type, dtype in _DTYPES.items()}
SUPPORT = "sampled_support"
"""Name of the loss input with the support of each target."""

MOST_SUPPORT = 1024
"""The most ids in a row of a support. A larger support is recorded as full, so a row has at most 3 KiB."""

FULL_ROW = b"\0"
"""A packed row of a token that was drawn from the whole vocabulary."""

_VARINT_BYTES = 5  # for 32 bits
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


def read_csr(
    crow_indices: bytes, col_indices: bytes, shape: Sequence[int], value_count: int | None, field: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the row offsets and the column indices of a sparse tensor from their int64 bytes.

    Raises InvalidInput, naming `field`, unless they fit `shape`, which must have two dimensions, and `value_count`
    values; None stands for any number of values.
    """
    if len(shape) != 2 or min(shape) < 0:
        raise InvalidInput(f"{field} is sparse with shape {list(shape)}; it must have two dimensions", field=field)
    rows, columns = (
        _decode_flat(data, np.dtype("<i8"), f"{field}.{name}")
        for name, data in (("crow_indices", crow_indices), ("col_indices", col_indices))
    )
    count = columns.size if value_count is None else value_count
    check_row_offsets(rows, count, shape[0], f"{field}.crow_indices")
    check_column_indices(columns, count, shape[1], f"{field}.col_indices")
    return rows, columns


def pack_support(ids: npt.NDArray, offsets: npt.NDArray) -> bytes:
    """Packs the supports of N tokens. Rows can be concatenated as bytes, and a byte of 0 occurs only at a row's end.

    A row holds each id as the varint (LEB128) of its difference to the one before, the first one plus 1, and then a
    byte of 0. An empty row is a full support.

    Args:
        ids: Integers [M]; an id may occur twice in a row, and counts once.
        offsets: Integers [N + 1]: row i is `ids[offsets[i]:offsets[i + 1]]`.
    """
    ids, offsets = _sorted_rows(ids, offsets)
    gaps = np.diff(ids, prepend=0).astype(np.int64)
    starts = offsets[:-1][offsets[:-1] < offsets[1:]]
    gaps[starts] = ids[starts].astype(np.int64) + 1
    numbers = np.insert(gaps, offsets[1:], 0)
    lengths = np.ones_like(numbers)
    for place in range(1, _VARINT_BYTES):
        lengths += numbers >> 7 * place > 0
    ends = np.cumsum(lengths)
    packed = np.zeros(ends[-1] if ends.size else 0, np.uint8)
    for place in range(_VARINT_BYTES):
        longer = lengths > place
        more = np.where(lengths[longer] > place + 1, 128, 0)
        packed[(ends - lengths)[longer] + place] = numbers[longer] >> 7 * place & 127 | more
    return packed.tobytes()


def _sorted_rows(ids: npt.NDArray, offsets: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray]:
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    is_rising = (np.diff(ids) > 0) | (np.diff(rows) > 0)
    if is_rising.all():
        return ids, offsets
    order = np.lexsort((ids, rows))
    ids, rows = ids[order], rows[order]
    is_new = np.append(True, (np.diff(ids) > 0) | (np.diff(rows) > 0))
    counts = np.bincount(rows[is_new], minlength=len(offsets) - 1)
    return ids[is_new], np.concatenate(([0], np.cumsum(counts)))


def unpack_support(packed: bytes, field: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Reverses `pack_support`; returns ids int64 [M] and offsets int64 [N + 1].

    Raises InvalidInput, naming `field`, for bytes that `pack_support` cannot have returned, and for a row of more than
    MOST_SUPPORT ids.
    """
    data = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate(([0], ends[:-1] + 1)) if ends.size else ends
    lengths = ends + 1 - starts
    if data.size and (data[-1] or np.any(lengths > _VARINT_BYTES) or np.any(lengths[data[ends] == 0] > 1)):
        raise InvalidInput(f"{field} is not a packed support: see `sampled_support` in sampler.proto", field=field)
    places = np.arange(data.size) - np.repeat(starts, lengths)
    bits = (data & 127).astype(np.int64) << 7 * places
    numbers = np.add.reduceat(bits, starts) if starts.size else bits
    is_end = numbers == 0
    offsets = np.concatenate(([0], np.cumsum(~is_end)[is_end]))
    counts = np.diff(offsets)
    if counts.size and counts.max() > MOST_SUPPORT:
        raise InvalidInput(
            f"{field} has {counts.max()} ids in row {counts.argmax()}; at most {MOST_SUPPORT} are supported: leave the "
            "row empty for the whole vocabulary",
            field=field,
        )
    sums = np.cumsum(numbers[~is_end])
    before = np.concatenate(([0], sums))[offsets[:-1]]
    return sums - np.repeat(before, counts) - 1, offsets


def split_support(packed: bytes) -> list[bytes]:
    """Returns the packed rows of a support, each with its last byte."""
    return [row + FULL_ROW for row in packed.split(FULL_ROW)[:-1]]


def _decode_flat(data: bytes, dtype: np.dtype, field: str) -> npt.NDArray:
    if len(data) % dtype.itemsize:
        raise InvalidInput(f"{field} has {len(data)} bytes, which is not a multiple of {dtype.itemsize}", field=field)
    return np.frombuffer(data, dtype)


def _element_type(dtype: np.dtype) -> tensor_pb2.ElementType:
    element_type = _ELEMENT_TYPES.get(dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype)
    if element_type is None:
        raise TypeError(f"no element type for {dtype}")
    return tensor_pb2.ElementType.ValueType(element_type)  # type: ignore[return-value]


FeatureTensors = dict[str, npt.NDArray]
"""Tensors of one image, keyed by the names that the model's processor uses, such as `pixel_values`."""


def tensors_sha256(feature: Mapping[str, npt.NDArray]) -> str:
    """Returns the SHA-256 of name, type, shape and bytes of each tensor, in name order, in lower-case hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(feature):
        array = feature[name]
        digest.update(f"{name}\0{array.dtype.name}\0{','.join(map(str, array.shape))}\0".encode())
        digest.update(_flat_bytes(array))
    return digest.hexdigest()


def _flat_bytes(array: npt.NDArray) -> memoryview:
    """Returns the bytes of an array, without a copy if they are contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def size_bytes(feature: Mapping[str, npt.NDArray]) -> int:
    """Returns the total size of the tensors."""
    return sum(array.nbytes for array in feature.values())


def iter_pieces(digest: str, feature: Mapping[str, npt.NDArray]) -> Iterator[renderer_pb2.FetchFeaturesResponse]:
    """Splits the tensors of one image into messages with at most 1 MiB of data each."""
    names = sorted(feature)
    for name in names:
        data = _flat_bytes(feature[name])
        offsets = range(0, max(len(data), 1), PIECE_BYTES)
        for offset in offsets:
            yield renderer_pb2.FetchFeaturesResponse(
                digest=digest,
                name=name,
                header=header(feature[name]) if offset == 0 else None,
                data=bytes(data[offset : offset + PIECE_BYTES]),
                feature_complete=name == names[-1] and offset == offsets[-1],
            )


def check_feature(feature: model_input_pb2.VisionFeature, tensors: FeatureTensors | None) -> FeatureTensors:
    """Returns the tensors if they match the digest in `feature`. Raises Internal if not."""
    if tensors is None:
        raise Internal(f"the renderer at {feature.source} sent no tensors for image {feature.digest}")
    if (found := tensors_sha256(tensors)) != feature.tensors_sha256:
        raise Internal(
            f"the tensors of image {feature.digest} from {feature.source} have digest {found}, not "
            f"{feature.tensors_sha256}"
        )
    return tensors


class FeatureAssembler:
    """The receiver of a FetchFeatures stream, which joins its chunks into tensors."""

    def __init__(self) -> None:
        self._feature: FeatureTensors = {}
        self._header: tensor_pb2.Tensor | None = None
        self._name = ""
        self._data = bytearray()

    def feed(self, piece: renderer_pb2.FetchFeaturesResponse) -> tuple[str, FeatureTensors] | None:
        """Adds the next chunk. Returns (digest, tensors) when it completes a feature, else None.

        Raises:
            Internal: The stream starts in the middle of a tensor.
            InvalidInput: The bytes of a tensor do not match its type and shape.
        """
        if piece.HasField("header"):
            self._finish_tensor()
            self._header, self._name = piece.header, piece.name
        elif self._header is None:
            raise Internal(f"feature stream of {piece.digest} begins without a header")
        self._data += piece.data
        if not piece.feature_complete:
            return None
        self._finish_tensor()
        feature, self._feature = self._feature, {}
        return piece.digest, feature

    def _finish_tensor(self) -> None:
        if self._header is not None:
            self._feature[self._name] = from_bytes(self._data, self._header, self._name)
        self._header, self._data = None, bytearray()
