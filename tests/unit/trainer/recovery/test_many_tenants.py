"""Durable points of many models: the real keeper on a simulated disk of the documented speed, in virtual time."""

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.simulation.event_loop import VirtualLoop
from fovea.wire.errors import StorageBehind
from fovea_trainer.command_queue import KeepState
from fovea_trainer.recovery.recovery_keeper import RecoveryKeeper
from fovea_trainer.recovery.recovery_writer import PendingState
from fovea_trainer.settings import TrainerSettings

MB, MIB = 1_000_000, 2**20
STATE_BYTES = 793 * MB  # for an adapter of rank 32 on 4 billion parameters: docs/lab/robustness.md
SNAPSHOT_BYTES = STATE_BYTES // 6  # in 16 bits, without moments
DISK_BYTES_PER_S = 500 * MB
RETRY_S = 0.5  # as the gateway does
SLOTS = 16  # commands that the gateway lets wait at a trainer (`TRAINER_SLOTS`)


class Loop(VirtualLoop):
    """An event loop that accepts results from other threads."""

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        return self.call_soon(*arguments, **options)


@dataclass
class Disk:
    """Writes one item at a time. Durable data: the changes in each point and in each snapshot."""

    points: dict[str, int] = field(default_factory=dict)
    snapshots: dict[str, int] = field(default_factory=dict)
    point_counts: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    free_at: float = 0.0
    fails: bool = False

    def write(self, size_bytes: int, effect: Callable[[], Any], result: int | None = 1) -> "Future[Any]":
        loop, done = asyncio.get_running_loop(), Future[Any]()

        def finish() -> None:
            if self.fails:
                return done.set_exception(OSError("the disk is gone"))
            effect()
            done.set_result(result)

        self.free_at = max(self.free_at, loop.time()) + 0.005 + size_bytes / DISK_BYTES_PER_S
        loop.call_at(self.free_at, finish)
        return done


