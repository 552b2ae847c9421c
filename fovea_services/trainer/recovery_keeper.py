"""Which model is made durable when: on rank 0, beside what clients ask for. One state or snapshot is written at a time.

A model that changes again before its turn is written once, as it is then. A model's state is written only once the
snapshots that were taken of it before are. While both wait, states and snapshots get equal shares of the storage in
bytes, so that each model gets a new point within a bounded number of snapshots, however many models there are.
Snapshots that wait to be written take a bounded number of bytes: above it, taking another one is refused for now.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from fovea.wire.errors import NotFound, StorageBehind, Unavailable
from fovea_services.trainer import command_queue, trainer_metrics
from fovea_services.trainer.command_queue import CommandQueue
from fovea_services.trainer.settings import TrainerSettings
from fovea_services.trainer.snapshots.recovery_writer import RecoveryWriter
from fovea_services.trainer.training_engine import TrainingEngine

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_PAUSE_S = 60.0
"""Between two tries to write to storage that fails."""

LINE_S = 5.0
"""A model that was told to wait, and has not asked again for so long, loses its place in the line."""


@dataclass
class _Model:
    """How far a model is durable. Times are of `time.monotonic`.

    Args:
        durable: The last command, by `seq_id`, that is in its point; None if it has none.
        kept: How many changes of its weights are in its point.
        since: When it was first found to have changed since.
        next_at: When the next point may be begun.
        wanted: Callers that wait for it to be durable.
        turn: Held while a snapshot of it is taken, and while its next state is copied.
    """

    durable: int | None = None
    kept: int = 0
    since: float = math.inf
    next_at: float = 0.0
    wanted: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class _Taken:
    """A snapshot that is being taken, or waits to be written; pinned while memory must not drop it."""

    model_id: str
    snapshot_id: str
    size_bytes: int
    pinned: bool = False


class RecoveryKeeper:
    """Has durable points written, for as long as `run` does.

    Args:
        settings: As given at start.
        queue: Commands of the ranks.
        engine: Rank 0's, which must keep recovery, once it is there.
    """

    def __init__(self, settings: TrainerSettings, queue: CommandQueue, engine: Callable[[], TrainingEngine]) -> None:
        self._lag_s = settings.recovery_lag_s
        self._queue = queue
        self._engine = engine
        self._models: dict[str, _Model] = {}
        self._snapshots: deque[_Taken] = deque()
        self._taking: set[_Taken] = set()
        self._line: dict[str, tuple[int, float]] = {}  # models that wait: bytes, and when they asked last
        self._ahead_bytes = 0  # of snapshots, before states
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
        """Of models that have a durable point: the last command that is in it."""
        return {model_id: model.durable for model_id, model in self._models.items() if model.durable is not None}

    def changed(self, model_id: str) -> None:
        """To be called after each command that changed weights."""
        model = self._models.setdefault(model_id, _Model())
        model.since = min(model.since, time.monotonic())
        self._work.set()

    def restored(self, model_id: str, seq_id: int) -> None:
        """To be called when a model was made from its point."""
        self._models[model_id] = _Model(durable=seq_id)

    @asynccontextmanager
    async def taking(self, model_id: str, snapshot_id: str, size_bytes: int) -> AsyncIterator[None]:
        """Surrounds the taking of an adapter's snapshot that no other storage has, and then has it written.

        No state of the model is copied meanwhile: a state is durable only once the snapshots before it are.

        Args:
            size_bytes: What the snapshot takes in memory.

        Raises:
            StorageBehind: With it, more bytes would wait to be written than `--snapshot-memory-mib`.
        """
        self._admit(model_id, size_bytes)
        taken = _Taken(model_id, snapshot_id, size_bytes)
        self._taking.add(taken)
        try:
            async with self._models.setdefault(model_id, _Model()).turn:
                yield
                if not self._failure:  # else memory may drop it: storage may fail for long
                    self._engine().adapters.pin(snapshot_id)
                    taken.pinned = True
                self._snapshots.append(taken)
        finally:
            self._taking.remove(taken)
            self._work.set()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the snapshots that memory keeps until they are written."""
        return sum(taken.size_bytes for taken in list(self._snapshots) if taken.pinned)

    async def flush(self, model_id: str) -> tuple[int, int]:
        """Waits until a model and its snapshots are durable; returns the last command in the point, and bytes kept.

        Raises Unavailable if storage fails.
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

    async def kept(self, model_id: str) -> tuple[int, int]:
        """What `flush` returns, of a model that is not here: nothing is 0 and 0."""
        found = await self._in_order(lambda: self._writer.folder.newest(model_id))
        size_bytes = await self._in_order(lambda: self._writer.folder.size_bytes(model_id))
        return (found[1].seq_id if found else 0), size_bytes

    async def away(self) -> list[str]:
        """Models that are not here, but of which there are files."""
        kept = await self._in_order(self._writer.folder.model_ids)
        return sorted(set(kept) - self._engine().models.keys())

    def forget(self, model_id: str) -> None:
        """To be called when a model is freed: what waits for it is not written any more."""
        self._models.pop(model_id, None)
        for taken in [taken for taken in self._snapshots if taken.model_id == model_id]:
            self._unpin(taken)
            self._snapshots.remove(taken)

    async def remove_model(self, model_id: str) -> None:
        """Removes the files of a model. What storage refuses is left to a later start's sweep."""
        await self._try(lambda: self._writer.folder.remove_model(model_id), f"files of model {model_id}")

    async def remove_snapshot(self, snapshot_id: str) -> None:
        """Removes a snapshot's files, likewise."""
        for taken in [taken for taken in self._snapshots if taken.snapshot_id == snapshot_id]:
            self._unpin(taken)
            self._snapshots.remove(taken)
        await self._try(lambda: self._writer.folder.remove_snapshot(snapshot_id), f"files of snapshot {snapshot_id}")

    async def run(self) -> None:
        """Writes what is not durable, until cancelled. Storage that fails is tried again, ever more rarely."""
        await self._try(lambda: self._writer.folder.sweep(), "what earlier instances left")
        while True:
            self._work.clear()
            try:
                done = await self._write_next()
            except Unavailable:  # the trainer breaks down
                return
            except Exception as error:  # of the storage's library, whichever it is
                await self._failed(error)
            else:
                async with self._tried:
                    self._tried.notify_all()
                if not done:
                    await self._wait()

    async def _write_next(self) -> bool:
        """Whether there was anything to write now."""
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
            self._ahead_bytes = 0  # only what waited meanwhile has a claim
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
        async with model.turn:
            while own := next((taken for taken in self._snapshots if taken.model_id == model_id), None):
                await self._write_snapshot(own)
            try:
                state = await self._queue.submit(command_queue.KeepState(model_id))
            except NotFound:
                self._models.pop(model_id, None)  # freed meanwhile
                return
        size_bytes = await asyncio.wrap_future(state.written)
        if self._models.get(model_id) is not model:  # freed meanwhile: its files go next
            return
        model.durable, model.kept = state.seq_id, state.change_count
        model.since = began if self._lag_of(model_id) else math.inf
        self._succeeded("state", size_bytes)
        trainer_metrics.DURABLE_SECONDS.observe(time.monotonic() - began)

    async def _write_snapshot(self, taken: _Taken) -> None:
        size_bytes = await asyncio.wrap_future(self._writer.write_snapshot(taken.snapshot_id, self._engine().adapters))
        if not size_bytes:
            logger.warning("snapshot %s left memory before it was durable: it is lost", taken.snapshot_id)
            trainer_metrics.DURABLE_FAILURES.inc()
        if taken in self._snapshots:
            self._unpin(taken)
            self._snapshots.remove(taken)
        self._succeeded("snapshot", size_bytes)

    def _succeeded(self, kind: str, size_bytes: int) -> None:
        if self._failure:
            logger.info("storage of recovery works again")
        self._failure, self._pause_s, self._paused_until = "", 0.0, 0.0
        self._ahead_bytes += size_bytes if kind == "snapshot" else -size_bytes
        trainer_metrics.DURABLE_BYTES.labels(kind).inc(size_bytes)

    async def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._failure = str(error) or type(error).__name__
        self._pause_s = min(max(1.0, 2 * self._pause_s), MOST_PAUSE_S)
        self._paused_until = time.monotonic() + self._pause_s
        trainer_metrics.DURABLE_FAILURES.inc()
        logger.warning("nothing is durable for %.0f s, training goes on: %s", self._pause_s, self._failure)
        for taken in self._snapshots:  # memory may drop them now: storage may fail for long
            self._unpin(taken)
        async with self._tried:
            self._tried.notify_all()
        await self._wait()

    async def _wait(self) -> None:
        """Until there is something new, or the time has come for what was put off."""
        put_off = [model.next_at for model_id, model in self._models.items() if self._lag_of(model_id)]
        if put_off or self._snapshots:
            next_at = max(self._paused_until, min(put_off, default=0.0))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_at - time.monotonic())):
                    await self._work.wait()
        else:
            await self._work.wait()

    def _lag_of(self, model_id: str) -> int:
        """How many changes of a model's weights are in no durable point."""
        return self._writer.changes_of(model_id) - self._models[model_id].kept

    def _lag_seconds(self) -> float:
        return max(
            0.0, time.monotonic() - min((model.since for model in list(self._models.values())), default=math.inf)
        )

    def _is_behind(self, model_id: str) -> bool:
        if any(taken.model_id == model_id for taken in self._snapshots):
            return True
        return model_id in self._models and self._lag_of(model_id) > 0

    def _admit(self, model_id: str, size_bytes: int) -> None:
        """Raises StorageBehind unless a snapshot has room beside those that wait and those of models ahead in line.

        Storage that fails keeps no client waiting: snapshots are not kept for it, see `_failed`.
        """
        now = time.monotonic()
        self._line = {name: place for name, place in self._line.items() if place[1] > now - LINE_S}
        held = self.waiting_bytes + sum(taken.size_bytes for taken in self._taking)
        before = 0
        for name, (its_bytes, _) in self._line.items():
            if name == model_id:
                break
            before += its_bytes
        most = self._engine().adapters.max_bytes
        if held + before and held + before + size_bytes > most and not self._failure:
            self._line[model_id] = (size_bytes, now)
            raise StorageBehind(
                f"recovery's storage is behind: {held / 2**20:.0f} MiB of snapshots wait to be written, of at most "
                f"{most / 2**20:.0f} MiB (--snapshot-memory-mib), and {len(self._line)} models wait to take the next: "
                "this waits until storage has caught up"
            )
        self._line.pop(model_id, None)

    def _unpin(self, taken: _Taken) -> None:
        if taken.pinned:
            taken.pinned = False
            self._engine().adapters.unpin(taken.snapshot_id)

    async def _try(self, action: Callable[[], None], what: str) -> None:
        try:
            await self._in_order(action)
        except Exception as error:  # of the storage's library, whichever it is
            trainer_metrics.DURABLE_FAILURES.inc()
            logger.warning("%s could not be removed: %s", what, error)

    async def _in_order(self, action: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._writer.in_order(action))

    @property
    def _writer(self) -> RecoveryWriter:
        writer = self._engine().recovery
        assert writer is not None
        return writer
