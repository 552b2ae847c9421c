"""Gateway processes on PostgreSQL: one replaces another under load, and the database server may restart."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tinker
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fovea.api.v1 import gateway_pb2, gateway_pb2_grpc
from fovea.runtime.hosts import free_ports
from fovea.wire.errors import Unavailable
from fovea_gateway.database.sql_engine import check_connection
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL, Fake, FakeSampler
from tests.contract.gateway.requests import Rest, text_datum
from tests.contract.gateway.service import Service
from tests.contract.gateway.test_process import Process
from tests.postgresql import Server
from tests.waiting import eventually

CLIENTS, HANDOVERS, TOKENS = 4, 3, 4


class Patient(httpx.AsyncHTTPTransport):
    """Repeats broken requests and 5xx answers, as the SDK does."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        while True:
            try:
                response = await super().handle_async_request(request)
                await response.aread()
            except httpx.TransportError:
                pass
            else:
                if response.status_code < 500:
                    return response
            await asyncio.sleep(0.2)


class Cluster:
    """Gateways that share one database and one service address."""

    def __init__(self, stand: Stand, database_url: str) -> None:
        self.stand, self.service, self._database_url = stand, Service(), database_url
        self._gateways: list[Process] = []

    @property
    def url(self) -> str:
        """URL of the service."""
        return f"http://127.0.0.1:{self.service.port}"

    async def add(self) -> Process:
        """Starts a gateway, which may not be ready yet."""
        gateway = Process(self.stand)
        self._gateways.append(gateway)
        await gateway.start("healthz", database_url=self._database_url)
        self.service.add(gateway.port, gateway.grpc_port)
        return gateway

    async def ready(self, gateway: Process) -> None:
        """Waits until a gateway accepts requests."""
        await eventually(lambda: self.service.is_ready(gateway.port), 120)

    def http(self) -> httpx.AsyncClient:
        """A client that repeats failed requests."""
        base_url, headers = f"{self.url}/api/v1/", {"X-API-Key": KEY}
        return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60, transport=Patient())

    async def stop(self) -> None:
        """Kills the remaining processes."""
        await self.service.stop()
        for gateway in self._gateways:
            if gateway.process is not None and gateway.process.returncode is None:
                gateway.process.kill()
                await gateway.process.wait()


@pytest.fixture
async def cluster(tmp_path: Path, postgresql: Server) -> AsyncIterator[Cluster]:
    """A service without gateways."""
    stand = Stand(tmp_path)
    await stand.start_fakes()
    for fake in (stand.trainer, stand.sampler):
        slow_down(fake, 0.05)
    made = Cluster(stand, postgresql.new_url())
    await made.service.start()
    yield made
    await made.stop()
    await stand.stop_fakes()


def slow_down(fake: Fake, seconds: float) -> None:
    """Slows the fakes down, so that requests are in progress during each handover."""
    note = fake.note

    async def slowly(name: str, request: Any) -> None:
        await note(name, request)
        await asyncio.sleep(seconds)

    fake.note = slowly  # type: ignore[method-assign]


class Probe:
    """A client without retries, which measures the longest time without an answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.longest_s = 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Sends a small request every few milliseconds."""
        self.longest_s = 0.0
        task = asyncio.create_task(self._ask())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _ask(self) -> None:
        async with httpx.AsyncClient(base_url=f"{self._url}/api/v1/", headers={"X-API-Key": KEY}, timeout=60) as http:
            last = time.monotonic()
            while True:
                with suppress(httpx.TransportError):
                    if await self.ask(http):
                        self.longest_s = max(self.longest_s, time.monotonic() - last)
                        last = time.monotonic()
                await asyncio.sleep(0.01)

    async def ask(self, http: httpx.AsyncClient) -> bool:
        """Returns whether a small request was answered."""
        return (await http.get("sessions")).status_code == 200


