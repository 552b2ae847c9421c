"""`python -m gateway` as a process: starts, shows metrics, drains at SIGTERM, takes up its work again."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.contract.gateway.conftest import KEY, Stand, eventually
from tests.contract.gateway.fakes import MODEL
from tests.contract.gateway.requests import Rest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A gateway process before the fakes of a stand."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.port, self.metrics_port = free_port(), free_port()
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> asyncio.subprocess.Process:
        """Starts it and waits until it answers, or ends."""
        arguments = {
            "model-name": MODEL, "model": "/models/fake", "renderer": self.stand.renderer.address,
            "sampler": self.stand.sampler.address, "trainer": self.stand.trainer.address, "port": self.port,
            "metrics-port": self.metrics_port, "state-dir": self.stand.state_dir, "drain-s": 10,
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in arguments.items()]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *flags, stderr=asyncio.subprocess.PIPE
        )
        process = self.process

        async def answers() -> bool:
            if process.returncode is not None:
                return True
            try:
                async with httpx.AsyncClient() as http:
                    return (await http.get(f"http://127.0.0.1:{self.port}/api/v1/healthz")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answers, 60)
        return process

    def http(self) -> httpx.AsyncClient:
        """A client of it."""
        base_url = f"http://127.0.0.1:{self.port}/api/v1/"
        return httpx.AsyncClient(base_url=base_url, headers={"X-API-Key": KEY}, timeout=60)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    """The process is started by the test."""
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
        trainer.open.clear()
        ids = [(await rest.forward_backward(model_id, seq_id)).json()["request_id"] for seq_id in (1, 2)]
        poll = asyncio.create_task(rest.poll(ids[0]))
        await eventually(lambda: "ForwardBackward" in trainer.names())
        running.send_signal(signal.SIGTERM)
        assert (await poll).status_code == 408, "who polls is let go"
        trainer.open.set()
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
