"""Groups over which weights are broadcast to samplers.

They are private torch process groups, never the default group. NCCL does not work between processes on one GPU, so such
processes share GPU memory instead (`fovea_weights.weight_transfer`). The sender is rank 0 of a group, and worker i of a
sampler is rank `rank_offset` + i. Full parameters for samplers of several workers travel in split groups: each worker
receives only its parts, over groups with the workers of the same index in other samplers
(`JoinTransferGroupRequest.is_split`). The trainer's rank 0 hosts the rendezvous store. Full weights have several
senders. They are ranks of the trainer, each with its own process group; `JoinTransferGroupRequest.sender_count`
explains how they take turns.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.runtime.hosts import WILDCARDS, listening
from fovea.wire.errors import FailedPrecondition, Unavailable
from fovea.wire.manifest import Part, buckets, parts_of, sender_groups
from fovea_trainer.command_queue import BroadcastFull, OpenGroup
from fovea_trainer.model.sharding import ShardedModel
from fovea_trainer.model.trained_model import FullModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights import weight_files
from fovea_trainer.weights.snapshot_store import packed_parts
from fovea_trainer.weights.snapshot_taker import SnapshotTaker
from fovea_weights.weight_transfer import open_group

logger = logging.getLogger(__name__)

_REACH_S = 60.0
_POLL_S = 0.0005


class SenderGroup:
    """The sender's end of one transfer group.

    The constructor blocks until all members have joined.

    Args:
        group_id: Unique name of the transfer group.
        sender: Index of this sender. Together with `group_id` it gives the key prefix in the store.
        store: The rendezvous store.
        world_size: Number of members, including the sender; in a split group, of those that receive the same part.
        part_count: Number of workers of each sampler if every worker receives parts of its own (a split group), else 0.
        backend: `gloo`, `nccl` or `cuda_ipc`.
        join_timeout_s: Deadline for joining all parts, in seconds.
        broadcast_timeout_s: Deadline of each broadcast over nccl, in seconds. NCCL has one timeout for the whole group.
        host: Address of this machine that gloo listens on; if empty, gloo chooses one.

    Raises:
        RuntimeError: The members did not join in time.
        FailedPrecondition: This trainer does not support the backend.
    """

    def __init__(
        self,
        group_id: str,
        sender: int,
        store: Store,
        world_size: int,
        part_count: int,
        backend: str,
        join_timeout_s: float,
        broadcast_timeout_s: float,
        host: str,
    ) -> None:
        self.group_id = group_id
        self._sender = sender
        self._store = store
        if backend not in ("gloo", "nccl", "cuda_ipc"):
            known = "use gloo, nccl or cuda_ipc"
            raise FailedPrecondition(f"transfer backend {backend!r} is not supported; {known}")
        if backend != "gloo" and not torch.cuda.is_available():
            raise FailedPrecondition(f"the samplers receive over {backend}, but this trainer has no GPU")
        self._device = torch.device("cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}")
        broadcast, deadline = timedelta(seconds=broadcast_timeout_s), time.monotonic() + join_timeout_s
        self._parts: list[Any] = []
        try:
            for worker in range(part_count) if part_count else [None]:
                prefixed = PrefixStore(sender_groups(group_id, sender + 1, worker)[sender], store)
                join = timedelta(seconds=max(0.001, deadline - time.monotonic()))
                with _survivable_nccl() if backend == "nccl" else nullcontext():
                    group = open_group(prefixed, 0, world_size, backend, self._device, host, join, broadcast)
                self._parts.append(group)
        except Exception:
            self.close()
            raise

    def send(self, data: Tensor, timeout_s: float, part: int = 0) -> None:
        """Broadcasts uint8 [n] and waits until the data has been sent.

        Args:
            data: The bytes.
            timeout_s: Deadline in seconds.
            part: Index of the workers that receive the data, in a split group.

        Raises:
            RuntimeError: The broadcast failed.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        work = self._parts[part].broadcast([data.to(self._device)], options)
        if self._sender:
            self._watch(work, time.monotonic() + timeout_s)
        work.wait(timedelta(seconds=timeout_s))

    def _watch(self, work: Any, deadline: float) -> None:
        """Polls until the broadcast is complete or the group is closed.

        If a receiver leaves, a broadcast over NCCL still waits for it, and only rank 0 learns of that. Rank 0 then sets
        a key in the store, which the other senders look for here.
        """
        while not work.is_completed():
            if self._store.check([_closed(self.group_id)]) or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"transfer group {self.group_id} is closed: a member disconnected")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Leaves the group. Members that still wait in it fail."""
        for group in self._parts if self._device.type == "cuda" else []:
            group.abort()


def _closed(group_id: str) -> str:
    """Returns the store key that marks a group as closed."""
    return f"closed/{group_id}"


@contextmanager
def _survivable_nccl() -> Iterator[None]:
    """Makes NCCL groups created in this block report the death of a member as an error.

    By default torch ends the process.
    """
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
    """All open groups in which this rank sends. Thread-safe. Create it with `hosting` or `beside`.

    Args:
        store: The rendezvous store.
        address: Address under which samplers and other ranks reach the store.
        own: Address under which this rank reaches the store.
        gloo_host: Address of this machine that gloo listens on; if empty, gloo chooses one.
        sender: Index of this rank among the senders.
    """

    def __init__(self, store: TCPStore, address: str, own: str, gloo_host: str, sender: int) -> None:
        self.address = address
        self._store = store
        self._own = own
        self._gloo_host = gloo_host
        self._sender = sender
        self._open: dict[str, SenderGroup] = {}
        self._joining: set[str] = set()
        self._unwanted: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def hosting(cls, address: str, host: str) -> "TransferGroups":
        """Creates the groups of rank 0, which hosts the store.

        Args:
            address: Address under which samplers and other ranks reach the store.
            host: Address of this machine that store and gloo listen on; 0.0.0.0 or :: for all addresses.

        Raises:
            FailedPrecondition: `host` is not an address of this machine.
        """
        own = "127.0.0.1" if host in WILDCARDS else host
        # TCPStore would listen on all addresses, so give it a listening socket.
        try:
            listener = listening(host)
        except OSError as error:
            reason = f"samplers reach the trainer at an address of its machine, and {host} is not one: {error}"
            raise FailedPrecondition(f"{reason}; set --transfer-address") from None
        port, descriptor = listener.getsockname()[1], listener.detach()
        minutes = timedelta(minutes=5)
        store = TCPStore(own, port, None, True, minutes, wait_for_workers=False, master_listen_fd=descriptor)
        return cls(store, address, own, "" if host in WILDCARDS else host, 0)

    @classmethod
    def beside(cls, address: str, port: int, sender: int) -> "TransferGroups":
        """Creates the groups of a sender other than rank 0.

        Raises:
            OSError: The store cannot be reached.
        """
        with socket.create_connection((address, port), _REACH_S) as connection:
            own_host = str(connection.getsockname()[0])
        store = TCPStore(address, port, None, False, timedelta(seconds=_REACH_S), wait_for_workers=False)
        return cls(store, address, address, own_host, sender)

    @property
    def port(self) -> int:
        """Port of the store."""
        return int(self._store.port)

    def open(
        self,
        group_id: str,
        world_size: int,
        part_count: int,
        backend: str,
        join_timeout_s: float,
        broadcast_timeout_s: float,
    ) -> SenderGroup:
        """Joins a new group; blocks until all other members have joined.

        Raises:
            RuntimeError: The members did not join in time, or `close` was called during the call.
        """
        with self._lock:
            self._joining.add(group_id)
        try:
            # Use a separate client of the store. A waiting client blocks its connection for all other groups.
            timeout = timedelta(seconds=join_timeout_s)
            store = TCPStore(self._own, self.port, None, False, timeout, wait_for_workers=False)
            group = SenderGroup(
                group_id,
                self._sender,
                store,
                world_size,
                part_count,
                backend,
                join_timeout_s,
                broadcast_timeout_s,
                self._gloo_host,
            )
        finally:
            with self._lock:
                self._joining.discard(group_id)
                wanted = group_id not in self._unwanted
                self._unwanted.discard(group_id)
        if not wanted:
            group.close()
            raise RuntimeError(f"transfer group {group_id} was closed before all members had joined")
        with self._lock:
            self._open[group_id] = group
        return group

    def get(self, group_id: str) -> SenderGroup:
        """Returns an open group.

        Raises:
            RuntimeError: The group was closed.
        """
        with self._lock:
            group = self._open.get(group_id)
        if group is None:
            raise RuntimeError(f"transfer group {group_id} is closed: a member disconnected")
        return group

    def close_others(self, group_ids: Iterable[str]) -> None:
        """Closes all groups except these."""
        with self._lock:
            others = self._open.keys() - set(group_ids)
        for group_id in others:
            self.close(group_id)

    def close(self, group_id: str) -> None:
        """Closes a group, even while its members are still joining. Does nothing if it is unknown.

        On rank 0 this also notifies the other senders, through the store.
        """
        if not self._sender:
            self._store.set(_closed(group_id), "")
        with self._lock:
            group = self._open.pop(group_id, None)
            if group_id in self._joining:
                self._unwanted.add(group_id)
        if group is not None:
            group.close()


class FullSender:
    """Sends full parameters from several ranks. Methods are collective.

    Args:
        settings: Settings of the trainer.
        control: Control group of the rank's thread.
        sharded: The base model.
        snapshots: Finds the parameters of a snapshot.
        groups: Transfer groups, on ranks that send weights.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        control: ControlGroup,
        sharded: ShardedModel,
        snapshots: SnapshotTaker,
        groups: TransferGroups | None,
    ) -> None:
        self._control = control
        self._sharded = sharded
        self._snapshots = snapshots
        self._groups = groups
        self._count, self._sender = settings.sender_count, settings.sender_of(control.rank)

    def open_group(self, command: OpenGroup) -> None:
        """Joins a transfer group on the senders other than rank 0. Rank 0 and the samplers have already joined theirs.

        Raises:
            Unavailable: A sender reached no samplers; raised on all ranks.
        """

        def join() -> None:
            if self._groups is None or not self._control.rank:
                return
            self._groups.close_others(command.kept)
            try:
                self._groups.open(
                    command.group_id,
                    command.world_size,
                    command.part_count,
                    command.backend,
                    command.join_timeout_s,
                    command.broadcast_timeout_s,
                )
            except RuntimeError as failure:
                raise Unavailable(f"rank {self._control.rank} of the trainer reached no samplers: {failure}") from None

        self._control.agree(join)

    def broadcast(self, command: BroadcastFull, live: FullModel | None) -> str:
        """Gathers and sends a snapshot. Returns the error of the transfer, or an empty string.

        After a failed transfer this rank continues to gather, because the other ranks still gather with it.

        Args:
            command: The command.
            live: The full-parameter model, if one exists.
        """
        _, specs = self._snapshots.describe_full(command.snapshot_id, live)
        shards = self._snapshots.locals_of(command.snapshot_id, live)
        like = dict(self._sharded.named_shards())
        whole = weight_files.gathered(shards, like, self._sharded.module.expert_layouts)
        cuts = _cuts(specs, command) if self._groups is not None else []
        error = ""
        sending: Future[str] | None = None
        with ThreadPoolExecutor(1, "broadcast") as thread:
            # While one bucket is being sent, the next one is gathered.
            for number, bucket in enumerate(buckets(specs, command.bucket_bytes)):
                tensors, parts = islice(whole, len(bucket)), [list(islice(cut, len(bucket))) for cut in cuts]
                if self._groups is None or number % self._count != self._sender or error:
                    deque(tensors, maxlen=0)  # this rank only takes part in gathering
                    continue
                data = packed_parts(parts, list(tensors))
                error = sending.result() if sending else ""
                sending = None if error else thread.submit(_send, self._groups, command, data)
        error = error or (sending.result() if sending else "")
        return next(filter(None, self._control.gather(error)), "")


def _cuts(specs: list[weights_pb2.TensorSpec], command: BroadcastFull) -> list[Iterator[Part]]:
    """Returns the parts of all tensors, in order, for each worker of a sampler; one if the group is not split."""
    splits, count = sampler_pb2.SnapshotReady.FromString(command.splits), command.part_count or 1
    return [iter(parts_of(specs, splits, worker, count)) for worker in range(count)]


def _send(groups: TransferGroups, command: BroadcastFull, payloads: list[Tensor]) -> str:
    """Sends a bucket to each worker. Returns the error, or an empty string."""
    try:
        group = groups.get(command.group_id)
        for part, data in enumerate(payloads):
            if data.numel():
                group.send(data, command.timeout_s, part)
    except RuntimeError as failure:
        logger.warning("broadcast over %s failed: %s", command.group_id, failure)
        return f"the broadcast failed: {failure}"
    return ""
