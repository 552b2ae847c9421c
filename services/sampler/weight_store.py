"""The weights that can be sampled from now: the resident full set, and the adapters on the base model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fovea.wire.errors import SnapshotNotLoaded
from services.sampler.adapters import AdapterShelf, HeldAdapter
from services.sampler.engine_api import AdapterName
from services.sampler.gate import WeightGate
from services.sampler.ports import WeightEngine
from services.sampler.settled import settled

BASE = ""


class Snapshots:
    """Hands weights out to requests, and changes them when no request stands in the way."""

    def __init__(self, engine: WeightEngine, shelf: AdapterShelf) -> None:
        self._engine = engine
        self.shelf = shelf
        self.gate = WeightGate()
        self._resident: str | None = BASE

    @property
    def resident_snapshot_id(self) -> str | None:
        """The full weights in place; the empty string is the base model, None is a model left half-loaded."""
        return self._resident

    def adapter_snapshot_ids(self) -> list[str]:
        """Adapters that can be sampled from now. They are deltas on the base model: on other weights, none can."""
        return self.shelf.snapshot_ids() if self._resident == BASE else []

    def require(self, snapshot_id: str) -> HeldAdapter | None:
        """The adapter of a loaded snapshot, None for full weights. Raises SnapshotNotLoaded for any other."""
        if snapshot_id == self._resident:
            return None
        held = self.shelf.find(snapshot_id) if self._resident == BASE and snapshot_id != BASE else None
        if held is None:
            raise SnapshotNotLoaded(
                f"snapshot {snapshot_id!r} is not loaded; push it to this sampler first", snapshot_id=snapshot_id
            )
        return held

    @asynccontextmanager
    async def use(self, snapshot_id: str) -> AsyncIterator[AdapterName | None]:
        """Holds a snapshot in place while a request samples from it. Raises SnapshotNotLoaded."""
        async with self.gate.reading():
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
        with self.shelf.room_for(size_bytes) as leaving:
            await settled(self._forget(leaving))
            name = self.shelf.name_anew(snapshot_id)
            try:
                arrived = await self._engine.keep_adapter(task_id, name, digest, timeout_s)
            except BaseException:
                await settled(self._engine.forget_adapter(name))
                raise
            if arrived == digest:
                if self.shelf.find(snapshot_id) is None:
                    self.shelf.add(HeldAdapter(snapshot_id, name, digest, size_bytes))
                else:  # another group brought the same snapshot meanwhile
                    await settled(self._engine.forget_adapter(name))
        return arrived

    async def load_full(self, task_id: str, snapshot_id: str) -> float:
        """Puts full weights that have arrived into the model; returns the seconds of standstill.

        Waits for the requests in flight. After a failure nothing can be sampled until full weights are pushed again.
        """
        async with self.gate.writing():
            return await settled(self._load_full(task_id, snapshot_id))

    async def drop(self, snapshot_id: str) -> None:
        """Forgets an adapter once its requests have ended. Full weights stay until others are pushed."""
        held = self.shelf.take_out(snapshot_id)
        if held is not None:
            # The caller may give up waiting; the engine must still get rid of it.
            await asyncio.shield(asyncio.create_task(self._forget([held])))

    async def _load_full(self, task_id: str, snapshot_id: str) -> float:
        self._resident = None
        pause_s = await self._engine.load_full(task_id, snapshot_id)
        self._resident = snapshot_id
        return pause_s

    async def _forget(self, leaving: Sequence[HeldAdapter]) -> None:
        """Frees adapters that are off the shelf, each once its requests have ended."""
        await asyncio.gather(*(self._forget_when_drained(held) for held in leaving))

    async def _forget_when_drained(self, held: HeldAdapter) -> None:
        if held.user_count:
            await held.drained.wait()
        await self._engine.forget_adapter(held.engine_name)
