"""The weights that can be sampled from: the resident full parameters, and the adapters on the base model.

The one record of who holds what in this process; the engine's workers keep the tensors, by names that are given here.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from cachetools import LRUCache

from fovea.runtime.tasks import BackgroundTasks, SharedLock, run_to_end
from fovea.wire.errors import AlreadyExists, NotFinite, ResourceExhausted, SnapshotNotLoaded
from fovea_services.sampler import sampler_metrics
from fovea_services.sampler.engine_api import AdapterName, WeightEngine

BASE = ""
"""Snapshot id of the base model."""
_MOST_QUARANTINED = 10_000


@dataclass(eq=False)
class HeldAdapter:
    """One adapter version in the engine."""

    snapshot_id: str
    engine_name: AdapterName
    digest: str
    size_bytes: int
    user_count: int = 0
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def in_use(self) -> Iterator[AdapterName]:
        """Keeps the adapter in the engine."""
        self.user_count += 1
        self.drained.clear()
        try:
            yield self.engine_name
        finally:
            self.user_count -= 1
            if not self.user_count:
                self.drained.set()


class AdapterCache:
    """The held adapters, least recently used first. Knows nothing of the engine: callers tell it what leaves.

    Args:
        max_count: The most adapters.
        max_bytes: The most memory of all of them.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, HeldAdapter] = OrderedDict()
        self._arriving: list[int] = []
        self._numbers = itertools.count(1)

    def snapshot_ids(self) -> list[str]:
        return list(self._held)

    def find(self, snapshot_id: str) -> HeldAdapter | None:
        """The adapter, which is now the one used last, or None."""
        held = self._held.get(snapshot_id)
        if held is not None:
            self._held.move_to_end(snapshot_id)
        return held

    def name_anew(self, snapshot_id: str) -> AdapterName:
        """A name for the engine that was never used."""
        number = next(self._numbers)
        return AdapterName(f"{snapshot_id}#{number}", number)

    def leaving_for(self, size_bytes: int) -> list[HeldAdapter]:
        """The idle adapters, least recently used first, that must leave before one more of this size fits.

        Raises ResourceExhausted if that is not enough: adapters in use never leave, nor do those on their way.
        """
        leaving: list[HeldAdapter] = []
        count = len(self._held) + len(self._arriving)
        used_bytes = sum(held.size_bytes for held in self._held.values()) + sum(self._arriving)
        for held in self._held.values():
            if count < self._max_count and used_bytes + size_bytes <= self._max_bytes:
                break
            if not held.user_count:
                leaving.append(held)
                count, used_bytes = count - 1, used_bytes - held.size_bytes
        if count >= self._max_count or used_bytes + size_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"no room for an adapter of {size_bytes} bytes: {count} adapters of {used_bytes} bytes are in use or "
                f"arriving, the limits are {self._max_count} adapters and {self._max_bytes} bytes"
            )
        return leaving

    @contextmanager
    def room_for(self, size_bytes: int) -> Iterator[list[HeldAdapter]]:
        """Keeps room for one more adapter; gives those that leave for it, which no request can use from now on.

        Raises ResourceExhausted as `leaving_for` does.
        """
        leaving = self.leaving_for(size_bytes)
        for held in leaving:  # all before anybody else runs: an idle one may be asked for the next moment
            self.take_out(held.snapshot_id)
        self._arriving.append(size_bytes)
        try:
            yield leaving
        finally:
            self._arriving.remove(size_bytes)

    def add(self, held: HeldAdapter) -> None:
        """Puts an adapter in, as the one used last."""
        self._held[held.snapshot_id] = held
        sampler_metrics.ADAPTERS.set(len(self._held))

    def take_out(self, snapshot_id: str) -> HeldAdapter | None:
        """Makes an adapter unknown to new requests; those that use it go on."""
        held = self._held.pop(snapshot_id, None)
        sampler_metrics.ADAPTERS.set(len(self._held))
        return held


