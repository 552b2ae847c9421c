"""Many tenants on storage that is too slow and a device that is too small, with a kill in the middle."""

import asyncio
import os
import re
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

import fovea_tinyvlm
from fovea.api.v1 import weights_pb2
from fovea.client import TrainerClient
from fovea.runtime.hosts import free_ports
from fovea.wire.errors import NotFound, StorageBehind
from tests.e2e.trainer.conftest import adam
from tests.e2e.trainer.examples import datum, header, logprobs_of, text
from tests.e2e.trainer.image_service import ImageService
from tests.e2e.trainer.receiving_sampler import ReceivingSampler
from tests.e2e.trainer.test_slow_storage import install
from tests.e2e.trainer.trainer_process import TrainerProcess

T = TypeVar("T")
TENANTS, STEPS, KILL_AFTER = 12, 8, 4
LORA = weights_pb2.LoraConfig(rank=8, seed=3, train_attention=True, train_mlp=True, train_unembedding=True)
BYTES_PER_S, BOUND_MIB, DEVICE_MIB = 2_000_000, 1, 3
AT_START_BYTES = 2**20


@dataclass
class Tenant:
    """A minimal gateway: it numbers its commands, stores them with their answers, and repeats them after a restart."""

    model_id: str
    seed: int
    images: ImageService
    answers: dict[int, Any] = field(default_factory=dict)
    snapshots: dict[int, weights_pb2.Snapshot] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    async def train(self, client: TrainerClient, steps: int) -> None:
        """Runs a pass, a step and a sampling client in a loop."""
        for seq_id in range(len(self.answers) + 1, 2 * steps + 1):
            self.answers[seq_id] = await self._command(client, seq_id)

    async def restore(self, client: TrainerClient) -> int:
        """Returns the last command of the durable point. Repeated later commands must give the same answers."""
        try:
            durable = (await client.restore_model(self.model_id, LORA)).seq_id
        except NotFound:
            await client.create_model(self.model_id, LORA)
            durable = 0
        if durable in self.snapshots:  # it is newer than the durable point, so the test repeats it
            assert await self._take(client, durable) == self.snapshots[durable]
        for seq_id in range(durable + 1, len(self.answers) + 1):
            assert await self._command(client, seq_id) == self.answers[seq_id], f"command {seq_id} after {durable}"
        return durable

    async def _command(self, client: TrainerClient, seq_id: int) -> Any:
        if seq_id % 2 == 0:
            response = await self._patiently(
                lambda: client.optim_step(self.model_id, adam(learning_rate=1e-2), None, seq_id)
            )
            assert response.seconds > 0
            taken = await self._take(client, seq_id)
            assert taken == self.snapshots.setdefault(seq_id, taken)
            return dict(response.metrics.values), response.step
        datums = [datum(self.images.render([text(12 + n, self.seed + seq_id + n)]), seq_id + n) for n in range(2)]
        numbered = header(self.model_id, len(datums))
        numbered.seq_id = seq_id
        result = await client.forward_backward(numbered, datums)
        return dict(result.metrics), [logprobs_of(output).tolist() for output in result.outputs]

    async def _take(self, client: TrainerClient, seq_id: int) -> weights_pb2.Snapshot:
        return await self._patiently(lambda: client.take_snapshot(self.model_id, f"{self.model_id}@{seq_id}"))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except StorageBehind as behind:
                self.refused.append(behind.message)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def slow_disk(folder: Path) -> AsyncIterator[None]:
    """Limits a `credit://` disk to a number of bytes per second from now on."""
    credit, begun = folder / "credit", time.monotonic()

    async def grant() -> None:
        while True:
            aside = credit.with_suffix(".new")
            aside.write_text(str(AT_START_BYTES + int((time.monotonic() - begun) * BYTES_PER_S)))
            aside.replace(credit)
            await asyncio.sleep(0.02)

    granting = asyncio.create_task(grant())
    yield
    granting.cancel()
    credit.write_text(str(2**50))


