"""Groups over which weights are broadcast to samplers: torch's own process groups, made privately, never the default;
between processes on one GPU, over which NCCL does not send, its memory (`fovea.shared_card`).

The sender is rank 0; sampler worker i is rank_offset + i. The rendezvous store is hosted by the trainer's rank 0. Full
weights have several senders, ranks of the trainer, each with a process group of its own: `sender_count` of
`JoinTransferGroupRequest` says how they take turns.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL, Store, TCPStore  # type: ignore[attr-defined]

from fovea.runtime.hosts import WILDCARDS, listening
from fovea.shared_card import SharedCardGroup
from fovea.wire.errors import FailedPrecondition
from fovea.wire.manifest import sender_groups

logger = logging.getLogger(__name__)

_REACH_S = 60.0
_LOOK_S = 0.0005


def _gloo_device(host: str) -> Any:
    """What gloo listens with: on `host` alone, else where this machine's name leads."""
    if host:
        return ProcessGroupGloo.create_device(hostname=host)
    return ProcessGroupGloo.create_default_device()


class SenderGroup:
    """The sender's end of one transfer group.

    Args:
        group_id: Unique name of the transfer group.
        sender: Which of its senders this is; with its name the prefix of keys in the store.
        store: The rendezvous store.
        world_size: Members, the sender included.
        backend: `gloo`, `nccl` or `cuda_ipc`.
        join_timeout_s: Deadline of the meeting.
        broadcast_timeout_s: Deadline of a broadcast over nccl, which takes one for all.
        host: Address of this machine that gloo listens on; empty lets it look for one.

    Blocks until all members have met. Raises RuntimeError if they do not.
    """

    def __init__(
        self,
        group_id: str,
        sender: int,
        store: Store,
        world_size: int,
        backend: str,
        join_timeout_s: float,
        broadcast_timeout_s: float,
        host: str,
    ) -> None:
        self.group_id = group_id
        self._sender = sender
        self._store = store
        prefixed = PrefixStore(sender_groups(group_id, sender + 1)[sender], store)
        join = timedelta(seconds=join_timeout_s)
        self._group: ProcessGroup | SharedCardGroup
        if backend == "gloo":
            self._device = torch.device("cpu")
            untyped: Any = ProcessGroupGloo
            settings = untyped._Options()
            settings._timeout = join
            settings._devices = [_gloo_device(host)]
            self._group = untyped(prefixed, 0, world_size, settings)
            return
        if backend not in ("nccl", "cuda_ipc"):
            known = "only gloo, nccl and cuda_ipc"
            raise FailedPrecondition(f"transfer backend {backend!r} is not supported, {known}")
        if not torch.cuda.is_available():
            raise FailedPrecondition(f"the samplers receive over {backend}, but this trainer has no GPU")
        self._device = torch.device("cuda", torch.cuda.current_device())
        if backend == "cuda_ipc":
            self._group = SharedCardGroup.meet(prefixed, 0, world_size, join, self._device)
            return
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=broadcast_timeout_s)
        with _survivable_nccl():
            nccl: Any = ProcessGroupNCCL(prefixed, 0, world_size, options)
        self._group = nccl

    def send(self, data: Tensor, timeout_s: float) -> None:
        """Broadcasts uint8 [n] and waits until it has left. Raises RuntimeError on any failure."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        work = self._group.broadcast([data.to(self._device)], options)
        if self._sender:
            self._watch(work, time.monotonic() + timeout_s)
        work.wait(timedelta(seconds=timeout_s))

    def _watch(self, work: Any, deadline: float) -> None:
        """Until it has left: rank 0 alone hears of receivers that broke off, for which a broadcast over nccl waits."""
        while not work.is_completed():
            if self._store.check([_closed(self.group_id)]) or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"transfer group {self.group_id} is closed: a member broke off")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Leaves the group; members that still wait in it fail."""
        abort = getattr(self._group, "abort", None)
        if self._device.type == "cuda" and abort is not None:
            abort()


def _closed(group_id: str) -> str:
    """The key that stands in the store once a group is closed."""
    return f"closed/{group_id}"


