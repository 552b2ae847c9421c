"""Scheduling of durable points, on rank 0, while clients' commands run. One state or snapshot is written at a time;
meanwhile the next state is copied.

Models take turns: the model with the oldest change or snapshot that is not durable is next, and models without a point
precede others. A turn first writes the snapshots that the model has outgrown, then its newest state. A model that
changed several times is written once. An unnamed snapshot of the newest state shares the file of the point.

Two bounds make clients wait instead of letting debts grow. Snapshots that wait to be written use at most
`--snapshot-memory-mib`. A model may change only while all states and snapshots that are owed to storage can be written
within `--recovery-most-lag-s`, at the speed of the last writes. Once admitted, it may change freely until a copy of its
state is requested, because its next point includes all changes. Then it waits in a `WaitingLine` again. A write that
does not return counts as failed until it does: then models change freely, and the gateway's journal has the commands.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from fovea.wire.errors import NotFound, Unavailable
from fovea_trainer import command_queue, trainer_metrics
from fovea_trainer.command_queue import CommandQueue
from fovea_trainer.recovery.recovery_folder import StorageSpeed, WaitingLine
from fovea_trainer.recovery.recovery_writer import Durability, PendingSnapshot, PendingState, RecoveryWriter
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights.host_memory import AHEAD_BYTES

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PAUSE_S = 60.0
"""Longest pause between two attempts to write to failing storage, in seconds."""
_STATES_SHARE, _SNAPSHOTS_SHARE = 0.6, 0.25
"""The shares of the longest lag in which all that is owed, and the snapshots in it, must be written; writes vary."""
_HEAD_START = 0.25
"""The share of the longest lag by which models without a point precede others."""


class RecoveryKeeper:
    """Writes durable points while `run` is active.

    Args:
        settings: Settings of the trainer.
        queue: Command queue of the ranks.
        writer: Returns rank 0's recovery writer, which exists once the model is loaded.
        clock: Returns seconds since an arbitrary moment.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        queue: CommandQueue,
        writer: Callable[[], RecoveryWriter | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lag_s = settings.recovery_lag_s
        self._queue = queue
        self._find_writer = writer
        self._clock = clock
        self._models: dict[str, Durability] = {}
        self._in_progress: set[PendingSnapshot] = set()
        bound = "--recovery-most-lag-s at the present speed"
        self._snapshot_line = WaitingLine(clock, "snapshots", f"--snapshot-memory-mib, or {bound}")
        self._change_line = WaitingLine(clock, "states and snapshots", bound)
        self._speed = StorageSpeed(settings.recovery_most_lag_s, clock)
        self._work = (asyncio.Event(), asyncio.Event())  # one for each task of `run`
        self._written: list[Durability] = []  # models with a state or snapshot that is being copied or written
        self._tried = asyncio.Condition()
        self._failures = self._asked_after = 0  # all so far, and those before the last `flush`
        self.failure = ""
        """The error of the last write, while storage fails or does not return; empty while it works."""
        self._pause_s = 0.0
        self._paused_until = 0.0
        trainer_metrics.DURABLE_LAG_COMMANDS.set_function(lambda: max(map(self._lag_of, list(self._models)), default=0))
        trainer_metrics.DURABLE_LAG_SECONDS.set_function(lambda: self.lag_seconds)
        trainer_metrics.DURABLE_WAITING_BYTES.set_function(lambda: self.waiting_bytes)

    @property
    def durable_seq_ids(self) -> dict[str, int]:
        """`seq_id` of the last command in the point of each model that has one."""
        return {model_id: model.durable for model_id, model in self._models.items() if model.durable is not None}

    @property
    def lag_seconds(self) -> float:
        """Seconds since the oldest change or snapshot that is not durable."""
        oldest = min((min(m.since, m.written_since) for m in list(self._models.values())), default=math.inf)
        return max(0.0, self._clock() - oldest)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the snapshots that memory retains until they are written."""
        models = list(self._models.values())
        return sum(pending.size_bytes for model in models for pending in list(model.snapshots) if pending.pinned)

    def changed(self, model_id: str) -> None:
        """Notes that a command has changed weights. Call it after each such command."""
        model = self._models.setdefault(model_id, Durability())
        model.since = min(model.since, self._clock())
        self._wake()

    @asynccontextmanager
    async def changing(self, model_id: str, state_bytes: int) -> AsyncIterator[None]:
        """Surrounds an optimizer step of a model with a state of `state_bytes` in storage.

        Raises:
            StorageBehind: Storage could not make the change durable within `--recovery-most-lag-s`. While storage
                fails, all changes are admitted.
        """
        model = self._models.setdefault(model_id, Durability())
        model.state_bytes = state_bytes
        if not (self.failure or model.admitted):
            most, is_first = self._speed.most_bytes(_STATES_SHARE), model.durable is None
            is_owed = model.changing or self._changes_of(model_id) > model.copied_count
            self._change_line.admit(model_id, 0 if is_owed else state_bytes, self._owed_bytes(), most, is_first)
        model.changing, model.admitted = model.changing + 1, True
        try:
            yield
            self.changed(model_id)
        finally:
            model.changing -= 1
            model.admitted &= bool(model.changing) or self._changes_of(model_id) > model.copied_count

    def restored(self, model_id: str, seq_id: int) -> None:
        """Notes that a model was restored from its point."""
        self._models[model_id] = Durability(durable=seq_id)

    @asynccontextmanager
    async def snapshotting(self, model_id: str, snapshot_id: str, size_bytes: int) -> AsyncIterator[None]:
        """Surrounds the creation of an adapter snapshot that has no URI, and queues the snapshot for writing.

        No state of the model is copied meanwhile, because a state may become durable only after all earlier snapshots.

        Args:
            model_id: Id of the model.
            snapshot_id: Id of the snapshot.
            size_bytes: Size of the snapshot in memory.

        Raises:
            StorageBehind: The bytes waiting to be written would exceed `--snapshot-memory-mib`. While storage fails,
                all snapshots are admitted, because memory does not retain them then; see `_failed`.
        """
        if not self.failure:
            held = self.waiting_bytes + sum(pending.size_bytes for pending in self._in_progress)
            most = min(self._writer.adapters.max_bytes, self._speed.most_bytes(_SNAPSHOTS_SHARE))
            self._snapshot_line.admit(model_id, size_bytes, held, most)
        pending = PendingSnapshot(snapshot_id, size_bytes)
        self._in_progress.add(pending)
        model = self._models.setdefault(model_id, Durability())
        try:
            async with model.lock:
                count = self._changes_of(model_id)
                yield
                pending.change_count = count if self._changes_of(model_id) == count else None
                if not self.failure:  # while storage fails, possibly for long, memory may drop it
                    self._writer.adapters.pin(snapshot_id)
                    pending.pinned = True
                model.snapshots.append(pending)
                model.since = min(model.since, self._clock())
        finally:
            self._in_progress.remove(pending)
            self._wake()

    async def flush(self, model_id: str) -> tuple[int, int]:
        """Waits until a model and its snapshots are durable.

        Returns:
            `seq_id` of the last command in the point, and the size of the model's files in bytes.

        Raises:
            Unavailable: Storage failed, or did not return in time.
        """
        model = self._models.setdefault(model_id, Durability())
        failures = self._asked_after = self._failures
        model.wanted += 1
        self._wake()
        try:
            async with self._tried:
                await self._tried.wait_for(lambda: self._failures > failures or not self._is_behind(model_id))
        finally:
            model.wanted -= 1
        if self._is_behind(model_id):
            raise Unavailable(f"model {model_id!r} cannot be made durable: {self.failure or 'a write failed'}")
        return model.durable or 0, await self._in_order(lambda: self._writer.folder.size_bytes(model_id))

    async def stored(self, model_id: str) -> tuple[int, int]:
        """Returns the same as `flush`, for a model that is not loaded; 0 and 0 if it has no files."""
        found = await self._in_order(lambda: self._writer.folder.newest(model_id))
        size_bytes = await self._in_order(lambda: self._writer.folder.size_bytes(model_id))
        return (found[1].seq_id if found else 0), size_bytes

    async def unloaded(self, loaded: Iterable[str]) -> list[str]:
        """Returns the ids of models that have files, except for those that are loaded."""
        kept = await self._in_order(self._writer.folder.model_ids)
        return sorted(set(kept) - set(loaded))

    def forget(self, model_id: str) -> None:
        """Cancels pending writes of a model. Call it when the model is freed."""
        model = self._models.pop(model_id, None)
        while model is not None and model.snapshots:
            self._unpin(model.snapshots.popleft())

    async def remove_model(self, model_id: str) -> None:
        """Removes the files of a model. Failures are only logged."""
        await self._try(lambda: self._writer.folder.remove_model(model_id), f"files of model {model_id}")

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Removes the files of a snapshot and cancels its pending write. Failures are only logged."""
        for model in self._models.values():
            for pending in [pending for pending in model.snapshots if pending.snapshot_id == snapshot_id]:
                self._unpin(pending)
                model.snapshots.remove(pending)
        await self._try(lambda: self._writer.folder.remove_snapshot(snapshot_id), f"files of snapshot {snapshot_id}")

    async def run(self) -> None:
        """Writes all states and snapshots that are not durable, until cancelled. Pauses longer after each failure."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._write_in_turn(*work)) for work in (self._work, self._work[::-1])]
            _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()

    async def _write_in_turn(self, work: asyncio.Event, other_work: asyncio.Event) -> None:
        while True:
            work.clear()
            done = False
            try:
                done = await self._write_next(other_work)
            except Unavailable:  # the trainer is shutting down after a failure
                return
            except Exception as error:  # storage libraries raise exceptions of many types
                await self._failed(error)
            else:
                async with self._tried:
                    self._tried.notify_all()
            if not done:
                await self._wait(work)

    async def _write_next(self, other_work: asyncio.Event) -> bool:
        """Writes the next state or snapshot. Returns False if there is nothing to write now."""
        now, models = self._clock(), self._models.items()
        if now < self._paused_until and self._asked_after < self._failures:
            return False
        beside = self._written
        owed = [one for one in models if one[1] not in beside and (one[1].snapshots or self._is_due(one[0], now))]
        if not owed:
            return False
        # A snapshot that shares a file costs nothing, so it waits for no other model.
        model_id, model = min(owed, key=lambda one: one[1].place(_HEAD_START * self._speed.most_lag_s))
        if beside and (self.failure or not all(0 < each.state_bytes <= AHEAD_BYTES for each in (model, *beside))):
            return False
        first, count = model.snapshots[0] if model.snapshots else None, self._changes_of(model_id)
        beside.append(model)
        try:
            if first is None or (self._is_due(model_id, now) and first.change_count == count):
                await self._write_state(model_id, model)
            else:
                await self._write_snapshot(model_id, model, first)
        finally:
            beside.remove(model)
            other_work.set()
        return True

    def _is_due(self, model_id: str, now: float) -> bool:
        """Returns True if the next state of a model should be written now."""
        model = self._models[model_id]
        return self._lag_of(model_id) > 0 and (model.wanted > 0 or model.next_at <= now)

    async def _write_state(self, model_id: str, model: Durability) -> None:
        began = self._clock()
        async with model.lock:
            count = self._changes_of(model_id)
            if any(pending.change_count != count for pending in model.snapshots):
                return  # a snapshot that was made meanwhile comes first
            model.admitted = False  # later changes may run after the copy, which waits for its turn at the device
            try:
                state: PendingState | None = await self._queue.submit(
                    command_queue.KeepState(model_id, count if model.snapshots else None)
                )
            except NotFound:
                self._models.pop(model_id, None)  # it was freed meanwhile
                return
            if state is None:  # it changed meanwhile, so its snapshots come first
                return
            model.next_at = began + self._lag_s
            model.copied_count, model.written_since = state.change_count, model.since
            model.since = self._clock() if self._changes_of(model_id) > state.change_count else math.inf
        try:
            wanted_s = self._clock() - began
            size_bytes = await self._speed.written(state.written, state.size_bytes, self._note_failure, wanted_s)
        except BaseException:
            model.copied_count, model.since = model.durable_count, min(model.since, model.written_since)
            model.written_since = math.inf
            raise
        if self._models.get(model_id) is not model:
            return  # it was freed meanwhile
        model.durable, model.durable_count, model.written_since = state.seq_id, state.change_count, math.inf
        if model.snapshots:
            model.since = min(model.since, self._clock())
        self._succeeded("state", size_bytes)
        trainer_metrics.DURABLE_SECONDS.observe(self._clock() - began)

    async def _write_snapshot(self, model_id: str, model: Durability, pending: PendingSnapshot) -> None:
        point = model.durable if model.shares_point(pending) else None
        owed_bytes = pending.size_bytes if point is None else 0
        written = self._writer.write_snapshot(pending.snapshot_id, point)
        size_bytes = await self._speed.written(written, owed_bytes, self._note_failure)
        if size_bytes is None:
            logger.warning("snapshot %s was dropped from memory before it was written: it is lost", pending.snapshot_id)
            trainer_metrics.DURABLE_FAILURES.inc()
        if pending in model.snapshots:
            self._unpin(pending)
            model.snapshots.remove(pending)
        if model_id in self._models and not model.snapshots and self._lag_of(model_id) == 0:
            model.since = math.inf
        self._succeeded("snapshot", size_bytes or 0)

    def _succeeded(self, kind: str, size_bytes: int) -> None:
        if self.failure:
            logger.info("recovery storage works again")
        self.failure, self._pause_s, self._paused_until = "", 0.0, 0.0
        trainer_metrics.DURABLE_BYTES.labels(kind).inc(size_bytes)

    async def _failed(self, error: Exception) -> None:
        if (now := self._clock()) >= self._paused_until:  # else another write has failed just before
            self._pause_s = min(max(1.0, 2 * self._pause_s), MAX_PAUSE_S)
            self._paused_until = now + self._pause_s
        await self._note_failure(str(error) or type(error).__name__)

    async def _note_failure(self, words: str) -> None:
        self._failures += 1
        self.failure = words
        trainer_metrics.DURABLE_FAILURES.inc()
        logger.warning("recovery storage fails, training continues without new durable points: %s", words)
        for model in self._models.values():  # while storage fails, possibly for long, memory may drop them
            for pending in model.snapshots:
                self._unpin(pending)
        async with self._tried:
            self._tried.notify_all()

    async def _wait(self, work: asyncio.Event) -> None:
        """Waits for new work, or until postponed work is due."""
        put_off = [model.next_at for model_id, model in self._models.items() if self._lag_of(model_id)]
        if not self._written and (put_off or any(model.snapshots for model in self._models.values())):
            next_at = max(self._paused_until, min(put_off, default=0.0))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_at - self._clock())):
                    await work.wait()
        else:
            await work.wait()

    def _wake(self) -> None:
        for work in self._work:
            work.set()

    def _changes_of(self, model_id: str) -> int:
        return self._writer.changes_of(model_id)

    def _lag_of(self, model_id: str) -> int:
        """Returns the number of a model's weight changes that are in no durable point."""
        return self._changes_of(model_id) - self._models[model_id].durable_count

    def _is_behind(self, model_id: str) -> bool:
        model = self._models.get(model_id)
        return model is not None and (bool(model.snapshots) or self._lag_of(model_id) > 0)

    def _owed_bytes(self) -> int:
        """Returns the bytes of all states and snapshots that storage should write now."""
        owed, now = self._speed.owed_bytes, self._clock()
        for model_id, model in self._models.items():
            if model.since == math.inf and not model.changing:
                continue
            count = self._changes_of(model_id)
            if (model.changing or count > model.copied_count) and model.next_at <= now:
                owed += model.state_bytes
            owed += sum(each.size_bytes for each in model.snapshots if each.change_count != count)
        return owed

    def _unpin(self, pending: PendingSnapshot) -> None:
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
        return await self._speed.in_time(self._writer.in_order(action))

    @property
    def _writer(self) -> RecoveryWriter:
        writer = self._find_writer()
        assert writer is not None
        return writer
