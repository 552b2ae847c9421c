"""How a snapshot's tensors are cut into broadcasts and proven to have arrived. Both ends compute the same."""

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fovea.api.v1 import weights_pb2

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
WORD_BYTES = 8


def tensor_bytes(spec: weights_pb2.TensorSpec) -> int:
    """Size of one tensor. Raises KeyError for an unknown dtype."""
    return math.prod(spec.shape) * _ITEM_SIZES[spec.dtype]


def padded_bytes(spec: weights_pb2.TensorSpec) -> int:
    """Room of one tensor in a broadcast: whole words of 8 bytes, filled up with zeros."""
    return -(-tensor_bytes(spec) // WORD_BYTES) * WORD_BYTES


def buckets(specs: Iterable[weights_pb2.TensorSpec], bucket_bytes: int) -> list[list[weights_pb2.TensorSpec]]:
    """Splits tensors, in order, into broadcasts of at most `bucket_bytes`, a larger tensor by itself."""
    result: list[list[weights_pb2.TensorSpec]] = []
    used_bytes = 0
    for spec in specs:
        size_bytes = padded_bytes(spec)
        if not result or used_bytes + size_bytes > bucket_bytes:
            result.append([])
            used_bytes = 0
        result[-1].append(spec)
        used_bytes += size_bytes
    return result


def sender_groups(group_id: str, sender_count: int) -> list[str]:
    """Names of the groups of all senders of a transfer group; 0 senders are one."""
    return [group_id, *(f"{group_id}/{sender}" for sender in range(1, sender_count))]


def layout_of(manifest: weights_pb2.SnapshotManifest) -> bytes:
    """A key that manifests share if they list the same tensors, in name, type, shape and order."""
    return weights_pb2.SnapshotManifest(tensors=manifest.tensors).SerializeToString(deterministic=True)


class SnapshotDigest:
    """The identity of a run of tensors: SHA-256 over the name, type and shape of each and a fingerprint of all bytes.

    The fingerprint is a sum of mixed words, modulo 2^64: any device computes it at the speed of its memory, where
    SHA-256 has one core do everything. It tells weights apart and finds what was lost or mixed up on the way; it is no
    defence against somebody who makes tensors collide on purpose.

    Args:
        mixed_sum: The sum of `mixed` of int64 [n], what `add` is given, after so many words; numpy's by default.
    """

    def __init__(self, mixed_sum: Callable[[Any, int], Any] | None = None) -> None:
        self._hash = hashlib.sha256()
        self._mixed_sum = mixed_sum or _mixed_sum
        self._word_count = 0
        self._sums: list[Any] = []

    def add(self, specs: Iterable[weights_pb2.TensorSpec], words: Any) -> None:
        """Adds tensors. How many per call does not matter, only their order.

        Args:
            words: int64 [n], an array or tensor: the bytes of all of them, each padded as `padded_bytes` says.
        """
        for spec in specs:
            self._hash.update(f"{spec.name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}\0".encode())
        start, self._word_count = self._word_count, self._word_count + len(words)
        self._sums.append(self._mixed_sum(words, start))

    def hexdigest(self) -> str:
        """The digest of what was added so far, lower-case hexadecimal."""
        whole = self._hash.copy()
        whole.update((sum(int(part) for part in self._sums) % 2**64).to_bytes(8, "little"))
        return whole.hexdigest()


def _mixed_sum(words: Any, start: int) -> Any:
    return mixed(words, np.arange(start, start + len(words))).sum()


def mixed(words: Any, positions: Any) -> Any:
    """splitmix64's finalizer (Steele, Lea and Flood, 2014) of each word, moved on by its position; all modulo 2^64.

    Only operators that numpy and torch share; both shift signed integers arithmetically, hence the masks.
    """
    state = words + (positions + 1) * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer
    state = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return state ^ (state >> 31 & 0x1FFFFFFFF)