class WeightStore:
    """Hands weights out to requests, and changes them when no request stands in the way.

    Args:
        engine: Where the weights are.
        adapters: Keeps count of those that `engine` holds.
    """

    def __init__(self, engine: WeightEngine, adapters: AdapterCache) -> None:
        self._engine = engine
        self._adapters = adapters
        self._lock = SharedLock()
        self._resident: str | None = BASE
        self._dropping = BackgroundTasks()
        self._quarantined: LRUCache[str, str] = LRUCache(_MOST_QUARANTINED)

    @property
    def resident_snapshot_id(self) -> str | None:
        """The full weights in place; the empty string is the base model, None is a model left half-loaded."""
        return self._resident

    def adapter_snapshot_ids(self) -> list[str]:
        """Adapters that can be sampled from now. They are deltas on the base model: on other weights, none can."""
        return self._adapters.snapshot_ids() if self._resident == BASE else []

    def holds_adapter(self, snapshot_id: str) -> bool:
        """Whether an adapter is held, which is now the one used last."""
        return self._adapters.find(snapshot_id) is not None

    def check_adapter(self, snapshot_id: str, digest: str, size_bytes: int) -> None:
        """Raises AlreadyExists if an adapter of this id is held with another digest, ResourceExhausted without room."""
        held = self._adapters.find(snapshot_id)
        if held is None:
            self._adapters.leaving_for(size_bytes)
        elif held.digest != digest:
            raise AlreadyExists(f"snapshot {snapshot_id} is held with digest {held.digest}; snapshots never change")

    def require(self, snapshot_id: str) -> HeldAdapter | None:
        """The adapter of a loaded snapshot, None for full weights.

        Raises NotFinite for a quarantined snapshot, SnapshotNotLoaded for any that is not loaded.
        """
        if (reason := self._quarantined.get(snapshot_id)) is not None:
            raise NotFinite(reason, snapshot_id=snapshot_id)
        if snapshot_id == self._resident:
            return None
        held = self._adapters.find(snapshot_id) if self._resident == BASE and snapshot_id != BASE else None
        if held is None:
            raise SnapshotNotLoaded(
                f"snapshot {snapshot_id!r} is not loaded; push it to this sampler first", snapshot_id=snapshot_id
            )
        return held

    def quarantine(self, snapshot_id: str, found: str) -> NotFinite:
        """Refuses a snapshot from now on; returns the error that says so. Snapshots never change, so for good.

        The base model is not refused: a request that it cannot compute must not end its use by all others.

        Args:
            snapshot_id: The snapshot that was sampled from.
            found: What is wrong with its answers.
        """
        if snapshot_id == BASE:
            return NotFinite(f"{found}. The base model cannot compute this request: change its prompt or images")
        reason = (
            f"snapshot {snapshot_id!r} cannot be sampled: {found}, so its weights are too large for the model's "
            "arithmetic. This sampler refuses it from now on. Sample an earlier snapshot; or load an earlier "
            "checkpoint, train on with a lower learning rate or with grad_clip_norm, and save again"
        )
        self._quarantined[snapshot_id] = reason
        return NotFinite(reason, snapshot_id=snapshot_id)

    @asynccontextmanager
    async def use(self, snapshot_id: str) -> AsyncIterator[AdapterName | None]:
        """Holds a snapshot in place while a request samples from it. Raises as `require` does."""
        async with self._lock.shared():
            held = self.require(snapshot_id)
            if held is None:
                yield None
                return
            with held.in_use() as name:
                yield name

    async def hold_adapter(self, task_id: str, snapshot_id: str, digest: str, size_bytes: int, timeout_s: float) -> str:
        """Makes an adapter ready to sample from once it has arrived; returns its digest, and holds no other one.

        Idle adapters leave for it at once, while it arrives. Raises ResourceExhausted if all others are in use,
        Unavailable if it does not arrive.
        """
        with self._adapters.room_for(size_bytes) as leaving:
            await run_to_end(self._forget(leaving))
            name = self._adapters.name_anew(snapshot_id)
            try:
                arrived = await self._engine.keep_adapter(task_id, name, digest, timeout_s)
            except BaseException:
                await run_to_end(self._engine.forget_adapter(name))
                raise
            if arrived == digest:
                if self._adapters.find(snapshot_id) is None:
                    self._adapters.add(HeldAdapter(snapshot_id, name, digest, size_bytes))
                else:  # another group brought the same snapshot meanwhile
                    await run_to_end(self._engine.forget_adapter(name))
        return arrived

    async def load_full(self, task_id: str, snapshot_id: str) -> float:
        """Puts full weights that have arrived into the model; returns the seconds of standstill.

        Waits for the requests in flight. After a failure nothing can be sampled until full weights are pushed again.
        """
        async with self._lock.exclusive():
            return await run_to_end(self._load_full(task_id, snapshot_id))

    async def drop(self, snapshot_id: str) -> None:
        """Forgets an adapter once its requests have ended. Full weights stay until others are pushed."""
        held = self._adapters.take_out(snapshot_id)
        if held is not None:
            # The caller may give up waiting; the engine must still get rid of it.
            await asyncio.shield(self._dropping.start(self._forget([held]), f"dropping {snapshot_id}"))

    async def _load_full(self, task_id: str, snapshot_id: str) -> float:
        self._resident = None
        pause_s = await self._engine.load_full(task_id, snapshot_id)
        self._resident = snapshot_id
        return pause_s

    async def _forget(self, leaving: Sequence[HeldAdapter]) -> None:
        """Frees adapters that new requests can no longer find, each once its requests have ended."""
        await asyncio.gather(*(self._forget_when_drained(held) for held in leaving))

    async def _forget_when_drained(self, held: HeldAdapter) -> None:
        if held.user_count:
            await held.drained.wait()
        await self._engine.forget_adapter(held.engine_name)
