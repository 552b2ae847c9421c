"""Access of requests to weights over time."""

import asyncio
import itertools
from contextlib import suppress

import pytest

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.runtime.tasks import SharedLock
from fovea.wire.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    FoveaError,
    Internal,
    InvalidInput,
    NotFinite,
    ResourceExhausted,
    SnapshotNotLoaded,
    Unavailable,
)
from fovea_sampler import sampler_metrics
from fovea_sampler.engine_api import AdapterName
from fovea_sampler.pushes import Loaded, Ready, SnapshotPushes
from fovea_sampler.weight_store import AdapterCache, HeldAdapter, SlotQueue, WeightStore
from tests.unit.sampler.memory_engine import MemoryEngine, eventually

FULL, ADAPTER = weights_pb2.SNAPSHOT_KIND_FULL, weights_pb2.SNAPSHOT_KIND_ADAPTER
SIZE_BYTES = 40


class Sampler:
    """The components around one engine."""

    def __init__(self, max_count: int = 2, max_bytes: int = 1000, slots: SlotQueue | None = None) -> None:
        self.engine = MemoryEngine()
        self.weights = WeightStore(self.engine, AdapterCache(max_count, max_bytes), slots or SlotQueue(8, 64, 512, 64))
        self.pushes = SnapshotPushes(self.engine, self.weights)

    async def push(
        self,
        snapshot_id: str,
        kind: int = ADAPTER,
        digest: str = "d",
        timeout_s: float = 5,
        group: str = "g",
        size_bytes: int = SIZE_BYTES,
        model_id: str = "",
    ) -> list[Ready | Loaded]:
        """Joins a group and receives."""
        await self.pushes.join(meeting(group))
        announced = manifest(snapshot_id, kind, digest, size_bytes)
        announced.snapshot.model_id = model_id
        return [phase async for phase in self.pushes.receive(group, announced, timeout_s)]


def meeting(group: str, port: int = 5) -> sampler_pb2.JoinTransferGroupRequest:
    """Returns a group of a trainer and this sampler."""
    return sampler_pb2.JoinTransferGroupRequest(
        group_id=group, master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, timeout_s=5
    )


