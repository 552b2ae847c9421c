"""Unnamed adapter snapshots above `unnamed_bytes` are freed, those that were used longest ago first."""

from pathlib import Path

from prometheus_client import REGISTRY

from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_checkpoints import save
from tests.waiting import eventually

_SIZE = 10  # bytes of each snapshot of the fake trainer


async def _sweep(stand: Stand) -> None:
    assert stand.gateway is not None
    limit = stand.gateway.components.unnamed_limit
    limit.unused_s = 0.0
    await limit.sweep()


async def _snapshots(stand: Stand, rest: Rest, model_id: str, count: int) -> list[str]:
    """Takes `count` unnamed snapshots, one after the other; returns their sampling sessions."""
    found = []
    for number in range(count):
        found.append(await rest.snapshot(model_id, 1 + number, number))
        newest = f"{model_id}@{number + 1}"
        await eventually(lambda newest=newest: newest in stand.sampler.adapters)
    return found


async def test_above_the_limit_those_used_longest_ago_are_freed(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(unnamed_bytes=3 * _SIZE)
    model_id = await rest.create_model()
    first, second, *_ = await _snapshots(stand, rest, model_id, 5)
    await rest.result((await rest.sample(first, 0)).json()["request_id"])
    await _sweep(stand)
    left = {f"{model_id}@{number}" for number in (1, 4, 5)}
    await eventually(lambda: set(stand.trainer.snapshots) == left == stand.sampler.adapters)
    assert "sequences" in await rest.result((await rest.sample(first, 1)).json()["request_id"])
    refused = await rest.result((await rest.sample(second, 0)).json()["request_id"])
    assert "saved without a name" in refused["error"]
    await stand.stop()
    await stand.start(unnamed_bytes=2 * _SIZE)
    refused = await rest.result((await rest.sample(second, 1)).json()["request_id"])
    assert "saved without a name" in refused["error"]
    await rest.result((await rest.sample(first, 2)).json()["request_id"])
    await _sweep(stand)
    left = {f"{model_id}@1", f"{model_id}@5"}
    await eventually(lambda: set(stand.trainer.snapshots) == left)


async def test_a_snapshot_that_was_used_within_a_minute_stays(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(unnamed_bytes=1)
    model_id = await rest.create_model()
    await _snapshots(stand, rest, model_id, 3)
    assert stand.gateway is not None
    await stand.gateway.components.unnamed_limit.sweep()
    assert len(stand.trainer.snapshots) == 3
    assert not stand.trainer.of("ForgetSnapshot")


async def test_the_snapshot_of_a_sample_that_waits_for_a_place_stays(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(unnamed_bytes=1, sampler_concurrency=1)
    model_id = await rest.create_model()
    first, *_, last = await _snapshots(stand, rest, model_id, 3)
    stand.sampler.gated = {"Sample"}
    stand.sampler.open.clear()
    running_id = (await rest.sample(last, 0)).json()["request_id"]
    await eventually(lambda: stand.sampler.waiting == 1)
    waiting_id = (await rest.sample(first, 0)).json()["request_id"]
    await _sweep(stand)
    await eventually(lambda: set(stand.trainer.snapshots) == {f"{model_id}@1", f"{model_id}@3"})
    stand.sampler.open.set()
    for request_id in (running_id, waiting_id):
        assert "sequences" in await rest.result(request_id)


async def test_ended_models_count_no_more(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(unnamed_bytes=4 * _SIZE)
    async with stand.http() as http:
        other = Rest(http)
        await other.open_session()
        ended = await other.create_model()
        await _snapshots(stand, other, ended, 3)
        await other.ok(f"sessions/{other.session_id}/finish", reason={"type": "success"}, detail=None)
    await eventually(lambda: not stand.trainer.snapshots)
    model_id = await rest.create_model()
    await _snapshots(stand, rest, model_id, 4)
    await _sweep(stand)
    assert len(stand.trainer.snapshots) == 4
    metric = REGISTRY.get_sample_value("fovea_gateway_unnamed_bytes")
    assert metric == 4 * _SIZE


async def test_named_snapshots_and_the_newest_of_each_model_stay(stand: Stand, rest: Rest) -> None:
    await stand.stop()
    await stand.start(unnamed_bytes=1)
    one, other = await rest.create_model(0), await rest.create_model(1)
    await save(rest, one, 1, "kept", "save_weights_for_sampler", kind="snapshot")
    named = set(stand.trainer.snapshots)
    await _snapshots(stand, rest, other, 2)
    for number in range(2):
        await rest.snapshot(one, 2 + number, 2 + number)
    await _sweep(stand)
    await eventually(lambda: len(stand.trainer.snapshots) == 3)
    assert set(stand.trainer.snapshots) == {*named, f"{one}@3", f"{other}@2"}


async def test_the_owner_with_the_most_bytes_loses_its_own(tmp_path: Path, database_url: str) -> None:
    stand = Stand(tmp_path)
    keys = ["alice=tml-alice", "bob=tml-bob"]
    async with (
        running(stand, database_url=database_url, api_key=keys, unnamed_bytes=4 * _SIZE),
        stand.http(key="tml-alice") as a,
        stand.http(key="tml-bob") as b,
    ):
        alice, bob = Rest(a), Rest(b)
        for rest in (alice, bob):
            await rest.open_session()
        small, large = await alice.create_model(), await bob.create_model()
        await _snapshots(stand, alice, small, 2)
        await _snapshots(stand, bob, large, 4)
        await _sweep(stand)
        left = {f"{small}@1", f"{small}@2", f"{large}@3", f"{large}@4"}
        await eventually(lambda: set(stand.trainer.snapshots) == left)
