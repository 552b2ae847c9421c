"""A trainer of several nodes computes the same as one node, and its nodes end together for any cause."""

import asyncio
import os
import re
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.client import TrainerClient
from fovea.runtime.hosts import free_ports
from fovea.wire.errors import Unavailable
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.copied_trainer import CopiedTrainer
from tests.e2e.trainer.examples import datum, datums_of, header, logprobs_of, text
from tests.e2e.trainer.two_nodes import TwoNodes
from tests.processes import survivors

LORA = weights_pb2.LoraConfig(rank=8, seed=7, train_attention=True, train_mlp=True, train_vision=True)
WAIT_S = 90.0


@pytest.fixture
async def start(qwen3_vl: Bench, tmp_path: Path) -> AsyncIterator[Callable[[int, int], TwoNodes]]:
    started = []

    def begin(leader: int, follower: int) -> TwoNodes:
        started.append(
            TwoNodes(
                qwen3_vl.model_dir, tmp_path, (leader, follower), "--rendezvous-timeout-s", "120", "--drain-s", "120"
            )
        )
        return started[-1]

    yield begin
    for nodes in started:
        nodes.kill()


async def test_one_rank_each(qwen3_vl: Bench, start: Callable[[int, int], TwoNodes]) -> None:
    """As many ranks as the single node. The node without rank 0 gets SIGTERM: the running command ends, then both
    nodes.
    """
    nodes = start(1, 1)
    client = await nodes.leader.ready()
    assert (await client.info()).world_size == 2
    await _assert_computes_the_same(client, qwen3_vl)
    follower = TrainerClient(nodes.follower.address)
    assert await follower.is_serving("", 10.0)
    await follower.close()
    page = await asyncio.to_thread(_metrics, nodes.follower.log)
    assert 'fovea_trainer_features_total{result="miss"}' in page
    assert "fovea_trainer_ranks 0.0" in page  # rank 0 counts them

    processes = nodes.processes()
    work = [datum(qwen3_vl.images.render([text(512, seed)]), seed) for seed in range(96)]
    running = asyncio.create_task(client.forward_backward(header("m", len(work)), work))
    await asyncio.sleep(0.3)
    assert not running.done()
    nodes.follower.process.terminate()
    assert len((await running).outputs) == len(work)
    assert await asyncio.to_thread(nodes.follower.process.wait, WAIT_S) == 0, nodes.logs()
    assert await asyncio.to_thread(nodes.leader.process.wait, WAIT_S) == 1, nodes.logs()
    assert "node 1 was asked to stop" in nodes.leader.log.read_text()
    assert not survivors(processes, WAIT_S)
    await client.close()


async def test_more_ranks_on_one_than_on_the_other(qwen3_vl: Bench, start: Callable[[int, int], TwoNodes]) -> None:
    """A rank of the other node is killed: all processes end and report its number."""
    nodes = start(1, 2)
    client = await nodes.leader.ready()
    assert (await client.info()).world_size == 3
    await _assert_computes_the_same(client, qwen3_vl)

    processes = nodes.processes()
    os.kill(nodes.follower.rank_pids()[1], signal.SIGKILL)
    with pytest.raises(Unavailable):
        await client.optim_step("m", adam(), timeout_s=WAIT_S)
    for node in (nodes.leader, nodes.follower):
        assert await asyncio.to_thread(node.process.wait, WAIT_S) == 1
        assert "rank 2 on node 1 died" in node.log.read_text()
    assert not survivors(processes, WAIT_S)
    await client.close()


async def test_node_0_never_comes(qwen3_vl: Bench, tmp_path: Path) -> None:
    node = _lone_node(qwen3_vl, tmp_path, 1, 1, "1")
    assert await asyncio.to_thread(node.process.wait, WAIT_S) == 1
    _, said = node.log.read_text().splitlines()
    assert said.startswith("trainer: node 1: node 0 at 127.0.0.1:1 cannot be reached")


async def test_told_to_stop_while_it_waits_for_others(qwen3_vl: Bench, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    node = _lone_node(qwen3_vl, tmp_path, 0, port, "600")
    while not _listens(port):
        assert node.process.poll() is None, node.log.read_text()
        await asyncio.sleep(0.1)
    assert await asyncio.to_thread(node.stop, WAIT_S) == 0, node.log.read_text()


def _lone_node(bench: Bench, folder: Path, node: int, port: int, timeout_s: str) -> CopiedTrainer:
    place = ["--nodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return CopiedTrainer(bench.model_dir, folder / "node.log", *place, "--rendezvous-timeout-s", timeout_s)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def _assert_computes_the_same(client: TrainerClient, bench: Bench) -> None:
    """Compares log-probabilities and loss before and after a step with one node of two ranks."""
    datums = datums_of(bench.images, "mixed")
    await client.create_model("m", LORA)
    model_id = await bench.create(LORA)
    for rate in (1e-3, 0.0):
        ours = await client.forward_backward(header("m", len(datums)), datums)
        theirs = await bench.client.forward_backward(header(model_id, len(datums)), datums)
        scale = 0.0
        for one, other, given in zip(ours.outputs, theirs.outputs, datums, strict=True):
            np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), atol=2e-5)
            scale += float(np.abs(logprobs_of(other)) @ np.abs(_weights(given)))
        assert abs(ours.metrics["loss:sum"] - theirs.metrics["loss:sum"]) <= 1e-5 * scale
        for step in (client.optim_step("m", _descent(rate)), bench.client.optim_step(model_id, _descent(rate))):
            await step


def _descent(rate: float) -> trainer_pb2.AdamParams:
    """Returns plain gradient descent: AdamW with a huge eps."""
    return adam(learning_rate=rate * 1e10, eps=1e10)


def _weights(given: trainer_pb2.Datum) -> np.ndarray:
    return np.frombuffer(given.loss_inputs["weights"].data, np.float32)


def _metrics(log: Path) -> str:
    found = re.search(r"metrics on (\S+)", log.read_text())
    assert found
    with urllib.request.urlopen(f"http://{found.group(1)}/metrics") as page:
        return str(page.read().decode())