def manifest(
    snapshot_id: str, kind: int = ADAPTER, digest: str = "d", size_bytes: int = SIZE_BYTES
) -> weights_pb2.SnapshotManifest:
    """Returns a manifest of one tensor."""
    result = weights_pb2.SnapshotManifest(bucket_bytes=100)
    result.snapshot.CopyFrom(weights_pb2.Snapshot(snapshot_id=snapshot_id, digest=digest, kind=kind))
    result.tensors.add(name="t", dtype="float32", shape=[size_bytes // 4])
    return result


def held(snapshot_id: str, number: int, size_bytes: int = SIZE_BYTES) -> HeldAdapter:
    """Returns an adapter on a cache."""
    return HeldAdapter(snapshot_id, AdapterName(snapshot_id, number), "d", size_bytes, 8)


async def test_an_adapter_comes_and_can_be_used() -> None:
    sampler = Sampler()
    phases = await sampler.push("a@1", digest="abc")
    assert phases == [Ready(), Loaded("abc", 0.0)]
    async with sampler.weights.use("a@1") as name:
        assert name is not None
        assert sampler.engine.adapters == {name.name: "abc"}
    async with sampler.weights.use("") as name:
        assert name is None
    assert not sampler.engine.tasks


@pytest.mark.parametrize("snapshot_id", ["a@2", "a", "A@1", " "])
async def test_unknown_snapshots(snapshot_id: str) -> None:
    sampler = Sampler()
    await sampler.push("a@1")
    with pytest.raises(SnapshotNotLoaded, match="push it"):
        sampler.weights.require(snapshot_id)


async def test_the_least_recently_used_idle_adapter_leaves() -> None:
    sampler = Sampler(max_count=2)
    await sampler.push("a@1")
    await sampler.push("b@1")
    sampler.weights.require("a@1")
    await sampler.push("c@1")
    assert sampler.weights.adapter_snapshot_ids() == ["a@1", "c@1"]
    assert sorted(sampler.engine.adapters) == ["a@1#1", "c@1#3"]


async def test_adapters_in_use_never_leave() -> None:
    sampler = Sampler(max_count=2)
    await sampler.push("a@1")
    await sampler.push("b@1")
    async with sampler.weights.use("a@1"), sampler.weights.use("b@1"):
        with pytest.raises(ResourceExhausted, match="in use"):
            await sampler.push("c@1")
    await sampler.push("c@1")
    assert sampler.weights.adapter_snapshot_ids() == ["b@1", "c@1"]


async def test_a_request_never_loses_the_adapter_that_it_has_begun_with() -> None:
    """Making room for one large adapter evicts several; once the first is gone, requests ask for the others."""
    sampler = Sampler(max_count=4, max_bytes=4 * SIZE_BYTES)
    names = [f"{letter}@1" for letter in "abcd"]
    for name in names:
        await sampler.push(name)
    pushing = asyncio.create_task(sampler.push("large@1", size_bytes=4 * SIZE_BYTES))
    await eventually(lambda: sampler.weights.adapter_snapshot_ids() != names)

    async def use(snapshot_id: str) -> str:
        try:
            async with sampler.weights.use(snapshot_id) as name:
                assert name is not None
                for _ in range(20):
                    assert name.name in sampler.engine.adapters, f"{name.name} was freed under a request"
                    await asyncio.sleep(0)
        except SnapshotNotLoaded:
            return "refused"
        return "used"

    assert await asyncio.gather(*map(use, names)) == ["refused"] * 4
    await pushing
    assert sampler.weights.adapter_snapshot_ids() == ["large@1"]
    assert [*sampler.engine.adapters] == ["large@1#5"]


async def test_adapters_that_arrive_together_do_not_share_their_room() -> None:
    sampler = Sampler(max_count=2)
    await sampler.push("a@1")
    sampler.engine.arrived.clear()
    pushing = [asyncio.create_task(sampler.push(f"{name}@1", group=name)) for name in "bc"]
    await eventually(lambda: len(sampler.engine.tasks) == 2 and not sampler.engine.adapters)
    with pytest.raises(ResourceExhausted, match="arriving"):
        await sampler.push("d@1", group="d")
    sampler.engine.arrived.set()
    await asyncio.gather(*pushing)
    assert sorted(sampler.weights.adapter_snapshot_ids()) == ["b@1", "c@1"]


async def test_a_push_that_is_given_up_still_frees_what_left_for_it() -> None:
    sampler = Sampler(max_count=4, max_bytes=4 * SIZE_BYTES)
    for letter in "abcd":
        await sampler.push(f"{letter}@1")
    pushing = asyncio.create_task(sampler.push("large@1", size_bytes=4 * SIZE_BYTES))
    await eventually(lambda: not sampler.weights.adapter_snapshot_ids())
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert not sampler.engine.adapters
    await sampler.push("large@1", size_bytes=4 * SIZE_BYTES)


def test_room_is_counted_in_bytes_too() -> None:
    cache = AdapterCache(max_count=10, max_bytes=100)
    for number in range(2):
        cache.add(held(f"{number}", number))
    assert [adapter.snapshot_id for adapter in cache.evictions_for(20)] == []
    assert [adapter.snapshot_id for adapter in cache.evictions_for(30)] == ["0"]
    assert [adapter.snapshot_id for adapter in cache.evictions_for(100)] == ["0", "1"]
    with pytest.raises(ResourceExhausted, match="101 bytes"):
        cache.evictions_for(101)
    assert cache.snapshot_ids() == ["0", "1"]


def test_names_are_never_used_twice() -> None:
    cache = AdapterCache(2, 100)
    names = [cache.new_name("a@1") for _ in range(3)]
    assert len({name.name for name in names}) == len({name.lora_id for name in names}) == 3
    assert all(name.lora_id > 0 for name in names)


async def test_dropping_waits_until_no_request_uses_it() -> None:
    sampler = Sampler()
    await sampler.push("a@1")
    async with sampler.weights.use("a@1") as name:
        assert name is not None
        dropping = asyncio.create_task(sampler.weights.drop("a@1"))
        await asyncio.sleep(0.01)
        assert name.name in sampler.engine.adapters
        with pytest.raises(SnapshotNotLoaded):
            sampler.weights.require("a@1")
        # Pushed again while the old one drains: a new version beside it.
        await sampler.push("a@1")
        assert len(sampler.engine.adapters) == 2
    await dropping
    assert list(sampler.engine.adapters) == ["a@1#2"]
    await sampler.weights.drop("nobody@1")


async def test_a_drop_completes_after_its_caller_leaves() -> None:
    sampler = Sampler()
    await sampler.push("a@1")
    async with sampler.weights.use("a@1"):
        dropping = asyncio.create_task(sampler.weights.drop("a@1"))
        await asyncio.sleep(0.01)
        dropping.cancel()
        await asyncio.gather(dropping, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert not sampler.engine.adapters


async def test_full_weights_hide_adapters_until_the_base_is_back() -> None:
    sampler = Sampler()
    await sampler.push("a@1")
    (_, loaded) = await sampler.push("full@1", FULL)
    assert loaded == Loaded("d", 0.25)
    assert sampler.weights.resident_snapshot_id == "full@1"
    assert not sampler.weights.adapter_snapshot_ids()
    for gone in ("", "a@1"):
        with pytest.raises(SnapshotNotLoaded):
            sampler.weights.require(gone)
    async with sampler.weights.use("full@1") as name:
        assert name is None
    await sampler.push("", FULL)
    assert sampler.weights.adapter_snapshot_ids() == ["a@1"]


async def test_full_weights_wait_for_requests_and_go_before_later_ones() -> None:
    sampler = Sampler()
    order: list[str] = []

    async def use(snapshot_id: str) -> None:
        try:
            async with sampler.weights.use(snapshot_id):
                order.append(f"used {snapshot_id}")
        except SnapshotNotLoaded:
            order.append(f"refused {snapshot_id!r}")

    async with sampler.weights.use(""):
        pushing = asyncio.create_task(sampler.push("full@1", FULL))
        await asyncio.sleep(0.01)
        late = [asyncio.create_task(use("")), asyncio.create_task(use("full@1"))]
        await asyncio.sleep(0.01)
        assert not order
        assert sampler.engine.full == "base"
    await pushing
    await asyncio.gather(*late)
    assert order == ["refused ''", "used full@1"]


async def test_a_push_without_time_to_wait_changes_nothing() -> None:
    sampler = Sampler()
    async with sampler.weights.use(""):
        with pytest.raises(DeadlineExceeded, match="requests in flight"):
            await sampler.push("full@1", FULL, timeout_s=0.05)
    assert sampler.weights.resident_snapshot_id == ""
    assert sampler.engine.full == "base"
    async with sampler.weights.use(""):
        pass


async def test_a_failed_load_serves_nothing_until_the_next_push() -> None:
    sampler = Sampler()
    await sampler.push("a@1")
    sampler.engine.fail_loading = True
    with pytest.raises(Unavailable, match="half-loaded"):
        await sampler.push("full@1", FULL)
    for snapshot_id in ("", "a@1", "full@1"):
        with pytest.raises(SnapshotNotLoaded):
            sampler.weights.require(snapshot_id)
    sampler.engine.fail_loading = False
    await sampler.push("full@2", FULL)
    assert sampler.weights.resident_snapshot_id == "full@2"


async def test_loading_goes_on_when_the_caller_leaves() -> None:
    sampler = Sampler()
    pushing = asyncio.create_task(sampler.push("full@1", FULL))
    await eventually(lambda: sampler.engine.full == "?")
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert sampler.engine.full == sampler.weights.resident_snapshot_id == "full@1"
    assert not sampler.engine.tasks


async def test_bytes_that_differ_from_the_manifest() -> None:
    sampler = Sampler()
    sampler.engine.arrived.clear()
    pushing = asyncio.create_task(sampler.push("a@1", digest="promised"))
    await eventually(lambda: bool(sampler.engine.digests))
    sampler.engine.digests = dict.fromkeys(sampler.engine.digests, "other")
    sampler.engine.arrived.set()
    with pytest.raises(Internal, match="digest other, the manifest says promised"):
        await pushing
    assert not sampler.engine.adapters
    assert sampler.engine.groups == {"g"}, "all bytes arrived, so the group is in step"


@pytest.mark.parametrize("leave", ["deadline", "cancel"])
async def test_a_push_that_breaks_off_leaves_the_group(leave: str) -> None:
    sampler = Sampler()
    sampler.engine.arrived.clear()
    pushing = asyncio.create_task(sampler.push("a@1", timeout_s=0.05 if leave == "deadline" else 60))
    await eventually(lambda: bool(sampler.engine.tasks))
    if leave == "cancel":
        await asyncio.sleep(0.01)
        pushing.cancel()
    with pytest.raises((Unavailable, asyncio.CancelledError)):
        await pushing
    assert not sampler.engine.groups
    assert not sampler.engine.tasks
    with pytest.raises(FailedPrecondition, match="join it first"):
        _ = [phase async for phase in sampler.pushes.receive("g", manifest("a@1"), 5)]


async def test_one_snapshot_at_a_time_over_a_group() -> None:
    sampler = Sampler()
    await sampler.pushes.join(meeting("g"))
    sampler.engine.arrived.clear()
    first = sampler.pushes.receive("g", manifest("a@1"), 5)
    assert await anext(first) == Ready()
    second = sampler.pushes.receive("g", manifest("b@1"), 0.05)
    with pytest.raises(DeadlineExceeded, match="another snapshot"):
        await anext(second)
    sampler.engine.arrived.set()
    assert isinstance(await anext(first), Loaded)


async def test_a_held_snapshot_is_received_again_but_never_changed() -> None:
    sampler = Sampler()
    await sampler.push("a@1", digest="x")
    assert (await sampler.push("a@1", digest="x"))[1] == Loaded("x", 0.0)
    assert len(sampler.engine.adapters) == 1
    with pytest.raises(AlreadyExists, match="never change"):
        await sampler.push("a@1", digest="y")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"snapshot_id": ""}, InvalidInput),
        ({"timeout_s": 0.0}, InvalidInput),
        ({"timeout_s": float("nan")}, InvalidInput),
        ({"group": "elsewhere"}, FailedPrecondition),
    ],
)
async def test_receives_that_are_refused(change: dict[str, object], error: type[FoveaError]) -> None:
    sampler = Sampler()
    await sampler.pushes.join(meeting("g"))
    wanted = {"snapshot_id": "a@1", "timeout_s": 5.0, "group": "g"} | change
    with pytest.raises(error):
        await anext(sampler.pushes.receive(wanted["group"], manifest(wanted["snapshot_id"]), wanted["timeout_s"]))
    assert sampler.engine.groups == {"g"}


