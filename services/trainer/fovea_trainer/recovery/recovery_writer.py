"""Durable points: the state of a model after a command, copied to the host during training and written by a thread.

Every rank has a writer, and all ranks make the same calls. A failure here never fails a client's command: `KeepState`,
or the future that it returns, raises the errors of copying and writing, and `RecoveryKeeper` handles them.
"""

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fovea.wire.errors import NotFound
from fovea_trainer.model.trained_model import TrainedModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.recovery.recovery_folder import Point, RecoveryFolder
from fovea_trainer.weights.checkpoint_folder import Checksums, Folder
from fovea_trainer.weights.host_memory import CopiesAhead, HostCopies
from fovea_trainer.weights.snapshot_store import SnapshotStore
from fovea_trainer.weights.snapshot_taker import write_snapshot, write_snapshot_of_point
from fovea_trainer.weights.training_state import ModelState, StateStore, state_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """The last command that changed a model's weights.

    Args:
        seq_id: Number of the last numbered command.
        answer: The response to it.
        count: Number of changes since the model was created or restored.
    """

    seq_id: int
    answer: Any
    count: int


class PendingState(NamedTuple):
    """A state that is being written.

    Args:
        seq_id: Number of the last command that the state includes.
        change_count: `Change.count` of the last change that the state includes.
        size_bytes: Size of its tensors.
        written: Resolves to the size in bytes once the state is durable.
    """

    seq_id: int
    change_count: int
    size_bytes: int
    written: "Future[int]"


class RestoredModel(NamedTuple):
    """The description of a restored model, as its point has recorded it."""

    seq_id: int
    step: int
    answer: Any


@dataclass(eq=False)
class PendingSnapshot:
    """A snapshot that is being made or waits to be written.

    Args:
        snapshot_id: Id of the snapshot.
        size_bytes: Its size in memory.
        change_count: Number of the model's changes that it includes; None if unknown.
        pinned: True while memory must not drop it.
    """

    snapshot_id: str
    size_bytes: int
    change_count: int | None = None
    pinned: bool = False


@dataclass(eq=False)
class Durability:
    """The durability of a model. Times are readings of the keeper's clock.

    Args:
        durable: `seq_id` of the last command in its point; None if it has no point.
        durable_count: Number of weight changes in its point.
        copied_count: Number of weight changes in its point or in the state that is being written.
        since: Time of the first change or snapshot that is neither durable nor being written.
        written_since: The same for the state that is being written.
        next_at: Earliest time to start the next point.
        wanted: Number of callers that wait until the model is durable.
        state_bytes: Size of its state in storage.
        changing: Number of commands that are changing it.
        admitted: True from the admission of a change until the next copy of the state is submitted.
        snapshots: The snapshots to be written, in order.
        lock: Held while a snapshot of the model is made, and while its next state is copied.
    """

    durable: int | None = None
    durable_count: int = 0
    copied_count: int = 0
    since: float = math.inf
    written_since: float = math.inf
    next_at: float = 0.0
    wanted: int = 0
    state_bytes: int = 0
    changing: int = 0
    admitted: bool = False
    snapshots: deque[PendingSnapshot] = field(default_factory=deque)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def place(self, head_start_s: float) -> tuple[bool, float]:
        """Returns the place of the model in the order of writes; without a point it is ahead by `head_start_s`."""
        is_cheap = bool(self.snapshots) and self.shares_point(self.snapshots[0])
        return not is_cheap, self.since - (head_start_s if self.durable is None else 0.0)

    def shares_point(self, snapshot: PendingSnapshot) -> bool:
        """Returns True if a snapshot has the weights of the newest point."""
        return self.durable is not None and snapshot.change_count == self.durable_count


