"""The weights that requests can sample from: the resident full parameters, and the adapters on the base model.

This is the only record in this process of loaded snapshots and of the requests that use them. The engine's workers hold
the tensors, under the names that this module assigns.
"""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from cachetools import LRUCache

from fovea.api.v1 import weights_pb2
from fovea.runtime.tasks import BackgroundTasks, Members, SharedLock, run_to_end
from fovea.wire.errors import AlreadyExists, NotFinite, ResourceExhausted, SnapshotNotLoaded
from fovea_sampler import sampler_metrics
from fovea_sampler.engine_api import AdapterName, WeightEngine, slot_widths

BASE = ""
"""The snapshot id of the base model."""
_MOST_QUARANTINED = 10_000
OnLost = Callable[[Exception], None]
"""Ends a request that cannot continue, with the error."""


@dataclass(eq=False)
class HeldAdapter:
    """One adapter version that the engine holds, and its name for each request that uses it."""

    snapshot_id: str
    engine_name: AdapterName
    digest: str
    size_bytes: int
    rank: int
    users: Members[AdapterName] = field(default_factory=Members)


class AdapterCache:
    """The record of held adapters, in the order of their last use.

    It does not call the engine: its callers free the adapters that it selects for eviction.

    Args:
        max_count: The most adapters.
        max_bytes: The most bytes of all adapters together.
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
        """Returns the adapter and marks it as the most recently used one, or returns None."""
        held = self._held.get(snapshot_id)
        if held is not None:
            self._held.move_to_end(snapshot_id)
        return held

    def new_name(self, snapshot_id: str) -> AdapterName:
        """Returns a name for the engine that has never been used before."""
        number = next(self._numbers)
        return AdapterName(f"{snapshot_id}#{number}", number)

    def evictions_for(self, size_bytes: int) -> list[HeldAdapter]:
        """Returns the idle adapters to evict, least recently used first, to make room for one of `size_bytes`.

        Raises ResourceExhausted if evicting all idle ones is not enough. Adapters in use and adapters that are still
        arriving are never evicted.
        """
        evicted: list[HeldAdapter] = []
        count = len(self._held) + len(self._arriving)
        used_bytes = sum(held.size_bytes for held in self._held.values()) + sum(self._arriving)
        for held in self._held.values():
            if count < self._max_count and used_bytes + size_bytes <= self._max_bytes:
                break
            if not held.users:
                evicted.append(held)
                count, used_bytes = count - 1, used_bytes - held.size_bytes
        if count >= self._max_count or used_bytes + size_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"no room for an adapter of {size_bytes} bytes: {count} adapters of {used_bytes} bytes are in use or "
                f"arriving, the limits are {self._max_count} adapters and {self._max_bytes} bytes"
            )
        return evicted

    @contextmanager
    def room_for(self, size_bytes: int) -> Iterator[list[HeldAdapter]]:
        """Reserves room for one more adapter and yields the evicted adapters, which new requests can no longer use.

        Raises ResourceExhausted as `evictions_for` does.
        """
        evicted = self.evictions_for(size_bytes)
        for held in evicted:  # no await in between, or another task could begin to use an idle adapter
            self.remove(held.snapshot_id)
        self._arriving.append(size_bytes)
        try:
            yield evicted
        finally:
            self._arriving.remove(size_bytes)

    def add(self, held: HeldAdapter) -> None:
        """Adds an adapter as the most recently used one."""
        self._held[held.snapshot_id] = held
        sampler_metrics.ADAPTERS.set(len(self._held))

    def remove(self, snapshot_id: str) -> HeldAdapter | None:
        """Hides an adapter from new requests. Requests that already use it continue."""
        held = self._held.pop(snapshot_id, None)
        sampler_metrics.ADAPTERS.set(len(self._held))
        return held


class SlotQueue:
    """The order in which adapters get one of the engine's slots.

    Requests of one adapter share its slot. A request of an adapter without a slot waits until enough others are idle.
    While it waits, requests of adapters with a slot may pass it, but only `most_passing` of them, so that no adapter
    starves. When an adapter gets its slot, all requests that wait for it begin together.

    Args:
        slot_count: The most adapters with a slot.
        slot_ranks: The ranks of a slot; an adapter of a smaller rank takes only the next of `slot_widths`.
        total_ranks: The ranks of all slots together.
        most_passing: The most requests that pass the request which waits longest.
    """

    def __init__(self, slot_count: int, slot_ranks: int, total_ranks: int, most_passing: int) -> None:
        self._slot_count = slot_count
        self._widths = slot_widths(slot_ranks)
        self._free_ranks = total_ranks
        self._most_passing = most_passing
        self._passed = 0
        self._users: dict[AdapterName, int] = {}
        self._waiting: OrderedDict[AdapterName, tuple[int, list[asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def slot_for(self, name: AdapterName, rank: int) -> AsyncIterator[None]:
        """Waits for a slot of an adapter, and keeps it for the duration of the block."""
        width = next(width for width in self._widths if width >= rank)
        if not self._try_enter(name, width):
            await self._wait(name, width)
        try:
            yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._free_ranks += width
                self._admit()

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(len(entered) for _, entered in self._waiting.values())

    def _try_enter(self, name: AdapterName, width: int) -> bool:
        if name in self._users:
            self._passed += bool(self._waiting)
            if self._passed > self._most_passing:
                return False
            self._users[name] += 1
            return True
        if self._waiting or not self._has_room(width):
            return False
        self._give(name, width, 1)
        return True

    def _has_room(self, width: int) -> bool:
        return len(self._users) < self._slot_count and width <= self._free_ranks

    def _give(self, name: AdapterName, width: int, count: int) -> None:
        if name not in self._users:
            self._free_ranks -= width
        self._users[name] = self._users.get(name, 0) + count

    async def _wait(self, name: AdapterName, width: int) -> None:
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, (width, []))[1].append(entered)
        begun = time.monotonic()
        sampler_metrics.WAITING_FOR_SLOT.inc()
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled():  # the slot was given in the same turn of the event loop
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name]
                    self._free_ranks += width
            elif name in self._waiting:
                self._waiting[name][1].remove(entered)
                if not self._waiting[name][1]:
                    del self._waiting[name]
            self._admit()
            raise
        finally:
            sampler_metrics.WAITING_FOR_SLOT.dec()
            sampler_metrics.SLOT_WAIT_SECONDS.observe(time.monotonic() - begun)

    def _admit(self) -> None:
        """Gives slots to the adapters that have waited longest, as long as there is room."""
        while self._waiting:
            name, (width, entered) = next(iter(self._waiting.items()))
            if name not in self._users and not self._has_room(width):
                return
            del self._waiting[name]
            self._passed = 0
            self._give(name, width, len(entered))
            for one in entered:
                one.set_result(None)


class WeightStore:
    """The weights of the engine. They stay loaded while requests use them, and change only afterwards.

    Full weights may change under the requests that follow their model, if the new ones are of the same model.

    Args:
        engine: The engine that holds the tensors.
        adapters: The record of the adapters that `engine` holds.
        slots: The order in which adapters get slots of the engine.
    """

    def __init__(self, engine: WeightEngine, adapters: AdapterCache, slots: SlotQueue) -> None:
        self._engine = engine
        self._adapters = adapters
        self._slots = slots
        self._lock = SharedLock()
        self._resident: str | None = BASE
        self._resident_model = ""
        self._followers: Members[OnLost] = Members()
        self._dropping = BackgroundTasks()
        self._quarantined: LRUCache[str, str] = LRUCache(_MOST_QUARANTINED)

    @property
    def resident_snapshot_id(self) -> str | None:
        """The snapshot id of the full weights: empty for the base model, None after a load that failed half-way."""
        return self._resident

    @property
    def waiting_for_slot(self) -> int:
        """The number of requests that wait for a slot."""
        return self._slots.waiting

    def adapter_snapshot_ids(self) -> list[str]:
        """Returns the adapters that can be sampled from now.

        Adapters are deltas on the base model. While other full weights are loaded, none can be sampled from.
        """
        return self._adapters.snapshot_ids() if self._resident == BASE else []

    def holds_adapter(self, snapshot_id: str) -> bool:
        """Returns True if the adapter is held, and marks it as the most recently used one."""
        return self._adapters.find(snapshot_id) is not None

    def check_adapter(self, snapshot_id: str, digest: str, size_bytes: int) -> None:
        """Raises AlreadyExists if an adapter of this id is held with another digest, ResourceExhausted without room."""
        held = self._adapters.find(snapshot_id)
        if held is None:
            self._adapters.evictions_for(size_bytes)
        elif held.digest != digest:
            raise AlreadyExists(f"snapshot {snapshot_id} is held with digest {held.digest}; snapshots never change")

    def require(self, snapshot_id: str) -> HeldAdapter | None:
        """Returns the adapter of a loaded snapshot, or None if the snapshot is the resident full weights.

        Raises NotFinite for a quarantined snapshot, SnapshotNotLoaded for one that is not loaded.
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
        """Refuses a snapshot permanently, since snapshots never change, and returns the error to raise.

        The base model is not refused: one request that it cannot compute must not stop all other requests to it.

        Args:
            snapshot_id: The snapshot that was sampled from.
            found: A clause that states what is wrong with its results.
        """
        if snapshot_id == BASE:
            return NotFinite(f"{found}. The base model cannot compute this request: change its prompt or images")
        reason = (
            f"snapshot {snapshot_id!r} cannot be sampled: {found}, so its weights are too large for the model's "
            "arithmetic. This sampler refuses it from now on. Sample an earlier snapshot; or load an earlier "
            "checkpoint, continue training with a lower learning rate or with grad_clip_norm, and save again"
        )
        self._quarantined[snapshot_id] = reason
        return NotFinite(reason, snapshot_id=snapshot_id)

    @asynccontextmanager
    async def use(self, snapshot_id: str, on_lost: OnLost | None = None) -> AsyncIterator[AdapterName | None]:
        """Keeps a snapshot loaded while a request samples from it. Raises as `require` does.

        Args:
            snapshot_id: The snapshot.
            on_lost: Given if the request follows the model of its full weights: newer ones may replace them meanwhile.
                It is called, with the error, if loading those fails.
        """
        with ExitStack() as following:
            async with self._lock.shared():
                held = self.require(snapshot_id)
                follower = on_lost if held is None and self._resident_model else None
                if follower is not None:
                    following.enter_context(self._followers.joined(follower))
                elif held is None:
                    yield None
                else:
                    with held.users.joined(held.engine_name) as name:
                        async with self._slots.slot_for(name, held.rank):
                            yield name
            if follower is not None:
                yield None

    async def hold_adapter(
        self, task_id: str, snapshot: weights_pb2.Snapshot, rank: int, size_bytes: int, timeout_s: float
    ) -> str:
        """Waits for an adapter and makes it ready to sample from if its digest is `snapshot`'s; returns its digest.

        Idle adapters are evicted at once, while the new one is still arriving. Raises ResourceExhausted if evicting
        them does not make enough room, Unavailable if the adapter does not arrive.
        """
        with self._adapters.room_for(size_bytes) as evicted:
            await run_to_end(self._forget(evicted))
            snapshot_id, digest = snapshot.snapshot_id, snapshot.digest
            name = self._adapters.new_name(snapshot_id)
            try:
                arrived = await self._engine.store_adapter(task_id, name, digest, timeout_s)
            except BaseException:
                await run_to_end(self._engine.forget_adapter(name))
                raise
            if arrived == digest:
                if self._adapters.find(snapshot_id) is None:
                    self._adapters.add(HeldAdapter(snapshot_id, name, digest, size_bytes, rank))
                else:  # the same snapshot arrived over another group meanwhile
                    await run_to_end(self._engine.forget_adapter(name))
        return arrived

    async def load_full(self, task_id: str, snapshot: weights_pb2.Snapshot) -> float:
        """Loads received full weights into the model; returns the duration of the pause in generation, in seconds.

        Waits for the requests in flight, except those that follow the snapshot's model. After a failure nothing can be
        sampled until full weights are pushed again, and the requests that follow the model end.
        """
        async with self._lock.exclusive():
            if not snapshot.model_id or snapshot.model_id != self._resident_model:
                await self._followers.wait_empty()
            return await run_to_end(self._load_full(task_id, snapshot))

    async def drop(self, snapshot_id: str) -> None:
        """Frees an adapter once its requests have ended. Full weights stay until others are pushed."""
        held = self._adapters.remove(snapshot_id)
        if held is not None:
            # The caller may stop waiting; the engine must still free the adapter.
            await asyncio.shield(self._dropping.start(self._forget([held]), f"dropping {snapshot_id}"))

    async def _load_full(self, task_id: str, snapshot: weights_pb2.Snapshot) -> float:
        before, self._resident, self._resident_model = self._resident, None, ""
        try:
            pause_s = await self._engine.load_full(task_id, snapshot.snapshot_id)
        except BaseException as error:
            message = f"loading snapshot {snapshot.snapshot_id!r} failed while the request sampled: {error}"
            for on_lost in self._followers:
                on_lost(SnapshotNotLoaded(message, snapshot_id=before or BASE))
            raise
        self._resident = snapshot.snapshot_id
        self._resident_model = snapshot.model_id if self._resident != BASE else ""
        return pause_s

    async def _forget(self, evicted: Sequence[HeldAdapter]) -> None:
        """Frees adapters that new requests can no longer find, each once its requests have ended."""
        await asyncio.gather(*(self._forget_when_drained(held) for held in evicted))

    async def _forget_when_drained(self, held: HeldAdapter) -> None:
        await held.users.wait_empty()
        await self._engine.forget_adapter(held.engine_name)