class Load:
    """Clients that train and sample until stopped, and check every answer."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.is_over = False
        self.losses, self.steps, self.sdk_rounds = 0, 0, 0
        self.samples: list[str] = []

    async def run(self, during: Callable[[], Awaitable[None]]) -> None:
        """Runs all clients while `during` runs."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._run_bare())
            group.create_task(asyncio.to_thread(self._run_sdk))
            try:
                await during()
            finally:
                self.is_over = True

    async def _run_bare(self) -> None:
        async with self._cluster.http() as http:
            rest = Rest(http)
            model_id = await rest.create_model()
            opened = await rest.ok(
                "create_sampling_session", session_id=rest.session_id, sampling_session_seq_id=0, base_model=MODEL
            )
            number = 0
            while not self.is_over:
                await self._do_round(rest, model_id, opened["sampling_session_id"], number)
                number += 1

    async def _do_round(self, rest: Rest, model_id: str, sampling_id: str, number: int) -> None:
        params = {"max_tokens": TOKENS, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": number}
        loss = (await rest.forward_backward(model_id, 2 * number + 1)).json()["request_id"]
        step = (await rest.optim_step(model_id, 2 * number + 2))["request_id"]
        sample = (await rest.sample(sampling_id, number, sampling_params=params)).json()["request_id"]
        answers = [await rest.result(one) for one in (loss, step, sample)]
        assert not [answer for answer in answers if "error" in answer], answers
        assert answers[0]["metrics"]["loss:sum"] == pytest.approx(5 / (1 + number)), (
            "expected the weights after each step"
        )
        assert answers[1]["metrics"]["gradients:sum"] == 1.0, "the step must apply its own gradients once"
        assert answers[2]["sequences"][0]["tokens"] == FakeSampler.tokens_of("", number, 0, TOKENS)
        self.losses, self.steps = self.losses + 1, self.steps + 1
        self.samples.append(sample)

    def _run_sdk(self) -> None:
        # With timeouts: a closing event loop waits for its threads, and after a failure they would get no answer.
        with tinker.ServiceClient(base_url=self._cluster.url, api_key=KEY) as client:
            training = client.create_lora_training_client(base_model=MODEL, rank=8).result(120)
            while not self.is_over:
                loss = training.forward_backward([text_datum()], "cross_entropy")
                step = training.optim_step(tinker.AdamParams(learning_rate=0.1))
                assert loss.result(120).metrics["loss:sum"] == pytest.approx(5 / (1 + self.sdk_rounds))
                assert step.result(120).metrics is not None
                self.sdk_rounds += 1


async def hand_over(cluster: Cluster, load: Load, end: Callable[[Process], Awaitable[None]], times: int) -> list[float]:
    """Replaces gateways under load; returns the longest time without an answer of each handover, in seconds."""
    gateway = await cluster.add()
    await cluster.ready(gateway)
    probe, gaps = Probe(cluster.url), []

    async def replace() -> None:
        nonlocal gateway
        await eventually(lambda: load.steps > CLIENTS and load.sdk_rounds > 0, 120)
        for _ in range(times):
            successor = await cluster.add()
            await check_waiting(successor)
            async with probe.watching():
                await end(gateway)
                await cluster.ready(successor)
                gateway = successor
                steps, rounds = load.steps, load.sdk_rounds
                await eventually(lambda: load.steps > steps + CLIENTS and load.sdk_rounds > rounds, 120)  # noqa: B023
            gaps.append(round(probe.longest_s, 2))

    await load.run(replace)
    return gaps


async def stop(gateway: Process) -> None:
    """Stops a gateway as Kubernetes does."""
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(gateway.process.wait(), 120) == 0


async def kill(gateway: Process) -> None:
    """Kills a gateway with SIGKILL."""
    assert gateway.process is not None
    gateway.process.kill()
    await gateway.process.wait()


async def test_three_rolling_restarts_under_load_lose_no_future(cluster: Cluster) -> None:
    load = Load(cluster)
    gaps = await hand_over(cluster, load, stop, HANDOVERS)
    print(f"{load.steps + load.sdk_rounds} steps, {len(load.samples)} samples, 0 lost; without an answer for {gaps} s")
    check_once(cluster, load)
    assert sorted(cluster.stand.sampler.completed) == sorted(load.samples), "each sample must run once"


async def test_a_killed_gateway_is_replaced_and_loses_no_future(cluster: Cluster) -> None:
    load = Load(cluster)
    gaps = await hand_over(cluster, load, kill, 2)
    check_once(cluster, load)
    assert set(load.samples) <= set(cluster.stand.sampler.completed), "running samples must run again"
    print(f"without an answer for {gaps} s; half a second where the machine is free")


def check_once(cluster: Cluster, load: Load) -> None:
    """Checks that the trainer ran each command once."""
    trainer = cluster.stand.trainer
    assert len(trainer.of("ForwardBackward")) == load.losses + load.sdk_rounds, "each loss must be computed once"
    assert len(trainer.of("OptimStep")) == load.steps + load.sdk_rounds, "each step must run once"


async def check_waiting(gateway: Process) -> None:
    """Checks that it is alive and refuses all requests with a status that clients retry."""
    async with gateway.http() as http:
        refused = await http.get("sessions")
    assert refused.status_code == 503
    assert refused.json()["reason"] == "UNAVAILABLE"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="waiting for the previous one to exit") as caught:
            await stub.CreateSession(gateway_pb2.CreateSessionRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_that_restarts_under_load_costs_no_future(cluster: Cluster, postgresql: Server) -> None:
    gateway = await cluster.add()
    await cluster.ready(gateway)
    load = Load(cluster)

    async def restart_twice() -> None:
        for number in (signal.SIGINT, signal.SIGQUIT):
            steps = load.steps
            await eventually(lambda: load.steps > steps + CLIENTS, 120)  # noqa: B023
            await asyncio.to_thread(postgresql.stop, number)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(postgresql.start)
        steps = load.steps
        await eventually(lambda: load.steps > steps + CLIENTS, 120)

    await load.run(restart_twice)
    assert gateway.process is not None
    assert gateway.process.returncode is None
    trainer = cluster.stand.trainer
    assert len(trainer.of("OptimStep")) == load.steps + load.sdk_rounds
    assert sorted(cluster.stand.sampler.completed) == sorted(load.samples)


async def test_a_wrong_password_is_reported_and_not_shown(cluster: Cluster, postgresql: Server) -> None:
    gateway = Process(cluster.stand)
    process = await gateway.start(database_url="postgresql://fovea:s3cret@127.0.0.1:nowhere/postgres")
    assert process.stderr is not None
    told = (await process.stderr.read()).decode()
    assert "database_url cannot be read" in told
    assert "s3cret" not in told
    assert process.returncode == 1


def test_a_server_that_refuses_is_told_from_one_that_cannot_be_reached(postgresql: Server) -> None:
    url = postgresql.url()
    check_connection(url)
    with pytest.raises(Unavailable, match=r'^PostgreSQL nowhere at 127\.0\.0\.1:\d+: .*"nowhere" does not exist$'):
        check_connection(f"{url.rpartition('/')[0]}/nowhere")
    with pytest.raises(Unavailable, match=r"^PostgreSQL fovea at 127\.0\.0\.1:\d+ cannot be reached: .*refused"):
        check_connection(f"postgresql://fovea@127.0.0.1:{free_ports(1)[0]}/fovea")
