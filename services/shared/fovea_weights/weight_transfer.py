"""Weight transfer on GPUs, shared by trainer and sampler: digests of snapshots and parts of them, tensors in full shape
made of a part, the groups over which snapshots are broadcast, and broadcasts over one shared GPU.

Digest. On a GPU a Triton kernel computes it and reads the tensors once. torch's operators would read and write each
word fourteen times. For 8.9 GB on an H200 these passes take 0.06 s at the speed of its memory, on the sending side and
again on the receiving side. Their intermediate results need three times the memory of a chunk.

Broadcast. NCCL refuses to send between processes that share one GPU, so they use memory that all of them map. The
sender owns a buffer on the GPU, which receivers map with CUDA IPC. Data passes through the buffer in slices. One key in
the group's store announces each slice, and one key per receiver reports that the receiver has copied it.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from fovea.wire.manifest import WORD_BYTES, Part, SnapshotDigest, mixed, padded_bytes
from fovea_weights.shared_memory import allocate, map_memory

# The type stubs of torch.distributed omit half of its exports.
dist: Any = torch.distributed

logger = logging.getLogger(__name__)

_BLOCK = 4096
_TEMPORARY_BYTES = 8 * 2**20
"""The size of a tensor in which torch's operators mix words of a part; a few of them live at a time."""


def device_digest() -> SnapshotDigest:
    """Returns a digest of torch tensors, int64 [n], on any device."""
    return SnapshotDigest(_mixed_sum)


def _mixed_sum(words: Tensor, start: int) -> Tensor:
    if words.is_cuda and words.numel() and _has_kernel(words.device):
        return kernel_sum(words, start)
    return torch_sum(words, start)


class PartSums:
    """The mixed sums of the parts of a snapshot that one worker receives, from which all workers' digest is joined."""

    def __init__(self) -> None:
        self._first = 0
        self._sums: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, parts: Iterable[Part], words: Tensor) -> None:
        """Adds the next parts of the snapshot; `words`, int64 [n], are their bytes, padded."""
        taken = 0
        for part in parts:
            count = padded_bytes(part.spec) // WORD_BYTES
            if count:
                own = words[taken : taken + count]
                self._sums[part.holders].append(_part_sum(part, own, self._first))
            taken += count
            self._first += padded_bytes(part.whole) // WORD_BYTES

    def by_holders(self) -> dict[str, int]:
        """Returns the sums modulo 2^64, by the holders of the parts."""
        return {holders: int(torch.stack(found).sum()) % 2**64 for holders, found in self._sums.items()}


