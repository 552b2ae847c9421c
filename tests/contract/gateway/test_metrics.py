"""Prometheus metrics of queues, stages, samplers and errors."""

import hashlib
from pathlib import Path

from prometheus_client import REGISTRY

from fovea.wire.errors import SnapshotNotLoaded
from fovea_gateway.replicas.samplers import version_of
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest
from tests.waiting import eventually

TENANT = f"key-{hashlib.sha256(KEY.encode()).hexdigest()[:12]}"


def value(name: str, **labels: str) -> float | None:
    """Returns the value of a series, or None if it is missing."""
    return REGISTRY.get_sample_value(name, labels)


def count(name: str, **labels: str) -> float:
    """Returns the value of a counter, or 0 if it is missing."""
    return value(name, **labels) or 0.0


async def test_queue_depth_has_model_and_tenant_and_leaves_nothing_behind(stand: Stand, rest: Rest) -> None:
    assert stand.gateway is not None
    depth = "fovea_gateway_queue_depth"
    model_id = await rest.create_model()
    stand.trainer.open.clear()
    answers = [await rest.forward_backward(model_id, seq_id) for seq_id in (1, 2, 3)]
    labels = {"model": model_id, "tenant": TENANT}

    async def shown() -> bool:
        assert stand.gateway is not None
        await stand.gateway.components.health.set_gauges()
        running, waiting = (value(depth, **labels, state=state) for state in ("running", "waiting"))
        return (running, waiting) == (1, 2)

    await eventually(shown)
    assert KEY not in TENANT
    stand.trainer.open.set()
    for answer in answers:
        await rest.result(answer.json()["request_id"])
    await stand.gateway.components.health.set_gauges()
    assert value(depth, **labels, state="running") is None
    assert value(depth, **labels, state="waiting") is None


async def test_samples_are_queued_under_the_model_that_they_sample(stand: Stand, rest: Rest) -> None:
    model_id = await rest.create_model()
    sampling_session_id = await rest.snapshot(model_id, 1)
    stand.sampler.open.clear()
    answer = await rest.sample(sampling_session_id, 1)

    async def shown() -> bool:
        assert stand.gateway is not None
        await stand.gateway.components.health.set_gauges()
        return value("fovea_gateway_queue_depth", model=model_id, tenant=TENANT, state="running") == 1

    await eventually(shown)
    stand.sampler.open.set()
    await rest.result(answer.json()["request_id"])


