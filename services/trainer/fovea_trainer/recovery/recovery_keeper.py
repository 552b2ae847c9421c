"""Scheduling of durable points, on rank 0, while clients' commands run. One state or snapshot is written at a time.

A model that changes again before it is written is written once, in its latest state. Its earlier snapshots are written
before its state. If states and snapshots both wait, the same number of bytes is written of each. Each model thus gets a
new point after a bounded number of snapshots, for any number of models. The bytes of snapshots that wait to be written
are limited. Above the limit, further snapshots are refused for now.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from fovea.wire.errors import NotFound, StorageBehind, Unavailable
from fovea_trainer import command_queue, trainer_metrics
from fovea_trainer.command_queue import CommandQueue
from fovea_trainer.recovery.recovery_writer import RecoveryWriter
from fovea_trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PAUSE_S = 60.0
"""Longest pause between two attempts to write to failing storage, in seconds."""

LINE_S = 5.0
"""Seconds after which a model that was refused, and has not asked again, loses its position in the line."""


@dataclass
class _Model:
    """The durability of a model. Times are readings of `time.monotonic`.

    Args:
        durable: `seq_id` of the last command in its point; None if it has no point.
        durable_count: Number of weight changes in its point.
        since: Time of the first change that is not in its point.
        next_at: Earliest time to start the next point.
        wanted: Number of callers that wait until the model is durable.
        lock: Held while a snapshot of the model is made, and while its next state is copied.
    """

    durable: int | None = None
    durable_count: int = 0
    since: float = math.inf
    next_at: float = 0.0
    wanted: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class _PendingSnapshot:
    """A snapshot that is being made or waits to be written.

    Args:
        model_id: Id of the model.
        snapshot_id: Id of the snapshot.
        size_bytes: Its size in memory.
        pinned: True while memory must not drop it.
    """

    model_id: str
    snapshot_id: str
    size_bytes: int
    pinned: bool = False


class RecoveryKeeper:
    """Writes durable points while `run` is active.

    Args:
        settings: Settings of the trainer.
        queue: Command queue of the ranks.
        writer: Returns rank 0's recovery writer, which exists once the model is loaded.
    """

    def __init__(
        self, settings: TrainerSettings, queue: CommandQueue, writer: Callable[[], RecoveryWriter | None]
    ) -> None:
        self._lag_s = settings.recovery_lag_s
        self._queue = queue
        self._find_writer = writer
        self._models: dict[str, _Model] = {}
        self._snapshots: deque[_PendingSnapshot] = deque()
        self._in_progress: set[_PendingSnapshot] = set()
        self._line: dict[str, tuple[int, float]] = {}  # waiting models: bytes wanted, and time of the last request
        self._ahead_bytes = 0  # bytes of snapshots written in excess of bytes of states
        self._work = asyncio.Event()
        self._tried = asyncio.Condition()
        self._failures = 0
        self._failure = ""
        self._pause_s = 0.0
        self._paused_until = 0.0
        trainer_metrics.DURABLE_LAG_COMMANDS.set_function(lambda: max(map(self._lag_of, list(self._models)), default=0))
        trainer_metrics.DURABLE_LAG_SECONDS.set_function(self._lag_seconds)
        trainer_metrics.DURABLE_WAITING_BYTES.set_function(lambda: self.waiting_bytes)

    @property
    def durable_seq_ids(self) -> dict[str, int]:
        """`seq_id` of the last command in the point of each model that has one."""
        return {model_id: model.durable for model_id, model in self._models.items() if model.durable is not None}

    def changed(self, model_id: str) -> None:
        """Notes that a command has changed weights. Call it after each such command."""
        model = self._models.setdefault(model_id, _Model())
        model.since = min(model.since, time.monotonic())
        self._work.set()

    def restored(self, model_id: str, seq_id: int) -> None:
        """Notes that a model was restored from its point."""
        self._models[model_id] = _Model(durable=seq_id)

    @asynccontextmanager
    async def snapshotting(self, model_id: str, snapshot_id: str, size_bytes: int) -> AsyncIterator[None]:
        """Surrounds the creation of an adapter snapshot that has no URI, and queues the snapshot for writing.

        No state of the model is copied meanwhile, because a state may become durable only after all earlier snapshots.

        Args:
            model_id: Id of the model.
            snapshot_id: Id of the snapshot.
            size_bytes: Size of the snapshot in memory.

        Raises:
            StorageBehind: The bytes waiting to be written would exceed `--snapshot-memory-mib`.
        """
        self._admit(model_id, size_bytes)
        pending = _PendingSnapshot(model_id, snapshot_id, size_bytes)
        self._in_progress.add(pending)
        try:
            async with self._models.setdefault(model_id, _Model()).lock:
                yield
                if not self._failure:  # while storage fails, possibly for long, memory may drop it
                    self._writer.adapters.pin(snapshot_id)
                    pending.pinned = True
                self._snapshots.append(pending)
        finally:
            self._in_progress.remove(pending)
            self._work.set()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the snapshots that memory retains until they are written."""
        return sum(pending.size_bytes for pending in list(self._snapshots) if pending.pinned)

    async def flush(self, model_id: str) -> tuple[int, int]:
        """Waits until a model and its snapshots are durable.

        Returns:
            `seq_id` of the last command in the point, and the size of the model's files in bytes.

        Raises:
            Unavailable: Storage failed.
        """
        model = self._models.setdefault(model_id, _Model())
        failures = self._failures
        model.wanted += 1
        self._work.set()
        try:
            async with self._tried:
                await self._tried.wait_for(lambda: self._failures > failures or not self._is_behind(model_id))
        finally:
            model.wanted -= 1
        if self._is_behind(model_id):
            raise Unavailable(f"model {model_id!r} cannot be made durable: {self._failure}")
        return model.durable or 0, await self._in_order(lambda: self._writer.folder.size_bytes(model_id))

    async def stored(self, model_id: str) -> tuple[int, int]:
        """Returns what `flush` returns, for a model that is not loaded; 0 and 0 if it has no files."""
        found = await self._in_order(lambda: self._writer.folder.newest(model_id))
        size_bytes = await self._in_order(lambda: self._writer.folder.size_bytes(model_id))
        return (found[1].seq_id if found else 0), size_bytes

    async def unloaded(self, loaded: Iterable[str]) -> list[str]:
        """Returns the ids of models that have files, except for those that are loaded."""
        kept = await self._in_order(self._writer.folder.model_ids)
        return sorted(set(kept) - set(loaded))

    def forget(self, model_id: str) -> None:
        """Cancels pending writes of a model. Call it when the model is freed."""
        self._models.pop(model_id, None)
        for pending in [pending for pending in self._snapshots if pending.model_id == model_id]:
            self._unpin(pending)
            self._snapshots.remove(pending)

    async def remove_model(self, model_id: str) -> None:
        """Removes the files of a model. Failures are only logged."""
        await self._try(lambda: self._writer.folder.remove_model(model_id), f"files of model {model_id}")

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Removes the files of a snapshot and cancels its pending write. Failures are only logged."""
        for pending in [pending for pending in self._snapshots if pending.snapshot_id == snapshot_id]:
            self._unpin(pending)
            self._snapshots.remove(pending)
        await self._try(lambda: self._writer.folder.remove_snapshot(snapshot_id), f"files of snapshot {snapshot_id}")

    async def run(self) -> None:
        """Writes all states and snapshots that are not durable, until cancelled. Pauses longer after each failure."""
        await self._try(lambda: self._writer.folder.sweep(), "what earlier instances left")
        while True:
            self._work.clear()
            try:
                done = await self._write_next()
            except Unavailable:  # the trainer is shutting down after a failure
                return
            except Exception as error:  # storage libraries raise exceptions of many types
                await self._failed(error)
            else:
                async with self._tried:
                    self._tried.notify_all()
                if not done:
                    await self._wait()

    async def _write_next(self) -> bool:
        """Writes the next state or snapshot. Returns False if there is nothing to write now."""
        wanted = any(model.wanted for model in self._models.values())
        now = time.monotonic()
        if now < self._paused_until and not wanted:
            return False
        due = [
            (model.since, model_id)
            for model_id, model in self._models.items()
            if self._lag_of(model_id) and (model.wanted or model.next_at <= now)
        ]
        if not due or not self._snapshots:
            self._ahead_bytes = 0  # the balance counts only while both kinds wait
        if self._snapshots and (not due or self._ahead_bytes <= 0):
            await self._write_snapshot(self._snapshots[0])
        elif due:
            await self._write_state(min(due)[1])
        else:
            return False
        return True

    async def _write_state(self, model_id: str) -> None:
        model, began = self._models[model_id], time.monotonic()
        model.next_at = began + self._lag_s
        async with model.lock:
            while first := next((pending for pending in self._snapshots if pending.model_id == model_id), None):
                await self._write_snapshot(first)
            try:
                state = await self._queue.submit(command_queue.KeepState(model_id))
            except NotFound:
                self._models.pop(model_id, None)  # it was freed meanwhile
                return
        size_bytes = await asyncio.wrap_future(state.written)
        if self._models.get(model_id) is not model:  # it was freed meanwhile
            return
        model.durable, model.durable_count = state.seq_id, state.change_count
        model.since = began if self._lag_of(model_id) else math.inf
        self._succeeded("state", size_bytes)
        trainer_metrics.DURABLE_SECONDS.observe(time.monotonic() - began)

    async def _write_snapshot(self, pending: _PendingSnapshot) -> None:
        size_bytes = await asyncio.wrap_future(self._writer.write_snapshot(pending.snapshot_id))
        if not size_bytes:
            logger.warning("snapshot %s was dropped from memory before it was written: it is lost", pending.snapshot_id)
            trainer_metrics.DURABLE_FAILURES.inc()
        if pending in self._snapshots:
            self._unpin(pending)
            self._snapshots.remove(pending)
        self._succeeded("snapshot", size_bytes)

    def _succeeded(self, kind: str, size_bytes: int) -> None:
        if self._failure:
            logger.info("recovery storage works again")
        self._failure, self._pause_s, self._paused_until = "", 0.0, 0.0
        self._ahead_bytes += size_bytes if kind == "snapshot" else -size_bytes
        trainer_metrics.DURABLE_BYTES.labels(kind).inc(size_bytes)

    async def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._failure = str(error) or type(error).__name__
        self._pause_s = min(max(1.0, 2 * self._pause_s), MAX_PAUSE_S)
        self._paused_until = time.monotonic() + self._pause_s
        trainer_metrics.DURABLE_FAILURES.inc()
        logger.warning("no writes to recovery storage for %.0f s, training continues: %s", self._pause_s, self._failure)
        for pending in self._snapshots:  # while storage fails, possibly for long, memory may drop them
            self._unpin(pending)
        async with self._tried:
            self._tried.notify_all()
        await self._wait()

    async def _wait(self) -> None:
        """Waits for new work, or until postponed work is due."""
        put_off = [model.next_at for model_id, model in self._models.items() if self._lag_of(model_id)]
        if put_off or self._snapshots:
            next_at = max(self._paused_until, min(put_off, default=0.0))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_at - time.monotonic())):
                    await self._work.wait()
        else:
            await self._work.wait()

    def _lag_of(self, model_id: str) -> int:
        """Returns the number of a model's weight changes that are in no durable point."""
        return self._writer.changes_of(model_id) - self._models[model_id].durable_count

    def _lag_seconds(self) -> float:
        return max(
            0.0, time.monotonic() - min((model.since for model in list(self._models.values())), default=math.inf)
        )

    def _is_behind(self, model_id: str) -> bool:
        if any(pending.model_id == model_id for pending in self._snapshots):
            return True
        return model_id in self._models and self._lag_of(model_id) > 0

    def _admit(self, model_id: str, size_bytes: int) -> None:
        """Checks that a snapshot has room, after the snapshots that wait and those of models ahead of it in line.

        While storage fails, all snapshots are admitted, because memory does not retain them then; see `_failed`.

        Raises:
            StorageBehind: There is no room.
        """
        now = time.monotonic()
        self._line = {name: entry for name, entry in self._line.items() if entry[1] > now - LINE_S}
        held = self.waiting_bytes + sum(pending.size_bytes for pending in self._in_progress)
        before = 0
        for name, (its_bytes, _) in self._line.items():
            if name == model_id:
                break
            before += its_bytes
        most = self._writer.adapters.max_bytes
        if held + before and held + before + size_bytes > most and not self._failure:
            self._line[model_id] = (size_bytes, now)
            raise StorageBehind(
                f"recovery storage is behind: {held / 2**20:.0f} MiB of snapshots wait to be written, the limit is "
                f"{most / 2**20:.0f} MiB (--snapshot-memory-mib), and {len(self._line)} models wait to save the next: "
                "the request waits until storage has caught up"
            )
        self._line.pop(model_id, None)

    def _unpin(self, pending: _PendingSnapshot) -> None:
        if pending.pinned:
            pending.pinned = False
            self._writer.adapters.unpin(pending.snapshot_id)

    async def _try(self, action: Callable[[], None], what: str) -> None:
        try:
            await self._in_order(action)
        except Exception as error:  # storage libraries raise exceptions of many types
            trainer_metrics.DURABLE_FAILURES.inc()
            logger.warning("%s could not be removed: %s", what, error)

    async def _in_order(self, action: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._writer.in_order(action))

    @property
    def _writer(self) -> RecoveryWriter:
        writer = self._find_writer()
        assert writer is not None
        return writer