@contextmanager
def _survivable_nccl() -> Iterator[None]:
    """Has groups made meanwhile answer a member's death with an error; by default torch ends the whole process."""
    name, clean_up_only = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
    before = os.environ.get(name)
    os.environ[name] = clean_up_only
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class TransferGroups:
    """All open groups in which this rank sends; `hosting` or `beside` makes it. Safe to use from several threads.

    Args:
        store: Where members meet.
        address: Address under which samplers and other ranks reach the store.
        own: Address under which this rank does.
        gloo_host: Address of this machine that gloo listens on; empty lets it look for one.
        sender: Which of the senders this rank is.
    """

    def __init__(self, store: TCPStore, address: str, own: str, gloo_host: str, sender: int) -> None:
        self.address = address
        self._store = store
        self._own = own
        self._gloo_host = gloo_host
        self._sender = sender
        self._open: dict[str, SenderGroup] = {}
        self._meeting: set[str] = set()
        self._unwanted: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def hosting(cls, address: str, host: str) -> "TransferGroups":
        """Of rank 0, which hosts the store.

        Args:
            address: As above.
            host: Address of this machine that store and gloo listen on; 0.0.0.0 or :: for all of them.

        Raises FailedPrecondition if `host` is no address of this machine.
        """
        own = "127.0.0.1" if host in WILDCARDS else host
        # By itself it would listen on all of them.
        try:
            listener = listening(host)
        except OSError as error:
            reason = f"samplers reach the trainer at an address of its machine, and {host} is none: {error}"
            raise FailedPrecondition(f"{reason}; set --transfer-address") from None
        port, descriptor = listener.getsockname()[1], listener.detach()
        minutes = timedelta(minutes=5)
        store = TCPStore(own, port, None, True, minutes, wait_for_workers=False, master_listen_fd=descriptor)
        return cls(store, address, own, "" if host in WILDCARDS else host, 0)

    @classmethod
    def beside(cls, address: str, port: int, sender: int) -> "TransferGroups":
        """Of another rank, which sends full weights beside rank 0. Raises OSError if it does not reach the store."""
        with socket.create_connection((address, port), _REACH_S) as connection:
            own_host = str(connection.getsockname()[0])
        store = TCPStore(address, port, None, False, timedelta(seconds=_REACH_S), wait_for_workers=False)
        return cls(store, address, address, own_host, sender)

    @property
    def port(self) -> int:
        """Port of the store."""
        return int(self._store.port)

    def open(
        self, group_id: str, world_size: int, backend: str, join_timeout_s: float, broadcast_timeout_s: float
    ) -> SenderGroup:
        """Meets the other members; blocks. Raises RuntimeError if they do not come in time."""
        with self._lock:
            self._meeting.add(group_id)
        try:
            # A client of its own: one that waits holds its connection, and other groups would wait with it.
            timeout = timedelta(seconds=join_timeout_s)
            store = TCPStore(self._own, self.port, None, False, timeout, wait_for_workers=False)
            group = SenderGroup(
                group_id,
                self._sender,
                store,
                world_size,
                backend,
                join_timeout_s,
                broadcast_timeout_s,
                self._gloo_host,
            )
        finally:
            with self._lock:
                self._meeting.discard(group_id)
                wanted = group_id not in self._unwanted
                self._unwanted.discard(group_id)
        if not wanted:
            group.close()
            raise RuntimeError(f"transfer group {group_id} was given up before all had met")
        with self._lock:
            self._open[group_id] = group
        return group

    def get(self, group_id: str) -> SenderGroup:
        """An open group. Raises RuntimeError if it was closed meanwhile."""
        with self._lock:
            group = self._open.get(group_id)
        if group is None:
            raise RuntimeError(f"transfer group {group_id} is closed: a member broke off")
        return group

    def keep(self, group_ids: Iterable[str]) -> None:
        """Closes all other groups."""
        with self._lock:
            others = self._open.keys() - set(group_ids)
        for group_id in others:
            self.close(group_id)

    def close(self, group_id: str) -> None:
        """Closes a group, also one that still meets; unknown ones are no error. Rank 0's other senders hear of it."""
        if not self._sender:
            self._store.set(_closed(group_id), "")
        with self._lock:
            group = self._open.pop(group_id, None)
            if group_id in self._meeting:
                self._unwanted.add(group_id)
        if group is not None:
            group.close()
