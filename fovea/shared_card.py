"""Broadcasts between processes that share one GPU, where NCCL refuses to send, through memory that all of them map.

The sender owns a buffer on the GPU, which receivers map with CUDA IPC. Data passes through it in slices. Keys in the
group's store announce that a slice is in the buffer, and that each receiver has copied it.
"""

import threading
import time
import weakref
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

SLICE_BYTES = 128 * 2**20
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


class SharedCardGroup:
    """A group of one sender, rank 0, and receivers. Replaces a torch process group.

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
    def meet(
        cls, store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device
    ) -> "SharedCardGroup":
        """Forms a group over memory of `device`, which all members share.

        Raises RuntimeError if a member does not arrive in time, or if processes of this machine cannot map each other's
        memory.
        """
        if rank == 0:
            memory, handle = _exported.take(device)
            store.set(_HANDLE, handle)
        else:
            store.wait([_HANDLE], timeout)
            memory = _map(store.get(_HANDLE), device)
        group = cls(store, rank, world_size, memory)
        store.set(f"met/{rank}", "")
        store.wait([f"met/{each}" for each in range(world_size)], timeout)
        return group

    def broadcast(self, tensors: list[Tensor], options: Any) -> Done:
        """Sends one tensor, uint8 [n], or fills it. Returns when it is done.

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


class _Exported:
    """Memory of this process that other processes may map.

    It is allocated by the driver, because memory in torch's expandable segments cannot be mapped everywhere. It is
    never freed, because a receiver may still map it. When its group is closed, the next group reuses it.
    """

    def __init__(self) -> None:
        self._handles: dict[int, bytes] = {}
        self._idle: dict[torch.device, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, device: torch.device) -> tuple[Tensor, bytes]:
        """Returns uint8 [SLICE_BYTES] on the device, and the handle for mapping it. Raises RuntimeError."""
        with self._lock:
            if idle := self._idle[device]:
                memory = idle.pop()
            else:
                runtime = _cuda_runtime()
                with torch.cuda.device(device):
                    address = _checked(runtime.cudaMalloc(SLICE_BYTES))
                    handle = _checked(runtime.cudaIpcGetMemHandle(address))
                memory = torch.as_tensor(_Address(int(address)), device=device)
                self._handles[memory.data_ptr()] = bytes(handle.reserved)
            return memory, self._handles[memory.data_ptr()]

    def give_back(self, memory: Tensor) -> None:
        """Makes memory available to the next group. Ignores memory of another process."""
        with self._lock:
            if memory.data_ptr() in self._handles:
                self._idle[memory.device].append(memory)


_exported = _Exported()


class _Address:
    """`SLICE_BYTES` bytes on a GPU, in a form that `torch.as_tensor` uses without a copy."""

    def __init__(self, address: int) -> None:
        data = (address, False)
        self.__cuda_array_interface__ = {"shape": (SLICE_BYTES,), "typestr": "|u1", "data": data, "version": 3}


class _Mapping(_Address):
    """Memory of another process. It stays mapped as long as the tensor made from it lives."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        runtime = _cuda_runtime()
        shared = runtime.cudaIpcMemHandle_t()
        shared.reserved = handle
        with torch.cuda.device(device):
            address = _checked(runtime.cudaIpcOpenMemHandle(shared, runtime.cudaIpcMemLazyEnablePeerAccess))
        super().__init__(int(address))
        weakref.finalize(self, _unmap, address, device).atexit = False  # at exit, the driver unmaps it itself


def _unmap(address: Any, device: torch.device) -> None:
    with torch.cuda.device(device):
        _checked(_cuda_runtime().cudaIpcCloseMemHandle(address))


def _map(handle: bytes, device: torch.device) -> Tensor:
    memory: Tensor = torch.as_tensor(_Mapping(handle, device), device=device)
    return memory


def _copy(source: Tensor, target: Tensor) -> None:
    """Copies a tensor and waits until the copy is complete, so that the other side can be notified."""
    target.copy_(source)
    if target.device.type == "cuda":
        torch.cuda.current_stream(target.device).synchronize()


def _cuda_runtime() -> Any:
    """Imports NVIDIA's CUDA bindings, a dependency of torch for GPUs."""
    from cuda.bindings import runtime

    return runtime


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *found = answer
    if status.value:
        reason = f"GPU memory cannot be shared between processes on this machine: {status.name}"
        raise RuntimeError(f"{reason}; set the sampler's --transfer gloo")
    return found[0] if found else None
