"""Ranks that die, signals, and what remains: clear errors within seconds, a telling exit status, no process."""

import asyncio
import os
import re
import signal
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import tinyvlm
from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.client import TrainerClient
from fovea.wire.errors import Unavailable
from tests.e2e.trainer.conftest import adam
from tests.e2e.trainer.examples import datum, header, logprobs_of, text
from tests.e2e.trainer.image_service import ImageService
from tests.e2e.trainer.trainer_process import TrainerProcess
from tests.processes import survivors
from tests.waiting import eventually

SECONDS = 10.0


class Victim:
    """A trainer that a test may kill."""

    def __init__(self, folder: Path) -> None:
        model_dir = tinyvlm.ensure("qwen3")
        self.images = ImageService(model_dir, None)
        self.process = TrainerProcess(
            model_dir, folder / "trainer.log", "--heartbeat-s", "1", "--metrics-port", "0", "--drain-s", "120"
        )
        self.client: TrainerClient

    async def start(self) -> None:
        self.client = await self.process.ready()
        lora = weights_pb2.LoraConfig(rank=4, train_attention=True, train_mlp=True)
        await self.client.create_model("m", lora)
        root = psutil.Process(self.process.process.pid)
        self.processes = [root, *root.children(recursive=True)]

    def work(self, count: int) -> list[trainer_pb2.Datum]:
        return [datum(self.images.render([text(512, seed)]), seed) for seed in range(count)]

    async def expect_the_end(self) -> None:
        """Commands fail at once, it no longer says that it holds models, the whole trainer ends with status 1."""
        with pytest.raises(Unavailable):
            await self.client.optim_step("m", adam(), timeout_s=SECONDS)
        with pytest.raises(Unavailable):
            await self.client.info(timeout_s=SECONDS)
        assert await asyncio.to_thread(self.process.process.wait, 30) == 1
        assert not survivors(self.processes, SECONDS)


@pytest.fixture
async def victim(tmp_path: Path) -> AsyncIterator[Victim]:
    started = Victim(tmp_path)
    try:
        await started.start()
        yield started
        await started.client.close()
    finally:
        started.images.close()
        started.process.process.kill()
        started.process.process.wait()


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_while_computing(victim: Victim, rank: int) -> None:
    running = asyncio.create_task(victim.client.forward_backward(header("m", 256), victim.work(256)))
    await asyncio.sleep(1.0)
    assert not running.done()
    os.kill(victim.process.rank_pids()[rank], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(Unavailable, match="rank 1 of the trainer died" if rank else None):
        await running
    assert time.monotonic() - killed < SECONDS
    await victim.expect_the_end()
    if rank:
        assert "rank 1 is gone" in victim.process.log.read_text()


async def test_rank_killed_while_idle(victim: Victim) -> None:
    await asyncio.sleep(2.5)
    (output,) = (await victim.client.forward_backward(header("m", 1), victim.work(1))).outputs
    assert len(logprobs_of(output)) == 512
    os.kill(victim.process.rank_pids()[1], signal.SIGKILL)
    await victim.expect_the_end()
    assert "rank 1 is gone" in victim.process.log.read_text()


async def test_sigterm_ends_what_runs_first(victim: Victim) -> None:
    """Health, info, reflection and metrics answer while a command runs; a stop waits for it."""
    held = psutil.Process(victim.process.rank_pids()[1])
    held.suspend()  # the command ends when we want, on every machine
    running = asyncio.create_task(victim.client.forward_backward(header("m", 16), victim.work(16)))
    await asyncio.sleep(0.2)
    assert (await victim.client.info(timeout_s=SECONDS)).world_size == 2
    assert await victim.client.is_serving("fovea.api.v1.TrainerService", SECONDS)
    assert {"fovea.api.v1.TrainerService", "grpc.health.v1.Health"} <= await _reflected(victim.process.address)
    page = await asyncio.to_thread(_metrics, victim.process.log)
    assert 'fovea_trainer_commands_total{command="CreateModel",outcome="OK"} 1.0' in page
    victim.process.process.terminate()
    await eventually(lambda: "stopping: up to 120 s" in victim.process.log.read_text(), SECONDS)
    assert not running.done()
    held.resume()
    assert len((await running).outputs) == 16
    assert await asyncio.to_thread(victim.process.process.wait, 40) == 0
    assert not survivors(victim.processes, SECONDS)


async def _reflected(address: str) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    return {service.name for service in answers[0].list_services_response.service}


def _metrics(log: Path) -> str:
    found = re.search(r"metrics on (\S+)", log.read_text())
    assert found
    with urllib.request.urlopen(f"http://{found.group(1)}/metrics") as page:
        return str(page.read().decode())
