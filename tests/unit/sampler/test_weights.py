"""Who may use which weights when."""

import asyncio
import itertools

import pytest

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    FoveaError,
    Internal,
    InvalidInput,
    ResourceExhausted,
    SnapshotNotLoaded,
    Unavailable,
)
from services.sampler.adapters import AdapterShelf, HeldAdapter
from services.sampler.engine_api import AdapterName
from services.sampler.gate import WeightGate
from services.sampler.pushes import Loaded, Ready, SnapshotPushes
from services.sampler.settled import settled
from services.sampler.weight_store import Snapshots
from tests.unit.sampler.memory_engine import MemoryEngine, eventually

FULL, ADAPTER = weights_pb2.SNAPSHOT_KIND_FULL, weights_pb2.SNAPSHOT_KIND_ADAPTER
SIZE_BYTES = 40


class House:
    """Everything around one engine."""

    def __init__(self, max_count: int = 2, max_bytes: int = 1000) -> None:
        self.engine = MemoryEngine()
        self.snapshots = Snapshots(self.engine, AdapterShelf(max_count, max_bytes))
        self.pushes = SnapshotPushes(self.engine, self.snapshots)

    async def push(
        self,
        snapshot_id: str,
        kind: int = ADAPTER,
        digest: str = "d",
        timeout_s: float = 5,
        group: str = "g",
        size_bytes: int = SIZE_BYTES,
    ) -> list[Ready | Loaded]:
        """Joins and receives."""
        await self.pushes.join(meeting(group))
        announced = manifest(snapshot_id, kind, digest, size_bytes)
        return [phase async for phase in self.pushes.receive(group, announced, timeout_s)]


def meeting(group: str, port: int = 5) -> sampler_pb2.JoinTransferGroupRequest:
    """A group of a trainer and this sampler."""
    return sampler_pb2.JoinTransferGroupRequest(
        group_id=group, master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, timeout_s=5
    )