def _part_sum(part: Part, words: Tensor, first: int) -> Tensor:
    """Returns the sum of a part's mixed words. The tensor begins at word `first` of the snapshot."""
    if part.is_whole:
        return _mixed_sum(words, first)
    inner_bytes, row_bytes = part.row_bytes
    row = row_bytes // WORD_BYTES
    blocks = words.view(-1, sum(end - start for start, end in part.ranges) * inner_bytes // WORD_BYTES)
    sums, taken = [], 0
    for start, end in part.ranges:
        begin, length = start * inner_bytes // WORD_BYTES, (end - start) * inner_bytes // WORD_BYTES
        piece = blocks[:, taken : taken + length]
        taken += length
        if len(blocks) == 1:
            sums.append(_mixed_sum(piece[0], first + begin))
            continue
        within = torch.arange(first + begin, first + begin + length, device=words.device)
        rows = torch.arange(len(blocks), device=words.device)[:, None] * row
        step = max(1, _TEMPORARY_BYTES // WORD_BYTES // length)
        for some, starts in zip(torch.split(piece, step), torch.split(rows, step), strict=True):
            sums.append(mixed(some, starts + within).sum())
    return torch.stack(sums).sum()


def placed(part: Part, own: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor in full shape on a device: a part at its place, and NaN elsewhere.

    Args:
        part: The part.
        own: Its elements.
        device: The device.
    """
    whole = torch.empty(tuple(part.whole.shape), dtype=own.dtype, device=device)
    taken, last = 0, 0
    for start, end in part.ranges:
        whole.narrow(part.dimension, last, start - last).fill_(torch.nan)
        whole.narrow(part.dimension, start, end - start).copy_(own.narrow(part.dimension, taken, end - start))
        taken, last = taken + end - start, end
    whole.narrow(part.dimension, last, whole.shape[part.dimension] - last).fill_(torch.nan)
    return whole


def torch_sum(words: Tensor, start: int) -> Tensor:
    """Returns the sum of mixed words as int64 []. The first word is the `start`-th word of the digest."""
    mixed_words: Tensor = mixed(words, torch.arange(start, start + len(words), device=words.device))
    return mixed_words.sum()


def kernel_sum(words: Tensor, start: int) -> Tensor:
    """Returns the same sum as `torch_sum`, by the kernel. Raises Triton's errors if the kernel cannot be compiled."""
    import triton

    blocks = triton.cdiv(words.numel(), _BLOCK)
    sums = torch.empty(blocks, dtype=torch.int64, device=words.device)
    with torch.cuda.device(words.device if words.is_cuda else -1):
        _kernel()[(blocks,)](words, sums, start, words.numel(), BLOCK=_BLOCK)
    return sums.sum()


@cache
def _has_kernel(device: torch.device) -> bool:
    """Returns whether the kernel compiles and computes the right sum; tested once per device.

    Without this check, a push would depend on a C compiler.
    """
    if find_spec("triton") is None:
        return False
    words = torch.arange(-_BLOCK, _BLOCK // 2 + 1, device=device) * 0x9E3779B97F4A7C1
    try:
        if kernel_sum(words, 2**33).item() == torch_sum(words, 2**33).item():
            return True
        reason = "it sums wrongly"
    except Exception as error:  # from Triton, the compiler or the driver
        reason = f"{type(error).__name__}: {error}"
    logger.warning("digests of weights are slow on this GPU because the Triton kernel does not work: %s", reason)
    return False


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    def mixed_sums(
        words: tl.tensor,
        sums: tl.tensor,
        start: tl.tensor,
        count: tl.tensor,
        BLOCK: tl.constexpr,  # noqa: N803 - Triton's convention
    ) -> None:
        """Writes the sum of one block of mixed words; `mixed` explains the steps.

        `count` need not be a multiple of BLOCK: words after it are loaded as 0 and left out of the sum. The block index
        is int64 because a position may exceed int32.
        """
        block = tl.program_id(0).to(tl.int64)
        index = block * BLOCK + tl.arange(0, BLOCK)
        state = tl.load(words + index, mask=index < count, other=0) + (start + index + 1) * -0x61C8864680B583EB
        state = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        state = (state ^ (state >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        state = state ^ (state >> 31 & 0x1FFFFFFFF)
        tl.store(sums + block, tl.sum(tl.where(index < count, state, 0), 0))

    return triton.jit(mixed_sums, do_not_specialize=["start", "count"])


def open_group(
    store: Any,
    rank: int,
    world_size: int,
    backend: str,
    device: torch.device,
    host: str,
    join: timedelta,
    broadcast: timedelta,
) -> Any:
    """Returns a group of one sender, rank 0, and receivers; blocks until all have joined. With NCCL it does not block.

    Args:
        store: The group's store.
        rank: Rank of this process.
        world_size: Number of members.
        backend: `gloo`, `nccl` or `cuda_ipc`.
        device: The device on which data is sent or received; not used by gloo.
        host: Address of this machine that gloo listens on; if empty, gloo chooses one.
        join: Deadline for joining.
        broadcast: Deadline of each broadcast over nccl, which has one timeout for the whole group.
    """
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = join
        make = dist.ProcessGroupGloo
        options._devices = [make.create_device(hostname=host) if host else make.create_default_device()]
        return make(store, rank, world_size, options)
    if backend == "cuda_ipc":
        return SharedGpuGroup.meet(store, rank, world_size, join, device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = broadcast
    return dist.ProcessGroupNCCL(store, rank, world_size, options)  # it connects at the first broadcast, not here


SLICE_BYTES = 128 * 2**20
# Large enough to keep the bus busy, small enough to stay pinned permanently.
_PIECE_BYTES = 32 * 2**20
_LOOK_S = 0.0002
_HANDLE, _CLOSED = "handle", "closed"


class Done:
    """A finished broadcast, with the interface of torch's Work."""

    def wait(self, timeout: timedelta) -> bool:
        """Returns true at once."""
        return True

    def is_completed(self) -> bool:
        """Returns true."""
        return True


class SharedGpuGroup:
    """A group of one sender, rank 0, and receivers. It replaces a torch process group.

    Args:
        store: The group's store; a client of its own for this process.
        rank: Rank of this process; 0 sends.
        world_size: Number of members, including the sender.
        memory: uint8 [n], for any n, visible to all members.
    """

    def __init__(self, store: Any, rank: int, world_size: int, memory: Tensor) -> None:
        self._store = store
        self._rank = rank
        self._receivers = range(1, world_size)
        self._memory = memory
        self._slice = 0
        self._is_closed = False

    @classmethod
    def meet(cls, store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device) -> "SharedGpuGroup":
        """Forms a group over memory of `device`, which all members share.

        Raises RuntimeError if a member does not arrive in time, or if processes of this machine cannot map each other's
        memory.
        """
        if rank == 0:
            memory, handle = _exported.take(device)
            store.set(_HANDLE, handle)
        else:
            store.wait([_HANDLE], timeout)
            memory = map_memory(store.get(_HANDLE), SLICE_BYTES, device)
        group = cls(store, rank, world_size, memory)
        store.set(f"met/{rank}", "")
        store.wait([f"met/{each}" for each in range(world_size)], timeout)
        return group

    def broadcast(self, tensors: list[Tensor], options: Any) -> Done:
        """Sends one tensor, uint8 [n], from rank 0. Other ranks receive into it. Returns when all data is copied.

        Raises RuntimeError if a member leaves or `options.timeout` passes.
        """
        deadline = time.monotonic() + options.timeout.total_seconds()
        for part in torch.split(tensors[0], self._memory.numel()):
            shared = self._memory[: part.numel()]
            if self._rank:
                self._wait([str(self._slice)], deadline)
                _copy(shared, part)
                self._store.set(f"{self._slice}/{self._rank}", "")
            else:
                _copy(part, shared)
                taken = [f"{self._slice}/{rank}" for rank in self._receivers]
                self._store.set(str(self._slice), "")
                self._wait(taken, deadline)
                for key in (str(self._slice), *taken):
                    self._store.delete_key(key)
            self._slice += 1
        return Done()

    def abort(self) -> None:
        """Leaves the group. Members that still wait in it fail."""
        if not self._is_closed:
            self._is_closed = True
            self._store.set(_CLOSED, "")
            _exported.give_back(self._memory)

    def _wait(self, keys: list[str], deadline: float) -> None:
        """Polls the store for the keys. A blocking wait would delay `abort`, which another thread calls."""
        while not self._store.check(keys):
            if self._is_closed or self._store.check([_CLOSED]):
                raise RuntimeError("the transfer group is closed: a member left it")
            if time.monotonic() > deadline:
                raise RuntimeError("the transfer timed out before all members had taken part")
            time.sleep(_LOOK_S)


class HostCopier:
    """A copier of tensors from a GPU to host memory, through one small pinned buffer.

    A plain `tensor.cpu()` of an adapter keeps the driver busy, so that every kernel launch of the engine waits: a pause
    of one second for 1 GB (measured). The GPU writes to pinned memory by itself.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the tensor in ordinary host memory. It may be called from several threads.

        The kernels that write `tensor` must have finished: the copy runs on a stream that does not wait for them.
        """
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        copy = torch.empty(source.numel(), dtype=torch.uint8)
        with self._lock, torch.cuda.stream(self._stream):
            for part, place in zip(torch.split(source, _PIECE_BYTES), torch.split(copy, _PIECE_BYTES), strict=True):
                pinned = self._buffer[: part.numel()]
                pinned.copy_(part, non_blocking=True)
                self._stream.synchronize()
                place.copy_(pinned)
        return copy.view(tensor.dtype).view(tensor.shape)


class _Exported:
    """Memory of this process that other processes may map.

    It is never freed, because a receiver may still map it. After its group is closed, another group reuses it.
    """

    def __init__(self) -> None:
        self._handles: dict[int, bytes] = {}
        self._idle: dict[torch.device, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, device: torch.device) -> tuple[Tensor, bytes]:
        """Returns uint8 [SLICE_BYTES] on the device, and the handle for mapping it.

        Raises RuntimeError if the memory cannot be shared between processes.
        """
        with self._lock:
            if idle := self._idle[device]:
                memory = idle.pop()
            else:
                memory, handle = allocate(SLICE_BYTES, device)
                self._handles[memory.data_ptr()] = handle
            return memory, self._handles[memory.data_ptr()]

    def give_back(self, memory: Tensor) -> None:
        """Makes memory available to the next group. Ignores memory of another process."""
        with self._lock:
            if memory.data_ptr() in self._handles:
                self._idle[memory.device].append(memory)


_exported = _Exported()


def _copy(source: Tensor, target: Tensor) -> None:
    """Copies a tensor. Returns when the copy is complete, so that the caller may notify the other side."""
    target.copy_(source)
    if target.device.type == "cuda":
        torch.cuda.current_stream(target.device).synchronize()
