"""Broadcasts between processes that share one GPU, over which NCCL refuses to send: through memory that all can see.

The sender owns a buffer on the card, which receivers map by CUDA IPC. What is sent goes through it slice by slice: the
store where the group meets says that a slice is there, and of each receiver that it has taken it.
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
    """A broadcast that is over, as torch's Work has it."""

    def wait(self, timeout: timedelta) -> bool:
        """At once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


class SharedCardGroup:
    """A group of rank 0, which sends, and receivers; in place of one of torch's process groups.

    Args:
        store: Where the members meet; a client of its own.
        rank: This process's; 0 sends.
        world_size: Members, the sender included.
        memory: uint8 [n] that all members see, of any n.
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
        """Over memory of `device`, which all members share.

        Raises RuntimeError if they do not meet in time, or this machine lets no process map what another allocated.
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
        """Sends the one tensor, uint8 [n], or fills it, before it returns.

        Raises RuntimeError if a member leaves, or `options.timeout` passes.
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
        """Leaves the group; members that still wait in it fail."""
        if not self._is_closed:
            self._is_closed = True
            self._store.set(_CLOSED, "")
            _exported.give_back(self._memory)

    def _wait(self, keys: list[str], deadline: float) -> None:
        """Looks again and again: a client that waits in the store would hold up `abort`, which another thread calls."""
        while not self._store.check(keys):
            if self._is_closed or self._store.check([_CLOSED]):
                raise RuntimeError("the transfer group is closed: a member broke off")
            if time.monotonic() > deadline:
                raise RuntimeError("the transfer's time was up before all members had taken part")
            time.sleep(_LOOK_S)


class _Exported:
    """Memory of this process that others may map.

    The driver allocates it: what lies in torch's expandable segments cannot be mapped everywhere. It is never freed, as
    a receiver may map it still; once its group is closed the next one takes it.
    """

    def __init__(self) -> None:
        self._handles: dict[int, bytes] = {}
        self._idle: dict[torch.device, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, device: torch.device) -> tuple[Tensor, bytes]:
        """uint8 [SLICE_BYTES] on the device, and what others map it by. Raises RuntimeError."""
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
        """To the next group that takes some. Memory of another process is left alone."""
        with self._lock:
            if memory.data_ptr() in self._handles:
                self._idle[memory.device].append(memory)


_exported = _Exported()


class _Address:
    """`SLICE_BYTES` bytes on a GPU, as `torch.as_tensor` reads them without a copy."""

    def __init__(self, address: int) -> None:
        data = (address, False)
        self.__cuda_array_interface__ = {"shape": (SLICE_BYTES,), "typestr": "|u1", "data": data, "version": 3}


class _Mapping(_Address):
    """Another process's memory; it stays mapped as long as the tensor that is made of it lives."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        runtime = _cuda_runtime()
        shared = runtime.cudaIpcMemHandle_t()
        shared.reserved = handle
        with torch.cuda.device(device):
            address = _checked(runtime.cudaIpcOpenMemHandle(shared, runtime.cudaIpcMemLazyEnablePeerAccess))
        super().__init__(int(address))
        weakref.finalize(self, _unmap, address, device).atexit = False  # the driver does so by itself then


def _unmap(address: Any, device: torch.device) -> None:
    with torch.cuda.device(device):
        _checked(_cuda_runtime().cudaIpcCloseMemHandle(address))


def _map(handle: bytes, device: torch.device) -> Tensor:
    memory: Tensor = torch.as_tensor(_Mapping(handle, device), device=device)
    return memory


def _copy(source: Tensor, target: Tensor) -> None:
    """Returns once it is done, so that the other side may be told."""
    target.copy_(source)
    if target.device.type == "cuda":
        torch.cuda.current_stream(target.device).synchronize()


def _cuda_runtime() -> Any:
    """NVIDIA's bindings, which torch for GPUs needs too."""
    from cuda.bindings import runtime

    return runtime


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *found = answer
    if status.value:
        reason = f"the GPU's memory cannot be shared between processes here: {status.name}"
        raise RuntimeError(f"{reason}; set the sampler's --transfer gloo")
    return found[0] if found else None
