"""Memory that the sampler and the trainer of one device both map, and the base model in it.

With a shared base the sampler owns the weights: its worker moves them into memory that other processes can map, on a
GPU by CUDA IPC, on a CPU as one anonymous file. The trainer maps it and uses views of it as its frozen weights. The
worker passes what the trainer needs for that through a Unix socket, and the connection stays open. If it ends, the
trainer knows that the memory is gone, and the sampler serves the next trainer.
"""

import json
import logging
import mmap
import os
import select
import socket
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fovea.runtime.hosts import check_socket_path

logger = logging.getLogger(__name__)

_ALIGNMENT = 256
_BLOCK_BYTES = 2 << 20
"""Granularity of memory on a GPU. Smaller allocations can share a block, and a handle maps the whole block."""
_LENGTH = struct.Struct("<QQ")
"""The lengths of the description and of the memory's file, which precede the description."""
_IN_USE, _GO_ON = b"u", b"g"
_LOOK_S = 0.1
_PATIENCE_S = 3.0
"""Seconds after which a trainer says that it waits for another one."""
_AGAIN_S = 1.0
_CREDENTIALS = struct.Struct("iII")


def allocate(size_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Returns uint8 [size_bytes] on a GPU, and the handle for mapping it. It is never freed.

    The driver allocates it, because memory in torch's expandable segments cannot be mapped everywhere. Raises
    RuntimeError if the memory cannot be shared between processes.
    """
    runtime = _cuda_runtime()
    with torch.cuda.device(device):
        address = _checked(runtime.cudaMalloc(_rounded(size_bytes, _BLOCK_BYTES)))
        handle = _checked(runtime.cudaIpcGetMemHandle(address))
    return torch.as_tensor(_Address(int(address), size_bytes), device=device), bytes(handle.reserved)


def map_memory(handle: bytes, size_bytes: int, device: torch.device) -> Tensor:
    """Returns the memory of another process, uint8 [size_bytes]. It stays mapped as long as the tensor lives."""
    memory: Tensor = torch.as_tensor(_Mapping(handle, size_bytes, device), device=device)
    return memory


class _Address:
    """Bytes on a GPU, in a form that `torch.as_tensor` uses without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        data = (address, False)
        self.__cuda_array_interface__ = {"shape": (size_bytes,), "typestr": "|u1", "data": data, "version": 3}


class _Mapping(_Address):
    """Memory of another process."""

    def __init__(self, handle: bytes, size_bytes: int, device: torch.device) -> None:
        runtime = _cuda_runtime()
        shared = runtime.cudaIpcMemHandle_t()
        shared.reserved = handle
        with torch.cuda.device(device):
            address = _checked(runtime.cudaIpcOpenMemHandle(shared, runtime.cudaIpcMemLazyEnablePeerAccess))
        super().__init__(int(address), size_bytes)
        weakref.finalize(self, _unmap, address, device).atexit = False  # at exit, the driver unmaps it itself


def _unmap(address: Any, device: torch.device) -> None:
    with torch.cuda.device(device):
        _checked(_cuda_runtime().cudaIpcCloseMemHandle(address))


def _cuda_runtime() -> Any:
    """Returns NVIDIA's bindings of the CUDA runtime, a dependency of torch for GPUs."""
    from cuda.bindings import runtime

    return runtime


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *found = answer
    if status.value:
        reason = f"GPU memory cannot be shared between processes on this machine: {status.name}"
        raise RuntimeError(f"{reason}; set --transfer gloo on the sampler and omit --shared-base")
    return found[0] if found else None


def _rounded(size_bytes: int, granularity: int) -> int:
    return -(-size_bytes // granularity) * granularity


class OwnedBase:
    """The base model of a sampler's worker, in memory that a trainer may map.

    Args:
        device: Device of the worker.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file = os.memfd_create("fovea-base") if device.type == "cpu" else -1
        self._chunks: list[Tensor] = []
        self._handles: list[bytes] = []
        self._is_used, self._is_measured = threading.Event(), threading.Event()
        self.size_bytes = 0

    def move(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies of tensors in one new piece of the shared memory."""
        starts = [0]
        for tensor in tensors:
            starts.append(_rounded(starts[-1] + tensor.nbytes, _ALIGNMENT))
        chunk = self._allocate(starts[-1])
        places = [chunk[start : start + one.nbytes] for start, one in zip(starts, tensors, strict=False)]
        copies = [place.view(one.dtype).view(one.shape) for place, one in zip(places, tensors, strict=True)]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        return copies

    def _allocate(self, size_bytes: int) -> Tensor:
        is_cpu = self._device.type == "cpu"
        size_bytes = _rounded(size_bytes, mmap.ALLOCATIONGRANULARITY if is_cpu else _BLOCK_BYTES)
        if is_cpu:
            os.ftruncate(self._file, self.size_bytes + size_bytes)
            memory = mmap.mmap(self._file, size_bytes, offset=self.size_bytes)
            chunk, handle = torch.frombuffer(memory, dtype=torch.uint8), b""
        else:
            chunk, handle = allocate(size_bytes, self._device)
        self._chunks.append(chunk)
        self._handles.append(handle)
        self.size_bytes += size_bytes
        return chunk

    def publish(self, path: str, views: Mapping[str, Tensor]) -> None:
        """Lets a trainer of this user map the memory, now and after each of its restarts.

        Args:
            path: Path of the Unix socket. A socket that an earlier sampler has left there is replaced.
            views: Contiguous parts of the memory, keyed by the names for the trainer.

        Raises ValueError for a tensor that is not in the memory, and for a path that another file or process uses.
        """
        tensors = {
            name: [*self._place(name, view), list(view.shape), str(view.dtype)[6:]] for name, view in views.items()
        }
        chunks = [[chunk.numel(), handle.hex()] for chunk, handle in zip(self._chunks, self._handles, strict=True)]
        description = json.dumps({"chunks": chunks, "tensors": tensors}).encode()
        check_socket_path(path)
        if _has_listener(path):
            raise ValueError(f"another process listens at {path}: end it, or give another path")
        Path(path).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        threading.Thread(target=self._serve, args=(listener, description), name="shared-base", daemon=True).start()

    def _place(self, name: str, view: Tensor) -> tuple[int, int]:
        """Returns the index of the chunk that contains a view, and the view's first byte in it."""
        for number, chunk in enumerate(self._chunks):
            start = view.data_ptr() - chunk.data_ptr()
            if 0 <= start <= chunk.numel() - view.nbytes and view.is_contiguous():
                return number, start
        raise ValueError(f"{name} cannot be shared: vLLM stores it in a form of its own")

    def _serve(self, listener: socket.socket, description: bytes) -> None:
        """Serves one trainer after the other: the next waits until the one before has ended."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:  # such as too many open files
                logger.warning("no trainer can reach the shared base now: %s", error)
                time.sleep(_AGAIN_S)
                continue
            with connection, suppress(OSError):  # it may end at any time
                if (user := _peer_user(connection)) != os.getuid():
                    logger.warning("refused a trainer of user %d: only user %d may map the base", user, os.getuid())
                    continue
                header = _LENGTH.pack(len(description), self.size_bytes)
                socket.send_fds(connection, [header], [self._file] if self._file >= 0 else [])
                connection.sendall(description)
                if connection.recv(1):
                    self._is_used.set()
                    self._is_measured.wait()
                    connection.sendall(_GO_ON)
                    connection.recv(1)

    def note_measured(self) -> None:
        """Lets trainers allocate more memory, which the sampler would have counted as its own before."""
        self._is_measured.set()

    def wait_until_used(self) -> None:
        """Waits until a trainer uses the memory and has taken the other memory that it needs to begin."""
        if not self._is_used.is_set():
            logger.info("waiting until the trainer uses the shared base")
            self._is_used.wait()


class MappedBase:
    """The base model of a sampler, mapped by the trainer. On a CPU a write to it ends the process.

    Args:
        path: Path of the sampler's Unix socket. The constructor waits until the sampler listens there.
        device: Device of the trainer, the same as the sampler's.

    Raises PermissionError if the sampler runs as another user, ConnectionError if it ends or refuses this user.

    Attributes:
        tensors: Views of the memory, keyed by the names of the checkpoint's tensors, and of stacked experts.
        resident_bytes: Resident memory of this process that is the sampler's: on a CPU all of it, on a GPU nothing.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._connection, self._may_go_on = _connected(path), threading.Event()
        header, files, _, _ = socket.recv_fds(self._connection, _LENGTH.size, 1, socket.MSG_WAITALL)
        if len(header) < _LENGTH.size:
            self._connection.close()
            raise ConnectionError(f"the sampler at {path} ended, or runs as another user")
        length, size_bytes = _LENGTH.unpack(header)
        self.resident_bytes = size_bytes if files else 0
        with self._connection.makefile("rb") as stream:
            description = json.loads(stream.read(length))
        sizes = [size for size, _ in description["chunks"]]
        self._chunks = (
            list(torch.split(_read_only(files[0], size_bytes), sizes))
            if files
            else [map_memory(bytes.fromhex(handle), size, device) for size, handle in description["chunks"]]
        )
        self.tensors = {name: self._view(*place) for name, place in description["tensors"].items()}

    def _view(self, chunk: int, start: int, shape: list[int], dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        size_bytes = kind.itemsize * torch.Size(shape).numel()
        return self._chunks[chunk][start : start + size_bytes].view(kind).view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Returns True if a tensor lies in the memory."""
        starts = ((tensor.data_ptr() - chunk.data_ptr(), chunk.numel()) for chunk in self._chunks)
        return any(0 <= start < size for start, size in starts)

    def report_use(self) -> None:
        """Tells the sampler that this process has begun, and waits until the sampler has measured its memory."""
        self._connection.sendall(_IN_USE)
        self._may_go_on.wait()

    def watch(self, on_end: Callable[[], None]) -> None:
        """Calls a function, in another thread, once the sampler's worker has ended. Call it before `report_use`."""
        threading.Thread(target=self._watch, args=(on_end,), name="shared-base", daemon=True).start()

    def _watch(self, on_end: Callable[[], None]) -> None:
        with suppress(OSError):
            while self._connection.recv(1):
                self._may_go_on.set()
        on_end()


def _connected(path: str) -> socket.socket:
    waits = False
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            _await_turn(connection, path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        except OSError:
            connection.close()
            raise
        if not waits:
            logger.info("waiting until the sampler shares its base at %s", path)
            waits = True
        time.sleep(_LOOK_S)


def _await_turn(connection: socket.socket, path: str) -> None:
    """Waits until the sampler serves this trainer. Raises PermissionError if it runs as another user."""
    if (user := _peer_user(connection)) != os.getuid():
        raise PermissionError(f"the process that listens at {path} runs as user {user}, not as {os.getuid()}")
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(_PATIENCE_S * 1000):
        logger.info("another trainer uses this base; waiting until it ends")
        poll.poll()


def _has_listener(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # it listens, but is busy
            return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True


def _peer_user(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end, for a client that of the process that listens."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user


def _read_only(file: int, size_bytes: int) -> Tensor:
    memory = mmap.mmap(file, size_bytes, prot=mmap.PROT_READ)
    os.close(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it cannot prevent writes; the kernel does
        return torch.frombuffer(memory, dtype=torch.uint8)