class Trainer:
    """Replaces the ranks: counts changes and writes to a simulated disk. The keeper is the real one."""

    def __init__(self, clock: Callable[[], float], most_bytes: int) -> None:
        self.disk = Disk()
        self.card, self.slots = asyncio.Lock(), asyncio.Semaphore(SLOTS)
        self.changes: Counter[str] = Counter()
        self.made: defaultdict[str, dict[str, int]] = defaultdict(dict)  # by model: the changes in each snapshot
        self.pins: Counter[str] = Counter()
        self.folder = SimpleNamespace()
        self.adapters = SimpleNamespace(max_bytes=most_bytes, pin=self._pin, unpin=self._unpin)
        settings = TrainerSettings(model="base")
        self.keeper = RecoveryKeeper(settings, self, lambda: self, clock)  # type: ignore[arg-type, return-value]
        self.reasons: Counter[str] = Counter()
        self.held: deque[str] = deque(maxlen=most_bytes // SNAPSHOT_BYTES)  # the memory's capacity without pins
        self.lost: set[str] = set()

    def _pin(self, snapshot_id: str) -> None:
        self.pins[snapshot_id] += 1

    def _unpin(self, snapshot_id: str) -> None:
        self.pins[snapshot_id] -= 1

    def changes_of(self, model_id: str) -> int:
        return self.changes[model_id]

    def in_order(self, action: Callable[[], Any]) -> "Future[Any]":
        return self.disk.write(0, action)

    async def submit(self, command: KeepState) -> PendingState | None:
        async with self.card:  # a copy waits for the commands before it
            pass
        model_id, count = command.model_id, self.changes[command.model_id]
        if command.change_count not in (None, count):
            return None

        def effect() -> None:
            self.disk.points[model_id] = count
            self.disk.point_counts[model_id] += 1
            self.disk.order.append(model_id)
            self.check()

        return PendingState(count, count, STATE_BYTES, self.disk.write(STATE_BYTES, effect))

    def write_snapshot(self, snapshot_id: str, point: int | None) -> "Future[Any]":
        model_id = snapshot_id.partition("@")[0]
        count = self.made[model_id][snapshot_id]
        if not self.pins[snapshot_id] and snapshot_id not in self.held:
            self.lost.add(snapshot_id)
            return self.disk.write(0, lambda: None, None)
        assert point in (None, count)
        assert point is None or self.disk.points[model_id] == count
        size_bytes = SNAPSHOT_BYTES if point is None else 1000
        return self.disk.write(size_bytes, lambda: self.disk.snapshots.update({snapshot_id: count}))

    def check(self) -> None:
        """Checks that a kill now would lose nothing: snapshots older than the point are durable, and the journal
        repeats the rest.
        """
        for model_id, made in self.made.items():
            for snapshot_id, count in made.items():
                if count < self.disk.points.get(model_id, 0) and snapshot_id not in self.lost:
                    assert snapshot_id in self.disk.snapshots, f"{snapshot_id} would be lost"

    async def patiently(self, surround: Callable[[], Any], action: Callable[[], Any]) -> None:
        """Runs an action in a context of the keeper; retries as the gateway does."""
        while True:
            try:
                async with surround():
                    action()
                return
            except StorageBehind as behind:
                self.reasons["snapshot" if "snapshot-memory-mib" in behind.message else "step"] += 1
                await asyncio.sleep(RETRY_S)

    async def tenant(self, model_id: str, card: asyncio.Lock, step_s: float, chance: random.Random) -> None:
        """Takes steps forever, with a snapshot after each, from which it samples for some seconds."""
        await asyncio.sleep(chance.random())
        while True:
            async with card:
                await asyncio.sleep(step_s)
            await self.patiently(
                lambda: self.keeper.changing(model_id, STATE_BYTES), lambda: self.changes.update([model_id])
            )
            await self.take(model_id, self.changes[model_id])
            await asyncio.sleep(5 * chance.random())

    async def eager_tenant(self, model_id: str, step_s: float) -> None:
        """Takes steps forever. Each is admitted before it waits for the card, so most are admitted before a copy of the
        state that waits there too.
        """
        while True:
            try:
                async with self.slots, self.keeper.changing(model_id, STATE_BYTES):
                    async with self.card:
                        await asyncio.sleep(step_s)
                    self.changes.update([model_id])
            except StorageBehind:
                await asyncio.sleep(RETRY_S)

    def freeze(self, model_id: str, snapshot_id: str, count: int) -> None:
        self.made[model_id][snapshot_id] = count
        self.held.append(snapshot_id)

    async def take(self, model_id: str, count: int) -> None:
        """Takes a snapshot of the newest weights."""
        snapshot_id = f"{model_id}@{count}"
        await self.patiently(
            lambda: self.keeper.snapshotting(model_id, snapshot_id, SNAPSHOT_BYTES),
            lambda: self.freeze(model_id, snapshot_id, count),
        )


@dataclass
class Found:
    """The largest values of a run."""

    lag_s: float = 0.0
    waiting_bytes: int = 0


async def _run(trainer: Trainer, tenants: int, seconds: float, step_s: float) -> Found:
    found, chance, card = Found(), random.Random(7), asyncio.Lock()
    tasks = [asyncio.create_task(trainer.keeper.run())]
    tasks += [asyncio.create_task(trainer.tenant(f"m{i}", card, step_s, chance)) for i in range(tenants)]
    loop = asyncio.get_running_loop()
    while loop.time() < seconds:
        await asyncio.sleep(0.5)
        found.lag_s = max(found.lag_s, trainer.keeper.lag_seconds)
        found.waiting_bytes = max(found.waiting_bytes, trainer.keeper.waiting_bytes)
        assert sum(trainer.pins.values()) * SNAPSHOT_BYTES == trainer.keeper.waiting_bytes
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return found


@pytest.mark.parametrize("tenants", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_the_lag_and_the_memory_stay_within_their_bounds_on_a_disk_that_is_too_slow(tenants: int) -> None:
    loop = Loop(lambda: 0.0)
    trainer = Trainer(loop.time, 4096 * MIB)
    found = loop.run(_run(trainer, tenants, 600.0, 0.05))
    points, steps = trainer.disk.point_counts, trainer.changes
    print(
        f"{tenants} tenants, 600 s: lag at most {found.lag_s:.1f} s, {found.waiting_bytes / MIB:.0f} MiB pinned, "
        f"{sum(steps.values())} steps ({min(steps.values())} to {max(steps.values())} a tenant), "
        f"{sum(points.values())} points ({min(points.values())} to {max(points.values())}), "
        f"{len(trainer.disk.snapshots)} snapshots, refusals {dict(trainer.reasons)}"
    )
    assert not trainer.lost
    assert found.lag_s <= 60.0
    assert found.waiting_bytes <= 4096 * MIB
    assert len(points) == tenants, "every model must have a point"
    assert max(points.values()) <= min(points.values()) + 2, "models must take turns"
    first = {model_id: trainer.disk.order.index(model_id) for model_id in points}
    assert max(first.values()) < tenants + 1, "no model may wait for its first point while others write a second"
    assert not loop.complaints


@pytest.mark.slow
def test_models_whose_next_step_comes_before_each_copy_share_a_slow_disk_evenly() -> None:
    """A step that arrives while a copy of the state waits must not exempt its model from the line."""
    loop = Loop(lambda: 0.0)
    trainer = Trainer(loop.time, 4096 * MIB)

    async def run(seconds: float) -> float:
        lag_s = 0.0
        tasks = [asyncio.create_task(trainer.keeper.run())]
        tasks += [asyncio.create_task(trainer.eager_tenant(f"m{i}", 0.1)) for i in range(64)]
        while loop.time() < seconds:
            await asyncio.sleep(0.5)
            lag_s = max(lag_s, trainer.keeper.lag_seconds)
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return lag_s

    lag_s, steps = loop.run(run(900.0)), trainer.changes
    print(f"{sum(steps.values())} steps, {min(steps.values())} to {max(steps.values())} a tenant, lag {lag_s:.1f} s")
    assert len(steps) == 64
    assert max(steps.values()) <= 1.25 * min(steps.values()), "models must share the device evenly"
    assert sum(steps.values()) > 0.9 * 9000, "the device must not idle while storage is behind"
    assert lag_s <= 60.0
    assert not loop.complaints


@pytest.mark.slow
def test_new_models_without_end_do_not_hold_up_the_others() -> None:
    """Models without a point precede others in the queue, but only for a while."""
    loop = Loop(lambda: 0.0)
    trainer = Trainer(loop.time, 4096 * MIB)

    async def make_models(number: int) -> None:
        for count in range(1000):
            model_id = f"new{number}-{count}"
            await trainer.patiently(
                partial(trainer.keeper.changing, model_id, STATE_BYTES), partial(trainer.changes.update, [model_id])
            )
            await asyncio.sleep(5.0)

    async def flood() -> int:
        makers = [asyncio.create_task(make_models(number)) for number in range(40)]
        running = asyncio.create_task(_run(trainer, 4, 300.0, 0.05))
        await asyncio.sleep(150.0)
        before = dict(trainer.changes)
        await running
        for maker in makers:
            maker.cancel()
        return min(trainer.changes[f"m{number}"] - before[f"m{number}"] for number in range(4))

    assert loop.run(flood()) > 0


@pytest.mark.slow
def test_storage_that_fails_for_a_while_stops_no_one_and_catches_up() -> None:
    loop = Loop(lambda: 0.0)
    trainer = Trainer(loop.time, 4096 * MIB)
    loop.call_at(100.0, setattr, trainer.disk, "fails", True)
    loop.call_at(200.0, setattr, trainer.disk, "fails", False)
    steps: list[int] = []
    for at in (110.0, 190.0):
        loop.call_at(at, lambda: steps.append(sum(trainer.changes.values())))
    lags: list[float] = []
    loop.call_at(500.0, lambda: lags.append(trainer.keeper.lag_seconds))
    loop.run(_run(trainer, 64, 500.5, 0.05))
    print(f"steps while storage failed: {steps[1] - steps[0]}; lag 300 s later {lags[0]:.0f} s")
    assert steps[1] - steps[0] > 200, "all continue"
    assert lags[0] <= 60.0
    assert not loop.complaints