async def test_a_group_that_does_not_meet() -> None:
    sampler = Sampler()
    with pytest.raises(Unavailable):
        await sampler.pushes.join(meeting("g", port=1))
    with pytest.raises(FailedPrecondition):
        await anext(sampler.pushes.receive("g", manifest("a@1"), 5))


async def test_the_gate_survives_cancelled_readers_and_writers() -> None:
    gate = SharedLock()

    async def read() -> None:
        async with gate.shared():
            await asyncio.sleep(60)

    async def write() -> None:
        async with gate.exclusive():
            await asyncio.sleep(60)

    for roles in itertools.permutations((read, write, read, write)):
        tasks = [asyncio.create_task(role()) for role in roles]
        await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(5), gate.exclusive():
            pass
        async with asyncio.timeout(5), gate.shared():
            pass


async def test_a_quarantined_snapshot_is_refused_by_name_and_no_other() -> None:
    sampler = Sampler()
    await sampler.push("a@1")
    await sampler.push("a@2")
    error = sampler.weights.quarantine("a@1", "log-probabilities of the sampled tokens are NaN or infinite")
    assert isinstance(error, NotFinite)
    for _ in range(2):
        with pytest.raises(NotFinite, match=r"'a@1' cannot be sampled.*lower learning rate"):
            sampler.weights.require("a@1")
        await sampler.weights.drop("a@1")
        await sampler.push("a@1")  # its weights are the same, because a snapshot never changes
    assert sampler.weights.require("a@2") is not None
    assert sampler.weights.require("") is None


