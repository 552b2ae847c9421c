"""SIGTERM to a trainer: it finishes the running command and answers until then."""

import asyncio
import re
import urllib.request

import grpc
import psutil
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fovea.api.v1 import weights_pb2
from tests.e2e.trainer.breaking.ground import SECONDS, Ground
from tests.e2e.trainer.examples import datum, header, text
from tests.processes import survivors
from tests.waiting import eventually


async def test_sigterm_ends_what_runs_first(ground: Ground) -> None:
    """Health, info, reflection and metrics answer while a command runs, and a stop waits for the command."""
    client = await ground.any_trainer()
    process, processes = ground.running, ground.processes()
    await client.create_model("m", weights_pb2.LoraConfig(rank=4, train_attention=True, train_mlp=True))
    work = [datum(ground.images.render([text(512, seed)]), seed) for seed in range(16)]
    held = psutil.Process(process.rank_pids()[1])
    held.suspend()  # the test decides when the command ends, on every machine
    running = asyncio.create_task(client.forward_backward(header("m", 16), work))
    await asyncio.sleep(0.2)
    assert (await client.info(timeout_s=SECONDS)).world_size == 2
    assert await client.is_serving("fovea.api.v1.TrainerService", SECONDS)
    assert {"fovea.api.v1.TrainerService", "grpc.health.v1.Health"} <= await _reflected(process.address)
    page = await asyncio.to_thread(_page, ground.metrics_address())
    assert re.search(r'fovea_trainer_commands_total{command="CreateModel",outcome="OK"} [1-9]', page)
    process.process.terminate()
    await eventually(lambda: "calls in flight have up to 120 s" in process.log.read_text(), SECONDS)
    assert not running.done()
    held.resume()
    assert len((await running).outputs) == 16
    assert await asyncio.to_thread(process.process.wait, 40) == 0
    assert not survivors(processes, SECONDS)


async def _reflected(address: str) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    return {service.name for service in answers[0].list_services_response.service}


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        return str(page.read().decode())