def manifest(
    snapshot_id: str, kind: int = ADAPTER, digest: str = "d", size_bytes: int = SIZE_BYTES
) -> weights_pb2.SnapshotManifest:
    """A manifest of one tensor."""
    result = weights_pb2.SnapshotManifest(bucket_bytes=100)
    result.snapshot.CopyFrom(weights_pb2.Snapshot(snapshot_id=snapshot_id, digest=digest, kind=kind))
    result.tensors.add(name="t", dtype="float32", shape=[size_bytes // 4])
    return result


def held(snapshot_id: str, number: int, size_bytes: int = SIZE_BYTES) -> HeldAdapter:
    """An adapter on a shelf."""
    return HeldAdapter(snapshot_id, AdapterName(snapshot_id, number), "d", size_bytes)


async def test_an_adapter_comes_and_can_be_used() -> None:
    house = House()
    phases = await house.push("a@1", digest="abc")
    assert phases == [Ready(), Loaded("abc", 0.0)]
    async with house.snapshots.use("a@1") as name:
        assert name is not None
        assert house.engine.adapters == {name.name: "abc"}
    async with house.snapshots.use("") as name:
        assert name is None
    assert not house.engine.tasks


@pytest.mark.parametrize("snapshot_id", ["a@2", "a", "A@1", " "])
async def test_unknown_snapshots(snapshot_id: str) -> None:
    house = House()
    await house.push("a@1")
    with pytest.raises(SnapshotNotLoaded, match="push it"):
        house.snapshots.require(snapshot_id)


async def test_the_least_recently_used_idle_adapter_leaves() -> None:
    house = House(max_count=2)
    await house.push("a@1")
    await house.push("b@1")
    house.snapshots.require("a@1")
    await house.push("c@1")
    assert house.snapshots.adapter_snapshot_ids() == ["a@1", "c@1"]
    assert sorted(house.engine.adapters) == ["a@1#1", "c@1#3"]


async def test_adapters_in_use_never_leave() -> None:
    house = House(max_count=2)
    await house.push("a@1")
    await house.push("b@1")
    async with house.snapshots.use("a@1"), house.snapshots.use("b@1"):
        with pytest.raises(ResourceExhausted, match="in use"):
            await house.push("c@1")
    await house.push("c@1")
    assert house.snapshots.adapter_snapshot_ids() == ["b@1", "c@1"]


async def test_a_request_never_loses_the_adapter_that_it_has_begun_with() -> None:
    """Room for one large adapter takes several away; once the first has gone, requests ask for the others."""
    house = House(max_count=4, max_bytes=4 * SIZE_BYTES)
    names = [f"{letter}@1" for letter in "abcd"]
    for name in names:
        await house.push(name)
    pushing = asyncio.create_task(house.push("large@1", size_bytes=4 * SIZE_BYTES))
    await eventually(lambda: house.snapshots.adapter_snapshot_ids() != names)

    async def use(snapshot_id: str) -> str:
        try:
            async with house.snapshots.use(snapshot_id) as name:
                assert name is not None
                for _ in range(20):
                    assert name.name in house.engine.adapters, f"{name.name} was freed under a request"
                    await asyncio.sleep(0)
        except SnapshotNotLoaded:
            return "refused"
        return "used"

    assert await asyncio.gather(*map(use, names)) == ["refused"] * 4
    await pushing
    assert house.snapshots.adapter_snapshot_ids() == ["large@1"]
    assert [*house.engine.adapters] == ["large@1#5"]


async def test_adapters_that_arrive_together_do_not_share_their_room() -> None:
    house = House(max_count=2)
    await house.push("a@1")
    house.engine.arrived.clear()
    pushing = [asyncio.create_task(house.push(f"{name}@1", group=name)) for name in "bc"]
    await eventually(lambda: len(house.engine.tasks) == 2 and not house.engine.adapters)
    with pytest.raises(ResourceExhausted, match="arriving"):
        await house.push("d@1", group="d")
    house.engine.arrived.set()
    await asyncio.gather(*pushing)
    assert sorted(house.snapshots.adapter_snapshot_ids()) == ["b@1", "c@1"]


async def test_a_push_that_is_given_up_still_frees_what_left_for_it() -> None:
    house = House(max_count=4, max_bytes=4 * SIZE_BYTES)
    for letter in "abcd":
        await house.push(f"{letter}@1")
    pushing = asyncio.create_task(house.push("large@1", size_bytes=4 * SIZE_BYTES))
    await eventually(lambda: not house.snapshots.adapter_snapshot_ids())
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert not house.engine.adapters
    await house.push("large@1", size_bytes=4 * SIZE_BYTES)


def test_room_is_counted_in_bytes_too() -> None:
    shelf = AdapterShelf(max_count=10, max_bytes=100)
    for number in range(2):
        shelf.add(held(f"{number}", number))
    assert [adapter.snapshot_id for adapter in shelf.leaving_for(20)] == []
    assert [adapter.snapshot_id for adapter in shelf.leaving_for(30)] == ["0"]
    assert [adapter.snapshot_id for adapter in shelf.leaving_for(100)] == ["0", "1"]
    with pytest.raises(ResourceExhausted, match="101 bytes"):
        shelf.leaving_for(101)
    assert shelf.snapshot_ids() == ["0", "1"]


def test_names_are_never_used_twice() -> None:
    shelf = AdapterShelf(2, 100)
    names = [shelf.name_anew("a@1") for _ in range(3)]
    assert len({name.name for name in names}) == len({name.lora_id for name in names}) == 3
    assert all(name.lora_id > 0 for name in names)


async def test_dropping_waits_until_nobody_uses_it() -> None:
    house = House()
    await house.push("a@1")
    async with house.snapshots.use("a@1") as name:
        assert name is not None
        dropping = asyncio.create_task(house.snapshots.drop("a@1"))
        await asyncio.sleep(0.01)
        assert name.name in house.engine.adapters
        with pytest.raises(SnapshotNotLoaded):
            house.snapshots.require("a@1")
        # Pushed again while the old one drains: a new version beside it.
        await house.push("a@1")
        assert len(house.engine.adapters) == 2
    await dropping
    assert list(house.engine.adapters) == ["a@1#2"]
    await house.snapshots.drop("nobody@1")


async def test_a_drop_whose_caller_leaves_still_happens() -> None:
    house = House()
    await house.push("a@1")
    async with house.snapshots.use("a@1"):
        dropping = asyncio.create_task(house.snapshots.drop("a@1"))
        await asyncio.sleep(0.01)
        dropping.cancel()
        await asyncio.gather(dropping, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert not house.engine.adapters


async def test_full_weights_hide_adapters_until_the_base_is_back() -> None:
    house = House()
    await house.push("a@1")
    (_, loaded) = await house.push("full@1", FULL)
    assert loaded == Loaded("d", 0.25)
    assert house.snapshots.resident_snapshot_id == "full@1"
    assert not house.snapshots.adapter_snapshot_ids()
    for gone in ("", "a@1"):
        with pytest.raises(SnapshotNotLoaded):
            house.snapshots.require(gone)
    async with house.snapshots.use("full@1") as name:
        assert name is None
    await house.push("", FULL)
    assert house.snapshots.adapter_snapshot_ids() == ["a@1"]


async def test_full_weights_wait_for_requests_and_go_before_later_ones() -> None:
    house = House()
    order: list[str] = []

    async def use(snapshot_id: str) -> None:
        try:
            async with house.snapshots.use(snapshot_id):
                order.append(f"used {snapshot_id}")
        except SnapshotNotLoaded:
            order.append(f"refused {snapshot_id!r}")

    async with house.snapshots.use(""):
        pushing = asyncio.create_task(house.push("full@1", FULL))
        await asyncio.sleep(0.01)
        late = [asyncio.create_task(use("")), asyncio.create_task(use("full@1"))]
        await asyncio.sleep(0.01)
        assert not order
        assert house.engine.full == "base"
    await pushing
    await asyncio.gather(*late)
    assert order == ["refused ''", "used full@1"]


async def test_a_push_without_time_to_wait_changes_nothing() -> None:
    house = House()
    async with house.snapshots.use(""):
        with pytest.raises(DeadlineExceeded, match="samples in flight"):
            await house.push("full@1", FULL, timeout_s=0.05)
    assert house.snapshots.resident_snapshot_id == ""
    assert house.engine.full == "base"
    async with house.snapshots.use(""):
        pass


async def test_a_failed_load_serves_nothing_until_the_next_push() -> None:
    house = House()
    await house.push("a@1")
    house.engine.fail_loading = True
    with pytest.raises(Unavailable, match="half-loaded"):
        await house.push("full@1", FULL)
    for snapshot_id in ("", "a@1", "full@1"):
        with pytest.raises(SnapshotNotLoaded):
            house.snapshots.require(snapshot_id)
    house.engine.fail_loading = False
    await house.push("full@2", FULL)
    assert house.snapshots.resident_snapshot_id == "full@2"


async def test_loading_goes_on_when_the_caller_leaves() -> None:
    house = House()
    pushing = asyncio.create_task(house.push("full@1", FULL))
    await eventually(lambda: house.engine.full == "?")
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert house.engine.full == house.snapshots.resident_snapshot_id == "full@1"
    assert not house.engine.tasks


async def test_bytes_that_differ_from_the_manifest() -> None:
    house = House()
    house.engine.arrived.clear()
    pushing = asyncio.create_task(house.push("a@1", digest="promised"))
    await eventually(lambda: bool(house.engine.digests))
    house.engine.digests = dict.fromkeys(house.engine.digests, "other")
    house.engine.arrived.set()
    with pytest.raises(Internal, match="digest other, the manifest says promised"):
        await pushing
    assert not house.engine.adapters
    assert house.engine.groups == {"g"}, "all bytes came: the group is in step"


@pytest.mark.parametrize("leave", ["deadline", "cancel"])
async def test_a_push_that_breaks_off_leaves_the_group(leave: str) -> None:
    house = House()
    house.engine.arrived.clear()
    pushing = asyncio.create_task(house.push("a@1", timeout_s=0.05 if leave == "deadline" else 60))
    await eventually(lambda: bool(house.engine.tasks))
    if leave == "cancel":
        await asyncio.sleep(0.01)
        pushing.cancel()
    with pytest.raises((Unavailable, asyncio.CancelledError)):
        await pushing
    assert not house.engine.groups
    assert not house.engine.tasks
    with pytest.raises(FailedPrecondition, match="join it first"):
        _ = [phase async for phase in house.pushes.receive("g", manifest("a@1"), 5)]


async def test_one_snapshot_at_a_time_over_a_group() -> None:
    house = House()
    await house.pushes.join(meeting("g"))
    house.engine.arrived.clear()
    first = house.pushes.receive("g", manifest("a@1"), 5)
    assert await anext(first) == Ready()
    second = house.pushes.receive("g", manifest("b@1"), 0.05)
    with pytest.raises(DeadlineExceeded, match="another snapshot"):
        await anext(second)
    house.engine.arrived.set()
    assert isinstance(await anext(first), Loaded)


async def test_a_held_snapshot_is_received_again_but_never_changed() -> None:
    house = House()
    await house.push("a@1", digest="x")
    assert (await house.push("a@1", digest="x"))[1] == Loaded("x", 0.0)
    assert len(house.engine.adapters) == 1
    with pytest.raises(AlreadyExists, match="never change"):
        await house.push("a@1", digest="y")


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
    house = House()
    await house.pushes.join(meeting("g"))
    wanted = {"snapshot_id": "a@1", "timeout_s": 5.0, "group": "g"} | change
    with pytest.raises(error):
        await anext(house.pushes.receive(wanted["group"], manifest(wanted["snapshot_id"]), wanted["timeout_s"]))
    assert house.engine.groups == {"g"}


async def test_a_group_that_does_not_meet() -> None:
    house = House()
    with pytest.raises(Unavailable):
        await house.pushes.join(meeting("g", port=1))
    with pytest.raises(FailedPrecondition):
        await anext(house.pushes.receive("g", manifest("a@1"), 5))


async def test_the_gate_survives_cancelled_readers_and_writers() -> None:
    gate = WeightGate()

    async def read() -> None:
        async with gate.reading():
            await asyncio.sleep(60)

    async def write() -> None:
        async with gate.writing():
            await asyncio.sleep(60)

    for roles in itertools.permutations((read, write, read, write)):
        tasks = [asyncio.create_task(role()) for role in roles]
        await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(5), gate.writing():
            pass
        async with asyncio.timeout(5), gate.reading():
            pass


async def test_settled_work_ends_before_its_caller_leaves() -> None:
    ended: list[str] = []

    async def work() -> str:
        await asyncio.sleep(0.02)
        ended.append("work")
        return "result"

    assert await settled(work()) == "result"
    task = asyncio.create_task(settled(work()))
    await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work", "work"]

    async def fail() -> None:
        raise ValueError("own failure")

    with pytest.raises(ValueError, match="own failure"):
        await settled(fail())
