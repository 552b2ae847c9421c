"""Splits a snapshot into broadcasts and computes the digest that proves its arrival, the same way on both ends."""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fovea.api.v1 import sampler_pb2, weights_pb2

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
WORD_BYTES = 8
_LAYER = re.compile(r".*?\.\d+\.")


def tensor_bytes(spec: weights_pb2.TensorSpec) -> int:
    """Returns the size of a tensor. Raises KeyError for an unknown dtype."""
    return math.prod(spec.shape) * _ITEM_SIZES[spec.dtype]


def padded_bytes(spec: weights_pb2.TensorSpec) -> int:
    """Returns the size of a tensor in a broadcast: rounded up to words of 8 bytes, with zeros as padding."""
    return -(-tensor_bytes(spec) // WORD_BYTES) * WORD_BYTES


def buckets(specs: Iterable[weights_pb2.TensorSpec], bucket_bytes: int) -> list[list[weights_pb2.TensorSpec]]:
    """Splits tensors, in order, into broadcasts of at most `bucket_bytes`. A larger tensor gets its own broadcast."""
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


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one worker receives.

    Args:
        spec: Name, type and shape of the part.
        whole: Those of the tensor; the same object if the part is the whole tensor.
        dimension: The dimension that is divided.
        ranges: Start and end of each range of indices along it, ascending.
        holders: The workers that receive this part, separated by commas.
    """

    spec: weights_pb2.TensorSpec
    whole: weights_pb2.TensorSpec
    dimension: int
    ranges: tuple[tuple[int, int], ...]
    holders: str

    @property
    def is_whole(self) -> bool:
        return self.spec is self.whole

    @property
    def row_bytes(self) -> tuple[int, int]:
        """The bytes of one index along `dimension`, and of all its indices."""
        inner = math.prod(self.whole.shape[self.dimension + 1 :]) * _ITEM_SIZES[self.whole.dtype]
        return inner, inner * self.whole.shape[self.dimension]


def division_problem(
    specs: Sequence[weights_pb2.TensorSpec], ready: sampler_pb2.SnapshotReady, worker_count: int
) -> str:
    """Returns the reason why `parts_of` cannot divide tensors over workers, or an empty string.

    Args:
        specs: The tensors.
        ready: The division.
        worker_count: The number of workers; 0 if nothing may be divided.
    """
    numbers = ready.split_of or [0] * len(specs)
    if len(numbers) != len(specs):
        return f"split_of has {len(numbers)} entries for {len(specs)} tensors"
    for spec, number in zip(specs, numbers, strict=True):
        if not 0 <= number <= len(ready.splits):
            return f"{spec.name} has division {number} of {len(ready.splits)}"
        if not number:
            continue
        split = ready.splits[number - 1]
        if len(split.parts) != worker_count or not 0 <= split.dimension < len(spec.shape):
            return f"{spec.name} is divided into {len(split.parts)} parts along dimension {split.dimension}"
        for bounds in (list(part.bounds) for part in split.parts):
            ascending = [0, *bounds, spec.shape[split.dimension]]
            if len(bounds) % 2 or ascending != sorted(ascending):
                return f"{spec.name} of shape {list(spec.shape)} has a part with bounds {bounds}"
    return ""


def parts_of(
    specs: Iterable[weights_pb2.TensorSpec], ready: sampler_pb2.SnapshotReady, worker: int, worker_count: int
) -> list[Part]:
    """Returns the part of each tensor that a worker receives, in order. It may be empty."""
    everyone = ",".join(map(str, range(worker_count)))
    cuts = []
    for split in ready.splits:
        bounds = [tuple(part.bounds) for part in split.parts]
        own = bounds[worker]
        holders = ",".join(str(index) for index, one in enumerate(bounds) if one == own)
        cuts.append((split.dimension, tuple(zip(own[::2], own[1::2], strict=True)), holders))
    result = []
    for index, spec in enumerate(specs):
        number = ready.split_of[index] if ready.split_of else 0
        if not number:
            result.append(Part(spec, spec, 0, (), everyone))
            continue
        dimension, ranges, holders = cuts[number - 1]
        cut = weights_pb2.TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape)
        cut.shape[dimension] = sum(end - start for start, end in ranges)
        result.append(Part(cut, spec, dimension, ranges, holders))
    return result


def most_placed_bytes(sizes: Iterable[tuple[str, int]]) -> int:
    """Returns the most bytes that a worker needs for divided tensors in full shape while vLLM loads them.

    vLLM may hold the tensors of a layer until the layer is complete, and those outside layers until the end.

    Args:
        sizes: The name of each divided tensor, and its bytes in full shape.
    """
    layers = Counter({"": 0})
    for name, size_bytes in sizes:
        layer = _LAYER.match(name)
        layers[layer[0] if layer else ""] += size_bytes
    return layers.pop("") + max(layers.values(), default=0)


def sender_groups(group_id: str, sender_count: int, worker: int | None = None) -> list[str]:
    """Returns the group name of each sender of a transfer group. 0 senders count as one.

    Args:
        group_id: The transfer group.
        sender_count: The number of senders.
        worker: The worker that receives, in a split group.
    """
    names = [group_id, *(f"{group_id}/{sender}" for sender in range(1, sender_count))]
    return names if worker is None else [f"{name}.{worker}" for name in names]


def layout_of(manifest: weights_pb2.SnapshotManifest) -> bytes:
    """Returns a key that is equal for manifests with the same tensors: same names, types, shapes and order."""
    return weights_pb2.SnapshotManifest(tensors=manifest.tensors).SerializeToString(deterministic=True)


class SnapshotDigest:
    """Digest of a sequence of tensors: SHA-256 of their names, types and shapes and of a fingerprint of their bytes.

    The fingerprint is a sum of mixed words modulo 2^64. Any device computes it at the speed of its memory, while
    SHA-256 over all bytes would run on one core. It distinguishes weights and detects lost or swapped data in transit.
    It does not protect against collisions made on purpose.

    Args:
        mixed_sum: Function of words, int64 [n], and the number of words before them. Returns the sum of `mixed` over
            the words. Uses numpy by default.
    """

    def __init__(self, mixed_sum: Callable[[Any, int], Any] | None = None) -> None:
        self._hash = hashlib.sha256()
        self._mixed_sum = mixed_sum or _mixed_sum
        self._word_count = 0
        self._sums: list[Any] = []

    def add(self, specs: Iterable[weights_pb2.TensorSpec], words: Any) -> None:
        """Adds tensors. Only their order matters, not how many each call adds.

        Args:
            specs: Names, types and shapes of the tensors.
            words: int64 [n], array or tensor: the bytes of all tensors, each padded to `padded_bytes`.
        """
        for spec in specs:
            self._hash.update(f"{spec.name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}\0".encode())
        start, self._word_count = self._word_count, self._word_count + len(words)
        self._sums.append(self._mixed_sum(words, start) if len(words) else 0)

    def add_sum(self, specs: Iterable[weights_pb2.TensorSpec], mixed_sum: int) -> None:
        """Adds tensors, after which no others follow, by the sum of all their mixed words."""
        self.add(specs, ())
        self._sums.append(mixed_sum)

    def hexdigest(self) -> str:
        """Returns the digest of all tensors added so far, in lower-case hexadecimal."""
        whole = self._hash.copy()
        whole.update((sum(int(part) for part in self._sums) % 2**64).to_bytes(8, "little"))
        return whole.hexdigest()


def joined_digest(specs: Iterable[weights_pb2.TensorSpec], sums: Iterable[Mapping[str, int]]) -> str:
    """Returns the digest of a snapshot of which each worker received parts.

    Args:
        specs: The tensors.
        sums: For each worker: the sum of the mixed words of its parts modulo 2^64, by the parts' holders.

    Raises ValueError if two workers received different bytes of the same parts, or a holder does not report its sum.
    """
    joined: dict[str, int] = {}
    reported = defaultdict[str, list[str]](list)
    for index, worker in enumerate(sums):
        for holders, found in worker.items():
            reported[holders].append(str(index))
            if joined.setdefault(holders, found) != found:
                raise ValueError(f"workers {holders} received different bytes of the same tensors")
    for holders, found_at in reported.items():
        if holders.split(",") != found_at:
            raise ValueError(f"workers {holders} hold the same tensors, but only {','.join(found_at)} reported them")
    digest = SnapshotDigest()
    digest.add_sum(specs, sum(joined.values()))
    return digest.hexdigest()


def _mixed_sum(words: Any, start: int) -> Any:
    return mixed(words, np.arange(start, start + len(words))).sum()


def mixed(words: Any, positions: Any) -> Any:
    """Mixes each word with its position: splitmix64's finalizer (Steele, Lea and Flood, 2014), modulo 2^64.

    Uses only operators that numpy and torch share. Both shift signed integers arithmetically, so masks clear the copied
    sign bits.
    """
    state = words + (positions + 1) * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer
    state = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return state ^ (state >> 31 & 0x1FFFFFFFF)