async def test_metrics_show_requests_that_wait_for_a_replica(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    waiting, tokens = "fovea_gateway_replica_waiting", "fovea_gateway_replica_tokens"
    async with running(stand, sampler_concurrency=1) as stand, stand.http() as http:
        assert stand.gateway is not None
        rest = Rest(http)
        await rest.open_session()
        sampling_session_id = await rest.snapshot(await rest.create_model(), 1)
        stand.sampler.open.clear()
        answers = [await rest.sample(sampling_session_id, seq_id) for seq_id in (1, 2, 3)]

        async def shown() -> bool:
            assert stand.gateway is not None
            await stand.gateway.components.health.set_gauges()
            return value(waiting, service="sampler", replica=stand.sampler.address) == 2

        await eventually(shown)
        assert value(waiting, service="renderer", replica=stand.renderer.address) == 0
        each = value(tokens, service="sampler", replica=stand.sampler.address)
        assert each is not None
        assert each >= 3 * 2, "the running sample counts, too; each has prompt and completion"
        assert each % 3 == 0, "three equal requests"
        stand.sampler.open.set()
        for answer in answers:
            await rest.result(answer.json()["request_id"])
        await stand.gateway.components.health.set_gauges()
        assert value(waiting, service="sampler", replica=stand.sampler.address) == 0
        assert value(tokens, service="sampler", replica=stand.sampler.address) == 0
        assert value("fovea_gateway_sessions") == 1
    assert value(waiting, service="sampler", replica=stand.sampler.address) is None, "the gateway must be gone"
    assert value("fovea_gateway_sessions") == 0


async def test_every_stage_of_a_request_is_counted_once(stand: Stand, rest: Rest) -> None:
    def counts(kind: str, *stages: str) -> list[float]:
        return [count("fovea_gateway_stage_seconds_count", stage=stage, kind=kind) for stage in stages]

    sample, train = ("queue", "render", "weights", "sample"), ("queue", "render", "train")
    model_id = await rest.create_model()
    before = counts("sample", *sample), counts("forward_backward", *train)
    await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
    sampling_session_id = await rest.snapshot(model_id, 2)
    await rest.result((await rest.sample(sampling_session_id, 1)).json()["request_id"])
    after = counts("sample", *sample), counts("forward_backward", *train)
    assert after == tuple([each + 1 for each in counted] for counted in before)


async def test_a_sampler_that_misses_pushes_lags(stand: Stand, rest: Rest) -> None:
    assert stand.gateway is not None
    lag = {"sampler": stand.sampler.address}
    model_id = await rest.create_model()
    for seq_id in (1, 2):
        sampling_session_id = await rest.snapshot(model_id, seq_id, seq_id)
        await rest.result((await rest.sample(sampling_session_id, 1)).json()["request_id"])
    await stand.gateway.components.health.set_gauges()
    assert value("fovea_gateway_sampler_version_lag", **lag) == 0
    (sampler,) = stand.gateway.components.base_models.default.samplers.up
    newest = max(sampler.adapters, key=lambda held: version_of(held) or ("", 0))
    sampler.adapters.discard(newest)
    await stand.gateway.components.health.set_gauges()
    assert value("fovea_gateway_sampler_version_lag", **lag) == 1


async def test_errors_are_counted_by_reason(stand: Stand, rest: Rest) -> None:
    rest_errors = {"route": "asample", "reason": "NOT_FOUND"}
    grpc_errors = {"method": "Sample", "reason": "SNAPSHOT_NOT_LOADED"}
    before = count("fovea_gateway_rest_errors_total", **rest_errors), count("fovea_grpc_errors_total", **grpc_errors)
    assert (await rest.sample("sess-none:sample:0", 1)).status_code == 404
    stand.sampler.failures["Sample"].append(SnapshotNotLoaded("gone"))
    model_id = await rest.create_model()
    sampling_session_id = await rest.snapshot(model_id, 1)
    await rest.result((await rest.sample(sampling_session_id, 1)).json()["request_id"])
    after = count("fovea_gateway_rest_errors_total", **rest_errors), count("fovea_grpc_errors_total", **grpc_errors)
    assert after == (before[0] + 1, before[1] + 1)


async def test_replicas_and_restarts_are_counted(stand: Stand) -> None:
    assert stand.gateway is not None
    before = count("fovea_gateway_trainer_restarts_total")
    await stand.gateway.components.health.set_gauges()
    labels = {"base_model": MODEL, "state": "up"}
    up = {service: value("fovea_gateway_replicas", service=service, **labels) for service in ("sampler", "trainer")}
    assert up == {"sampler": 1, "trainer": 1}
    await stand.trainer.stop()
    stand.trainer.restart()
    await stand.trainer.start()

    async def noticed() -> bool:
        assert stand.gateway is not None
        await stand.gateway.components.health.set_gauges()
        return count("fovea_gateway_trainer_restarts_total") == before + 1

    await eventually(noticed)
    free, size = (value("fovea_gateway_state_volume_bytes", kind=kind) for kind in ("free", "size"))
    assert free is not None
    assert size is not None
    assert 0 < free < size


async def test_the_state_folder_is_there_wherever_the_database_is(tmp_path: Path) -> None:
    elsewhere = f"sqlite:///{tmp_path / 'database' / 'gateway.db'}"
    async with running(Stand(tmp_path / "state"), database_url=elsewhere) as stand:
        assert stand.gateway is not None
        await stand.gateway.components.health.set_gauges()


async def test_nothing_is_missed_that_a_base_model_is_served_without(tmp_path: Path) -> None:
    """A base model without samplers sets no series that would raise the alert FoveaNoSampler."""
    for without, nothing in {"sampler": [], "trainer": ""}.items():
        async with running(Stand(tmp_path / without), **{without: nothing}) as stand:
            assert stand.gateway is not None
            await stand.gateway.components.health.set_gauges()
            shown = {
                service: value("fovea_gateway_replicas", service=service, base_model=MODEL, state="up")
                for service in ("renderer", "sampler", "trainer")
            }
            assert shown == {"renderer": 1, "sampler": 1, "trainer": 1} | {without: None}
    assert value("fovea_gateway_replicas", service="renderer", base_model=MODEL, state="up") is None


def test_replays_are_counted_from_zero() -> None:
    """The series must start at zero: a rate ignores the first value of a series, so FoveaReplayDiffers would miss the
    first replay.
    """
    for answer in ("equal", "different", "rounded"):
        assert value("fovea_gateway_replayed_commands_total", answer=answer) is not None
