"""How a snapshot's tensors are cut into broadcasts and proven to have arrived. Both ends compute the same."""

import hashlib
import math
from collections.abc import Iterable, Sequence

from typing_extensions import Buffer

from fovea.api.v1 import weights_pb2

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


def tensor_bytes(spec: weights_pb2.TensorSpec) -> int:
    """Size of one tensor. Raises KeyError for an unknown dtype."""
    return math.prod(spec.shape) * _ITEM_SIZES[spec.dtype]


def buckets(specs: Iterable[weights_pb2.TensorSpec], bucket_bytes: int) -> list[list[weights_pb2.TensorSpec]]:
    """Splits tensors, in order, into broadcasts of at most `bucket_bytes`, a larger tensor by itself."""
    result: list[list[weights_pb2.TensorSpec]] = []
    used_bytes = 0
    for spec in specs:
        size_bytes = tensor_bytes(spec)
        if not result or used_bytes + size_bytes > bucket_bytes:
            result.append([])
            used_bytes = 0
        result[-1].append(spec)
        used_bytes += size_bytes
    return result


class DigestBuilder:
    """SHA-256 over tensors in order: name, dtype, shape and bytes of each."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, name: str, dtype: str, shape: Sequence[int], data: Buffer) -> None:
        """Adds one tensor; `data` is its contiguous bytes, for example a numpy array of uint8."""
        self._hash.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode())
        self._hash.update(data)

    def hexdigest(self) -> str:
        """The digest of what was added so far, lower-case hexadecimal."""
        return self._hash.hexdigest()