async def test_the_base_model_is_never_quarantined() -> None:
    sampler = Sampler()
    assert "change its prompt" in sampler.weights.quarantine("", "log-probabilities are NaN").message
    assert sampler.weights.require("") is None


class Order:
    """The order in which requests of a SlotQueue start; each lasts until `end`."""

    def __init__(self, queue: SlotQueue) -> None:
        self.queue = queue
        self.begun: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def ask(self, request: str, adapter: int, rank: int = 8) -> None:
        """Starts a request."""
        self._ends[request] = asyncio.Event()
        self._tasks[request] = asyncio.create_task(self._run(request, AdapterName(f"a{adapter}", adapter), rank))
        await self.settle()

    async def end(self, request: str) -> None:
        """Ends a started request."""
        self._ends[request].set()
        await self._tasks.pop(request)
        await self.settle()

    async def cancel(self, *requests: str) -> None:
        """Cancels requests in one turn of the event loop."""
        for request in requests:
            self._tasks[request].cancel()
        for request in requests:
            with suppress(asyncio.CancelledError):
                await self._tasks.pop(request)
        await self.settle()

    async def settle(self) -> None:
        """Runs the event loop until nothing changes."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def _run(self, request: str, name: AdapterName, rank: int) -> None:
        async with self.queue.slot_for(name, rank):
            self.begun.append(request)
            await self._ends[request].wait()


def waiting() -> float:
    """Returns the requests that wait for a slot, from the metric."""
    return float(sampler_metrics.WAITING_FOR_SLOT._value.get())


async def test_requests_wait_for_a_slot_in_order_and_together() -> None:
    order = Order(SlotQueue(2, 64, 128, most_passing=8))
    for request, adapter in (("a", 1), ("b", 2), ("c", 3), ("d", 4), ("c2", 3), ("a2", 1)):
        await order.ask(request, adapter)
    assert order.begun == ["a", "b", "a2"], "requests of one adapter must share its slot"
    assert waiting() == 3
    await order.end("a")
    assert order.begun == ["a", "b", "a2"], "a2 must still use the slot"
    await order.end("b")
    assert order.begun[3:] == ["c", "c2"]
    await order.end("a2")
    assert order.begun[5:] == ["d"]
    assert waiting() == 0
    for request in ("c", "c2", "d"):
        await order.end(request)


async def test_a_stream_of_requests_starves_no_other_adapter() -> None:
    order = Order(SlotQueue(1, 64, 64, most_passing=3))
    await order.ask("a0", 1)
    await order.ask("b", 2)
    for number in range(1, 6):  # always the next one before the last one ends
        await order.ask(f"a{number}", 1)
        if number <= 3:
            await order.end(f"a{number - 1}")
    assert order.begun == ["a0", "a1", "a2", "a3"]
    await order.end("a3")
    assert order.begun[4:] == ["b"]
    await order.end("b")
    assert order.begun[5:] == ["a4", "a5"]
    await order.end("a4")
    await order.end("a5")


async def test_slots_are_counted_by_rank() -> None:
    """In 128 ranks: one adapter of rank 64, then two of 17 (which take 32 each), or eight of rank 8."""
    order = Order(SlotQueue(64, 64, 128, most_passing=8))
    await order.ask("large", 1, 64)
    for number in range(2, 12):
        await order.ask(f"s{number}", number, 17 if number < 4 else 8)
    assert order.begun == ["large", "s2", "s3"]
    await order.end("s2")
    assert order.begun[3:] == ["s4", "s5", "s6", "s7"]
    await order.end("large")
    assert order.begun[7:] == ["s8", "s9", "s10", "s11"]
    for number in range(3, 12):
        await order.end(f"s{number}")


async def test_a_request_that_is_cancelled_while_it_waits_leaves_no_trace() -> None:
    order = Order(SlotQueue(1, 64, 64, most_passing=8))
    await order.ask("a", 1)
    await order.ask("b", 2)
    await order.ask("c", 3)
    await order.cancel("b")
    await order.end("a")
    assert order.begun == ["a", "c"]
    await order.ask("d", 4)
    order._ends["c"].set()
    await asyncio.sleep(0)  # c leaves and gives d the slot, in the turn in which d is cancelled
    await order.cancel("d")
    await order.ask("e", 5)
    assert order.begun[2:] == ["e"]
    assert waiting() == 0
    await order.end("e")


async def test_newer_full_weights_go_under_requests_that_follow_their_model() -> None:
    """Another model's weights wait for them, and any weights wait for a request that names an exact version."""
    sampler, lost = Sampler(), list[Exception]()
    await sampler.push("m@1", FULL, model_id="m")
    async with sampler.weights.use("m@1", lost.append):
        await sampler.push("m@2", FULL, model_id="m")
        assert sampler.weights.resident_snapshot_id == "m@2"
        async with sampler.weights.use("m@2"):
            with pytest.raises(DeadlineExceeded, match="requests in flight"):
                await sampler.push("m@3", FULL, model_id="m", timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match="requests in flight"):
            await sampler.push("n@1", FULL, model_id="n", timeout_s=0.05)
        await sampler.push("m@3", FULL, model_id="m")
    await sampler.push("n@1", FULL, model_id="n")
    assert sampler.weights.resident_snapshot_id == "n@1"
    assert not lost


async def test_nothing_follows_the_base_model_or_an_adapter() -> None:
    sampler = Sampler()
    await sampler.push("a@1")
    for snapshot_id in ("", "a@1"):
        async with sampler.weights.use(snapshot_id, pytest.fail):
            with pytest.raises(DeadlineExceeded, match="requests in flight"):
                await sampler.push("m@1", FULL, model_id="m", timeout_s=0.05)


async def test_requests_that_follow_end_when_loading_fails_and_begin_again_after_the_next_push() -> None:
    sampler, lost = Sampler(), list[Exception]()
    await sampler.push("m@1", FULL, model_id="m")
    async with sampler.weights.use("m@1", lost.append):
        sampler.engine.fail_loading = True
        with pytest.raises(Unavailable, match="half-loaded"):
            await sampler.push("m@2", FULL, model_id="m")
        (error,) = lost
        assert isinstance(error, SnapshotNotLoaded)
        assert "loading snapshot 'm@2' failed" in error.message
    sampler.engine.fail_loading = False
    await sampler.push("m@2", FULL, model_id="m")
    async with sampler.weights.use("m@2", lost.append):
        pass
    assert len(lost) == 1
