"""`python -m fovea_gateway` as a process: it starts, serves metrics, drains on SIGTERM and resumes its work."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fovea.runtime.hosts import free_ports
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import PROTOBUF, Rest
from tests.waiting import eventually


class Process:
    """A gateway process with the fake services of a stand."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.port, self.metrics_port = free_ports(1)[0], free_ports(1)[0]
        self.grpc_port = free_ports(1)[0]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, route: str = "sessions", **more: object) -> asyncio.subprocess.Process:
        """Starts the gateway and waits until `route` answers or the process ends."""
        arguments = {
            "model-name": MODEL, "model": "/models/fake", "renderer": self.stand.renderer.address,
            "sampler": self.stand.sampler.address, "trainer": self.stand.trainer.address, "port": self.port,
            "metrics-port": self.metrics_port, "state-dir": self.stand.state_dir, "drain-s": 10,
            "grpc-port": self.grpc_port,
        }  # fmt: skip
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in (arguments | more).items()]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fovea_gateway", *flags, stderr=asyncio.subprocess.PIPE
        )
        process = self.process

        async def answers() -> bool:
            if process.returncode is not None:
                return True
            try:
                async with self.http() as http:
                    return (await http.get(route)).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answers, 60)
        return process

    async def is_draining(self) -> bool:
        """Returns whether its health check says NOT_SERVING."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return bool(health.status == health_pb2.HealthCheckResponse.NOT_SERVING)

    def http(self) -> httpx.AsyncClient:
        """An HTTP client of the gateway."""
        base_url = f"http://127.0.0.1:{self.port}/api/v1/"
        return httpx.AsyncClient(base_url=base_url, headers={"X-API-Key": KEY}, timeout=60)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    """A gateway process, which the test starts."""
    stand = Stand(tmp_path)
    await stand.start_fakes()
    gateway = Process(stand)
    yield gateway
    if gateway.process is not None and gateway.process.returncode is None:
        gateway.process.kill()
        await gateway.process.wait()
    await stand.stop_fakes()


async def test_sigterm_lets_the_running_command_end_and_keeps_the_queue(process: Process) -> None:
    running = await process.start()
    trainer = process.stand.trainer
    async with process.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        await eventually(lambda: _serves(process))
        trainer.open.clear()
        ids = [(await rest.forward_backward(model_id, seq_id)).json()["request_id"] for seq_id in (1, 2)]
        poll = asyncio.create_task(rest.poll(ids[0]))
        await eventually(lambda: "ForwardBackward" in trainer.names())
        running.send_signal(signal.SIGTERM)
        await eventually(process.is_draining)  # otherwise the second command might start first
        trainer.open.set()
        assert (await poll).status_code == 200, "a poll for a running request must get its result"
        assert await asyncio.wait_for(running.wait(), 30) == 0
        assert len(trainer.of("ForwardBackward")) == 1
        await process.start()
        for request_id in ids:
            assert "error" not in await rest.result(request_id)
        assert len(trainer.of("ForwardBackward")) == 2
        metrics = (await http.get(f"http://127.0.0.1:{process.metrics_port}/metrics")).text
    assert 'fovea_gateway_futures_finished_total{kind="forward_backward",reason="OK"} 1.0' in metrics


async def test_sigkill_loses_nothing_that_was_accepted(process: Process) -> None:
    first = await process.start()
    stand = process.stand
    async with process.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        sampling_id = await rest.snapshot(model_id, 1)
        done = (await rest.optim_step(model_id, 2))["request_id"]
        result = await rest.result(done)
        stand.sampler.open.clear()
        samples = [(await rest.sample(sampling_id, seq_id)).json()["request_id"] for seq_id in range(20)]
        await eventually(lambda: stand.sampler.running == 20)
        first.kill()
        await first.wait()
        stand.sampler.open.set()
        await process.start()
        assert await rest.result(done) == result
        for request_id in samples:
            assert "sequences" in await rest.result(request_id)
        assert (await rest.post("session_heartbeat", session_id=rest.session_id)).status_code == 200


async def _serves(process: Process) -> bool:
    return not await process.is_draining()


async def submit_mixed(rest: Rest, model_id: str, first: int, rounds: int) -> dict[str, list[str]]:
    """Submits losses, steps and saves of one model in order of seq_id; returns the request ids by kind."""
    ids: dict[str, list[str]] = {"loss": [], "step": [], "save": []}
    for number in range(rounds):
        seq_id = first + 3 * number
        ids["loss"].append((await rest.forward_backward(model_id, seq_id)).json()["request_id"])
        ids["step"].append((await rest.optim_step(model_id, seq_id + 1))["request_id"])
        route, more = ("save_weights", {}) if number % 2 else ("save_weights_for_sampler", {"kind": "snapshot"})
        body = {"model_id": model_id, "seq_id": seq_id + 2, "path": f"n{seq_id}", **more}
        ids["save"].append((await rest.ok(route, **body))["request_id"])
    return ids


async def test_sigkill_while_200_futures_of_every_kind_are_pending(process: Process) -> None:
    first = await process.start()
    stand, rounds, sample_count = process.stand, 20, 80
    async with process.http() as http:
        rest = Rest(http)
        models = [await rest.create_model(0), await rest.create_model(1)]
        done = [(await submit_mixed(rest, model_id, 1, 1)) for model_id in models]
        sampling_id = await rest.snapshot(models[0], 4)
        await rest.snapshot(models[1], 4, 1)
        sampled = (await rest.sample(sampling_id, 0)).json()["request_id"]
        ended = [sampled, *(request_id for ids in done for kind in ids.values() for request_id in kind)]
        for request_id in ended:
            assert "error" not in await rest.result(request_id)
        before = [(await rest.poll(request_id, PROTOBUF)).content for request_id in ended]

        for fake in (stand.trainer, stand.sampler):
            fake.open.clear()
            fake.calls.clear()
        queued = [await submit_mixed(rest, model_id, 5, rounds) for model_id in models]
        samples = [(await rest.sample(sampling_id, number)).json()["request_id"] for number in range(1, sample_count)]
        wrong = (await rest.sample(sampling_id, sample_count, num_samples=0)).json()["request_id"]
        assert 2 * 3 * rounds + sample_count == 200
        await eventually(lambda: stand.trainer.names() == ["ForwardBackward"] * 2)
        await eventually(lambda: stand.sampler.running == sample_count - 1)
        first.kill()
        await first.wait()
        await eventually(lambda: stand.sampler.running == 0)
        interrupted = set(stand.sampler.ids())
        assert stand.sampler.completed == [sampled]
        for fake in (stand.trainer, stand.sampler):
            fake.open.set()
        await process.start()

        assert [(await rest.poll(request_id, PROTOBUF)).content for request_id in ended] == before
        for ids in queued:
            losses, steps, saves = [[await rest.result(one) for one in kind] for kind in ids.values()]
            assert not [answer for answer in (*losses, *steps, *saves) if "error" in answer]
            assert {step["metrics"]["gradients:sum"] for step in steps} == {1.0}, (
                "each step must apply its own gradients"
            )
        for request_id in samples:
            assert len((await rest.result(request_id))["sequences"]) == 1
        assert (await rest.result(wrong))["category"] == "user"
    names = stand.trainer.names()
    assert names.count("ForwardBackward") == 2 * rounds, (
        "each loss must be sent once, including those during the two kills"
    )
    assert names.count("OptimStep") == 2 * rounds
    assert names.count("SaveState") + names.count("TakeSnapshot") == 2 * rounds
    assert {model["step"] for model in stand.trainer.models.values()} == {rounds + 1}
    assert interrupted == set(samples)
    assert sorted(stand.sampler.completed) == sorted([sampled, *samples]), "no sample may be repeated or missing"


@pytest.mark.parametrize("ends", ["before the gateway is back", "after it is back"])
async def test_sigkill_while_a_step_runs(process: Process, ends: str) -> None:
    first = await process.start()
    trainer = process.stand.trainer
    async with process.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()
        assert "error" not in await rest.result((await rest.forward_backward(model_id, 1)).json()["request_id"])
        trainer.open.clear()
        step = (await rest.optim_step(model_id, 2))["request_id"]
        await eventually(lambda: trainer.waiting == 1)
        first.kill()
        await first.wait()
        if ends == "before the gateway is back":
            trainer.open.set()
            await eventually(lambda: trainer.models[model_id]["step"] == 1)
        await process.start(poll_hold_s=0.1)
        assert "error" not in (await rest.poll(step)).json()
        trainer.open.set()
        assert (await rest.result(step))["metrics"]["gradients:sum"] == 1.0, (
            "the client must learn the result of the step"
        )
        await rest.forward_backward(model_id, 3)
        last = await rest.result((await rest.optim_step(model_id, 4))["request_id"])
        assert last["metrics"]["gradients:sum"] == 1.0
    assert trainer.models[model_id]["step"] == 2
    assert [request.seq_id for request in trainer.of("OptimStep")] == [2, 4], "the step must run once"


async def test_two_gateways_never_share_a_state_folder(process: Process) -> None:
    first = await process.start()
    other = Process(process.stand)
    second = await other.start()
    assert second.stderr is not None
    assert b"another gateway uses" in await second.stderr.read()
    assert second.returncode == 1
    assert first.returncode is None


@pytest.mark.slow
async def test_a_body_of_200_mb_is_answered_413_not_read_into_memory(process: Process) -> None:
    import psutil

    running = await process.start()
    async with process.http() as http:
        rest = Rest(http)
        model_id = await rest.create_model()

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield b"\0" * 2**20

        before = psutil.Process(running.pid).memory_info().rss
        for headers in ({}, {"Content-Length": str(200 * 2**20)}):
            response = await http.post("forward_backward", content=endless(), headers=headers)
            assert response.status_code == 413
            assert "134217728 bytes" in response.json()["detail"]
        assert psutil.Process(running.pid).memory_info().rss - before < 180 * 2**20
        good = await rest.forward_backward(model_id, 1)
        assert "error" not in await rest.result(good.json()["request_id"])