class RecoveryWriter:
    """Writes and finds durable points. Only the rank's thread may call methods that do not say otherwise.

    Args:
        folder: The recovery store.
        control: Control group of the rank's thread.
        device: Device of this rank.
        base_model: Name of the base model, recorded in files.
        base_files: Digest of each file of the base, keyed by file name. Points of another base are rejected.
        numerics: Facts that affect the rounding of results, keyed by their names.
        adapters: The adapter snapshots that rank 0 holds.
    """

    def __init__(
        self,
        folder: RecoveryFolder,
        control: ControlGroup,
        device: torch.device,
        base_model: str,
        base_files: Mapping[str, str],
        numerics: Mapping[str, str],
        adapters: SnapshotStore,
    ) -> None:
        self.folder = folder
        self.adapters = adapters
        self._control = control
        self._base_model = base_model
        self._base = sha256(json.dumps(sorted(base_files.items())).encode()).hexdigest()
        self._numerics = dict(numerics)
        # The writer thread has its own control group, so that its collectives never interleave with those of commands.
        self._states = StateStore(ControlGroup(), base_model)
        self._copies = CopiesAhead(device)
        self._fetches = HostCopies(device)
        self._thread = ThreadPoolExecutor(1, "recovery")
        self._readers = ThreadPoolExecutor(4, "checksums")
        self._changes: dict[str, Change] = {}

    def before_change(self, model_id: str) -> None:
        """Waits until a pending copy of this model is made.

        Call it before its weights or moments are written to or freed.
        """
        self._copies.before_writing(model_id)

    def changed(self, model_id: str, seq_id: int, answer: Any) -> None:
        """Records a command that changed weights. Call it after the command.

        A command without a number (`seq_id` 0) counts as a change, but the recorded number and answer stay those of the
        last numbered command.
        """
        before = self._changes.get(model_id, Change(0, None, 0))
        numbered = (seq_id, answer) if seq_id else (before.seq_id, before.answer)
        self._changes[model_id] = Change(*numbered, before.count + 1)

    def restored(self, model_id: str, point: Point) -> None:
        """Records that a model was restored from a point.

        Warns if rounding may differ from that of the trainer that wrote the point.
        """
        self._changes[model_id] = Change(point.seq_id, point.answer, 0)
        unlike = [name for name, value in self._numerics.items() if point.numerics.get(name, value) != value]
        if unlike and self._control.rank == 0:
            words = ", ".join(f"{name} {self._numerics[name]} instead of {point.numerics[name]}" for name in unlike)
            logger.warning("model %s continues with different numerics than before: %s", model_id, words)

    def changes_of(self, model_id: str) -> int:
        """Returns the number of changes to a model since it was created or restored. Callable from any thread."""
        return self._changes[model_id].count if model_id in self._changes else 0

    def forget(self, model_id: str) -> None:
        """Forgets the changes of a model. Call it when the model is freed."""
        self._changes.pop(model_id, None)

    def write_state(self, model: TrainedModel, change_count: int | None = None) -> PendingState | None:
        """Copies the state of a model and submits it for writing. Collective.

        There are two host buffers, so the next call waits for the write before this one, and if one of the states is
        larger than `AHEAD_BYTES`, also for this write.

        Args:
            model: The model.
            change_count: The number of changes that the state must include; None for any number.

        Returns:
            The pending state, or None if the model has changed more often.
        """
        change = self._changes[model.model_id]
        if change_count not in (None, change.count):
            return None
        state = state_of(model, self._control.rank, lambda live: self._copied(live, model.model_id))
        written = self._copies.read_by(
            lambda copies: self._thread.submit(self._write, model.model_id, state, change, copies)
        )
        size_bytes = sum(tensor.nbytes for group in state.tensors.values() for tensor in group.values())
        return PendingState(change.seq_id, change.count, size_bytes, written)

    def find(self, model_id: str) -> tuple[str, Point]:
        """Returns URL and description of the newest undamaged point of a model. Collective.

        Raises:
            NotFound: The model has no undamaged point, or its newest one belongs to another base model.
        """
        damage = ""
        for url, point in self._control.on_rank_0(lambda: self._swept(model_id)):
            if point.base != self._base:
                raise NotFound(f"{url} belongs to a base model other than {self._base_model}", field="model_id")
            if not (damaged := self._damaged_file(url, point)):
                return url, point
            damage = f": {url} is damaged, {damaged} does not match the recorded checksum"
            logger.error("%s is damaged: %s does not match the recorded checksum", url, damaged)
        raise NotFound(f"no durable point of model {model_id!r} is stored{damage}", field="model_id")

    def _swept(self, model_id: str) -> list[tuple[str, Point]]:
        self.folder.sweep(model_id)
        return self.folder.whole(model_id)

    def _damaged_file(self, url: str, point: Point) -> str:
        """Returns the names of a point's damaged files, joined by spaces. Each rank checks its share. Collective."""
        folder, share = Folder.at(url), sorted(point.checksums)[self._control.rank :: self._control.world_size]
        sums = self._control.agree(lambda: list(self._readers.map(folder.checksum, share)))
        damaged = [name for name, found in zip(share, sums, strict=True) if found != point.checksums[name]]
        return self._control.broadcast(" ".join(name for each in self._control.gather(damaged) for name in each))

    def find_snapshot(self, snapshot_id: str) -> str | None:
        """Returns the URL of a stored snapshot, or None. Collective."""
        return self._control.on_rank_0(lambda: self.folder.find_snapshot(snapshot_id))

    def in_order(self, action: Callable[[], T]) -> "Future[T]":
        """Runs a file operation after all writes that were submitted before it. Callable from any thread."""
        return self._thread.submit(action)

    def write_snapshot(self, snapshot_id: str, point: int | None) -> "Future[int | None]":
        """Submits an adapter snapshot that rank 0 holds for writing. Callable from any thread.

        Args:
            snapshot_id: Id of the snapshot.
            point: `seq_id` of the model's newest point if that has the same weights. The snapshot then shares the
                point's file; otherwise it is written in full.

        Returns:
            The bytes written; None if rank 0 no longer holds the snapshot when its turn comes.
        """

        def write() -> int | None:
            if (found := self.adapters.get(snapshot_id)) is None:
                return None
            model_id = found.identity.model_id
            url = self.folder.snapshot_url(model_id, snapshot_id)
            if point is not None:
                return write_snapshot_of_point(found, url, Folder.at(self.folder.point_url(model_id, point)))
            tensors = {name: self._fetches.fetched(tensor) for name, tensor in found.tensors.items()}
            return write_snapshot(replace(found, tensors=tensors), url, self._base_model)

        return self.in_order(write)

    def close(self) -> None:
        """Waits for pending writes and stops the thread."""
        self._thread.shutdown()
        self._readers.shutdown()

    def _copied(self, live: Sequence[Tensor], model_id: str) -> list[Tensor]:
        return self._control.agree(lambda: self._copies.of(live, model_id))

    def _write(self, model_id: str, state: ModelState, change: Change, copies: HostCopies) -> int:
        copies.wait()

        def describe(folder: Folder, checksums: Checksums) -> None:
            lora = asdict(state.lora) if state.lora else None
            point = Point(change.seq_id, state.step, change.answer, lora, self._base, time.time(), folder.sizes())
            replace(point, numerics=self._numerics, checksums=checksums).write_to(folder)

        size_bytes = self._states.write(state, self.folder.point_url(model_id, change.seq_id), describe)
        if self._control.rank == 0:
            self.folder.drop_older(model_id, change.seq_id)
        return size_bytes
