"""Samplers and renderers behind EndpointSlices join, leave and fail, as in a cluster, without a lost request."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter

from fovea_gateway import gateway_metrics as metrics
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.fakes import Fake, FakeRenderer, FakeSampler
from tests.contract.gateway.requests import PNG, Rest
from tests.unit.gateway.replicas.api_server import NAMESPACE, ApiServer, endpoint, kubeconfig, serving
from tests.waiting import eventually

_WORKERS = 6


class Cluster:
    """A stand with a gateway that discovers renderers and samplers by their services."""

    def __init__(self, stand: Stand, api: ApiServer, rest: Rest) -> None:
        self.stand, self.api, self.rest = stand, api, rest
        self.sampled = 0
        self._next = 0

    @property
    def up(self) -> set[str]:
        """Samplers that receive requests."""
        assert self.stand.gateway is not None
        return {sampler.address for sampler in self.stand.gateway.components.base_models.default.samplers.up}

    async def join(self, service: str, *fakes: Fake) -> None:
        """Adds replicas as endpoints of a service, each in its own slice because their ports differ."""
        for fake in fakes:
            ports = [{"name": "grpc", "port": fake.port}]
            await self.api.put(f"{service}-{fake.port}", [endpoint("127.0.0.1", ready=True)], service, ports=ports)

    async def leave(self, service: str, *fakes: Fake) -> None:
        """Removes endpoints; the replicas themselves keep running."""
        for fake in fakes:
            await self.api.delete(f"{service}-{fake.port}")

    async def settled(self, *samplers: FakeSampler) -> None:
        """Waits until exactly these replicas receive requests."""
        await eventually(lambda: self.up == {sampler.address for sampler in samplers}, 60)

    async def begin(self, sampling_id: str, **more: Any) -> str:
        """Submits a sample; returns the request's id."""
        self._next += 1
        response = await self.rest.sample(sampling_id, self._next, **more)
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    async def finish(self, request_ids: list[str]) -> None:
        """Waits for results."""
        for request_id in request_ids:
            answer = await self.rest.result(request_id)
            assert "sequences" in answer, answer

    @asynccontextmanager
    async def load(self, sampling_id: str) -> AsyncIterator[None]:
        """Samples continuously from several clients and requires every result."""
        stop = asyncio.Event()

        async def work() -> None:
            while not stop.is_set():
                await self.finish([await self.begin(sampling_id)])
                self.sampled += 1

        workers = [asyncio.create_task(work()) for _ in range(_WORKERS)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*workers)

    async def samples(self, count: int) -> None:
        """Waits for a number of further results."""
        until = self.sampled + count
        await eventually(lambda: self.sampled >= until, 200)


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Three samplers, of which the first is an endpoint."""
    async with serving() as api:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(api, tmp_path)))
        services: dict[str, Any] = {"renderer": ["renderer:grpc"], "sampler": ["sampler:grpc"]}
        services |= {"discovery": "kubernetes", "kubernetes_namespace": NAMESPACE, "sampler_concurrency": 8}
        services["renderer_concurrency"] = 2
        stand = Stand(tmp_path, sampler_count=3)
        async with running(stand, **services) as stand, stand.http() as http:
            cluster = Cluster(stand, api, Rest(http))
            await cluster.join("renderer", stand.renderer)
            await cluster.join("sampler", stand.sampler)
            await cluster.settled(stand.sampler)
            await cluster.rest.open_session()
            yield cluster


def retries() -> float:
    """Number of samples that were retried so far."""
    return _total(metrics.SAMPLE_RETRIES)


def renders_retried() -> float:
    """Number of renders that were retried so far."""
    return _total(metrics.RENDER_RETRIES)


def _total(counter: Counter) -> float:
    samples = [sample for family in counter.collect() for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


async def test_one_to_three_to_one_under_load(cluster: Cluster) -> None:
    first, *late = cluster.stand.samplers
    sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
    for sampler in cluster.stand.samplers:
        sampler.sample_delay_s = 0.02
    before = retries()
    async with cluster.load(sampling_id):
        await cluster.samples(20)
        await cluster.join("sampler", *late)
        await cluster.settled(first, *late)
        await cluster.samples(40)
        await cluster.leave("sampler", *late)
        await cluster.settled(first)
        await cluster.samples(20)
    for sampler in late:
        assert sampler.of("Sample"), "it must receive requests"
        assert "NotLoaded" not in sampler.names()
        assert sampler.cancelled == sampler.running == 0, "requests that ran when it left must have ended"
    assert retries() == before


async def test_a_late_sampler_is_asked_nothing_before_it_holds_the_adapter(cluster: Cluster) -> None:
    first, late, _ = cluster.stand.samplers
    trainer = cluster.stand.trainer
    sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
    await cluster.finish([await cluster.begin(sampling_id)])
    trainer.open.clear()
    await cluster.join("sampler", late)
    await eventually(lambda: late.address in trainer.of("PushSnapshot")[-1].samplers)
    first.open.clear()
    ids = [await cluster.begin(sampling_id) for _ in range(30)]
    await eventually(lambda: first.running == 8)
    assert cluster.up == {first.address}, "the conversation stays, however busy the first sampler is"
    assert late.calls == []
    trainer.open.set()
    await cluster.settled(first, late)
    await cluster.finish([await cluster.begin(sampling_id)])
    assert len(late.of("Sample")) == 1
    first.open.set()
    await cluster.finish(ids)
    assert len(trainer.of("PushSnapshot")) == 2


async def test_a_late_sampler_is_given_the_full_weights_in_place(cluster: Cluster) -> None:
    first, late, _ = cluster.stand.samplers
    model_id = await cluster.rest.create_model(rank=0)
    sampling_id = await cluster.rest.snapshot(model_id, 1)
    await cluster.finish([await cluster.begin(sampling_id)])
    await cluster.join("sampler", late)
    await cluster.settled(first, late)
    assert late.resident == first.resident != ""
    assert late.of("Sample") == []


async def test_a_late_sampler_that_cannot_be_pushed_to_waits_and_is_tried_again(cluster: Cluster) -> None:
    first, late, _ = cluster.stand.samplers
    sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
    await cluster.finish([await cluster.begin(sampling_id)])
    cluster.stand.trainer.push_failures[late.address] = 2
    await cluster.join("sampler", late)
    await cluster.settled(first, late)
    assert cluster.stand.trainer.push_failures[late.address] == 0
    assert late.adapters == first.adapters


async def test_weights_that_the_trainer_lost_are_sampled_where_they_are(cluster: Cluster) -> None:
    first, late, _ = cluster.stand.samplers
    sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
    await cluster.finish([await cluster.begin(sampling_id)])
    cluster.stand.trainer.restart()
    await cluster.join("sampler", late)
    await cluster.settled(first, late)
    first.open.clear()
    ids = [await cluster.begin(sampling_id) for _ in range(30)]
    await eventually(lambda: first.running == 8)
    first.open.set()
    await cluster.finish(ids)
    assert late.of("Sample") == []


async def test_kill_one_of_three_under_load(cluster: Cluster) -> None:
    samplers = cluster.stand.samplers
    sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
    await cluster.join("sampler", *samplers[1:])
    await cluster.settled(*samplers)
    for sampler in samplers:
        sampler.sample_delay_s = 0.02
    before = retries()
    async with cluster.load(sampling_id):
        await cluster.samples(50)
        await eventually(lambda: samplers[1].running > 0)
        await samplers[1].stop()
        await cluster.settled(samplers[0], samplers[2])
        await cluster.samples(50)
    assert 0 < retries() - before <= _WORKERS, "only the requests that ran there are retried, once each"
    assert cluster.sampled >= 100


async def test_waiting_requests_of_a_leaving_sampler_move_and_running_ones_finish(
    cluster: Cluster,
) -> None:
    first, second, _ = cluster.stand.samplers
    sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
    first.open.clear()
    second.open.clear()
    before = retries()
    ids = [await cluster.begin(sampling_id) for _ in range(12)]
    await eventually(lambda: first.running == 8)
    await cluster.join("sampler", second)
    await cluster.settled(first, second)
    await cluster.leave("sampler", first)
    await eventually(lambda: second.running == 4)
    assert first.running == 8
    second.open.set()
    first.open.set()
    await cluster.finish(ids)
    assert (len(first.completed), len(second.completed), first.cancelled) == (8, 4, 0)
    assert retries() == before


async def test_a_returning_sampler_gets_nothing_before_its_running_requests_end(cluster: Cluster) -> None:
    first = cluster.stand.sampler
    sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
    first.open.clear()
    ids = [await cluster.begin(sampling_id)]
    await eventually(lambda: first.running == 1)
    await cluster.leave("sampler", first)
    await cluster.settled()
    await cluster.join("sampler", first)
    ids.append(await cluster.begin(sampling_id))
    await asyncio.sleep(1.0)
    assert first.running == 1
    first.open.set()
    await cluster.finish(ids)


async def test_pictures_return_to_the_renderer_that_has_them_and_move_when_it_dies(cluster: Cluster) -> None:
    other = FakeRenderer()
    await other.start()
    gateway = cluster.stand.gateway
    assert gateway is not None
    try:
        await cluster.join("renderer", other)
        await eventually(lambda: len(gateway.components.base_models.default.renderers.up) == 2)
        renderers = {fake.address: fake for fake in (cluster.stand.renderer, other)}
        sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
        for number in range(12):
            for turn in range(3):
                chunks = [picture(number), *[picture(100 * number + later) for later in range(1, turn + 1)]]
                await cluster.finish([await cluster.begin(sampling_id, prompt={"chunks": chunks})])
        begun = {address: first_pictures(fake) for address, fake in renderers.items()}
        assert all(begun.values()), "both must receive requests"
        assert set.intersection(*begun.values()) == set(), "all turns of a conversation must reach the same cache"
        dead, alive = renderers.values()
        before = renders_retried()
        await dead.stop()
        for number in range(12):
            await cluster.finish([await cluster.begin(sampling_id, prompt={"chunks": [picture(number)]})])
        assert len(first_pictures(alive)) == 12
        assert renders_retried() - before <= 1, "a replica that is known to be dead gets no request"
        await dead.start()
        await eventually(lambda: len(gateway.components.base_models.default.renderers.up) == 2)
        await cluster.leave("renderer", alive)
        await eventually(lambda: len(gateway.components.base_models.default.renderers.members) == 1)
        count = len(alive.of("Render"))
        await cluster.finish([await cluster.begin(sampling_id, prompt={"chunks": [picture(1)]})])
        assert len(alive.of("Render")) == count
    finally:
        await other.stop()


async def test_each_renderer_has_a_limit_and_requests_waiting_for_a_dead_one_go_elsewhere(
    cluster: Cluster,
) -> None:
    gateway, dead, alive = cluster.stand.gateway, cluster.stand.renderer, FakeRenderer()
    assert gateway is not None
    await alive.start()
    try:
        await cluster.join("renderer", alive)
        await eventually(lambda: len(gateway.components.base_models.default.renderers.up) == 2)
        sampling_id = await cluster.rest.snapshot(await cluster.rest.create_model(), 1)
        dead.open.clear()
        alive.open.clear()
        ids = [await cluster.begin(sampling_id, prompt={"chunks": [picture(number)]}) for number in range(16)]
        await eventually(
            lambda: sum(renderer.queued for renderer in gateway.components.base_models.default.renderers.up) == 16
        )
        await eventually(lambda: (dead.waiting, alive.waiting) == (2, 2))
        before = renders_retried()
        await dead.stop()
        alive.open.set()
        await cluster.finish(ids)
        assert len(alive.of("Render")) == 16
        assert renders_retried() - before == 2, (
            "the requests that ran there are retried once, and no other was sent there"
        )
    finally:
        await alive.stop()


def picture(number: int) -> dict[str, str]:
    """An image chunk that is different for each number."""
    return {"type": "image", "data": base64.b64encode(PNG + str(number).encode()).decode(), "format": "png"}


def first_pictures(renderer: FakeRenderer) -> set[bytes]:
    """Returns the first picture of every input that a renderer received."""
    return {request.input.chunks[0].image.data for request in renderer.of("Render")}