def metric(port: int, name: str) -> float:
    """Returns a gauge of the trainer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        found = re.search(rf"^fovea_trainer_{name} (\S+)", page.read().decode(), re.MULTILINE)
    assert found
    return float(found[1])


async def test_killed_while_storage_is_behind_and_models_are_away_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = fovea_tinyvlm.ensure("qwen3")
    images, sampler, (metrics_port,) = ImageService(model_dir, None), ReceivingSampler(), free_ports(1)
    await sampler.start()
    (tmp_path / "trainer").mkdir()

    def trainer(name: str, *arguments: str) -> TrainerProcess:
        return TrainerProcess(
            model_dir, tmp_path / "trainer" / f"{name}.log", "--dtype", "bfloat16", *arguments, ranks=1
        )

    alone = trainer("alone", "--recovery", "")
    client = await alone.ready()
    undisturbed = [Tenant(f"u{number}", number, images) for number in range(TENANTS)]
    for tenant in undisturbed:
        await client.create_model(tenant.model_id, LORA)
        await tenant.train(client, STEPS)
    await client.close()
    assert alone.stop() == 0

    install(tmp_path / "packages", tmp_path / "credit")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    options = (
        *("--recovery", f"credit://{tmp_path}/recovery", "--snapshot-memory-mib", str(BOUND_MIB)),
        *("--model-memory-mib", str(DEVICE_MIB), "--recovery-most-lag-s", "2", "--metrics-port", str(metrics_port)),
    )
    tenants = [Tenant(f"m{number}", number, images) for number in range(TENANTS)]
    (tmp_path / "credit").write_text(str(AT_START_BYTES))
    first = trainer("first", *options)
    client = await first.ready()
    async with slow_disk(tmp_path):  # a slow start must not earn credit, with which storage would keep up
        for tenant in tenants:
            await client.create_model(tenant.model_id, LORA)
        training = asyncio.gather(*(tenant.train(client, KILL_AFTER) for tenant in tenants))
        most_waiting = 0.0
        while not training.done():
            waiting = await asyncio.to_thread(metric, metrics_port, "durable_waiting_bytes")
            most_waiting = max(most_waiting, waiting)
            await asyncio.sleep(0.05)
        await training
        on_host = await asyncio.to_thread(metric, metrics_port, "models_on_host")
        for pid in [*first.rank_pids(), first.process.pid]:
            signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
        first.process.wait()
        await client.close()

        second = trainer("second", *options)
        client = await second.ready()
        durable = [await tenant.restore(client) for tenant in tenants]
        for tenant in tenants:
            for seq_id, snapshot in tenant.snapshots.items():  # from memory, or from before the kill
                name = f"{tenant.model_id}@{seq_id}"
                pushed = await client.push_snapshot(name, [sampler.address])
                assert pushed.snapshot.digest == snapshot.digest
        await asyncio.gather(*(tenant.train(client, STEPS) for tenant in tenants))
    refused = [words for tenant in tenants for words in tenant.refused]
    print(
        f"{TENANTS} tenants, killed after {KILL_AFTER} steps each; the points had commands {durable} of "
        f"{2 * KILL_AFTER}; {len(refused)} refusals; at most {most_waiting / 2**20:.2f} MiB of snapshots waited; "
        f"{on_host:.0f} models were away"
    )
    assert [tenant.answers for tenant in tenants] == [tenant.answers for tenant in undisturbed]
    for tenant, other in zip(tenants, undisturbed, strict=True):
        assert [one.digest for one in tenant.snapshots.values()] == [one.digest for one in other.snapshots.values()]
    assert on_host >= TENANTS / 3
    assert any(durable)
    assert min(durable) < 2 * KILL_AFTER, "some commands must be computed again"
    assert any("snapshot-memory-mib" in words for words in refused)
    assert any("states and snapshots" in words for words in refused)
    assert most_waiting <= BOUND_MIB * 2**20
    await client.close()
    assert second.stop() == 0
    images.close()
    await sampler.stop()
