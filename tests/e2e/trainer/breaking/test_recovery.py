"""A trainer that is killed at any moment restores its models, and repeated commands give the same bits."""

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.api.v1 import weights_pb2
from fovea.client import TrainerClient
from fovea.wire.conventions import STAGING_SUFFIX
from fovea.wire.errors import NotFound, ResourceExhausted, Unavailable
from fovea_trainer.recovery.recovery_folder import STORE
from tests.e2e.trainer.breaking.ground import Ground
from tests.e2e.trainer.conftest import adam
from tests.e2e.trainer.examples import datum, header, logprobs_of, text
from tests.e2e.trainer.image_service import ImageService
from tests.e2e.trainer.receiving_sampler import ReceivingSampler

STEPS = 6
COMMANDS = 3 * STEPS
LORA = weights_pb2.LoraConfig(rank=4, seed=3, train_attention=True, train_mlp=True, train_unembedding=True)
KINDS = {"adapter": LORA, "full": None}
SHARED = ("--token-budget", "28")
"""With these options both ranks compute each datum of more than 28 tokens together, which is half of all."""
REPLICAS = ("--ranks", "4", "--replicas", "2", "--keep-gathered", "never", *SHARED)
"""Two replicas, each sharded over two ranks; up to four ranks compute a datum together."""


@dataclass
class Gateway:
    """A minimal gateway: it numbers commands, records them, and repeats those that a restored model has not seen.

    Answers are stored by number; a repeated one must be equal.
    """

    images: ImageService
    model_id: str
    lora: weights_pb2.LoraConfig | None
    answers: dict[int, Any] = field(default_factory=dict)
    snapshot: weights_pb2.Snapshot | None = None

    async def create(self, client: TrainerClient) -> None:
        await client.create_model(self.model_id, self.lora)

    async def train(self, client: TrainerClient, until: int = COMMANDS) -> None:
        """Sends all commands without an answer: two passes and a step in a loop, with a snapshot
        after the second step.
        """
        for seq_id in range(len(self.answers) + 1, until + 1):
            self.answers[seq_id] = await self.command(client, seq_id)

    async def command(self, client: TrainerClient, seq_id: int) -> Any:
        step, place = divmod(seq_id - 1, 3)
        if place == 2:
            adam_params = adam(learning_rate=1e-2 / (1 + step))
            response = await client.optim_step(self.model_id, adam_params, seq_id=seq_id)
            if step == 1 and self.lora is not None:
                taken = await client.take_snapshot(self.model_id, f"{self.model_id}@2")
                assert taken == (self.snapshot or taken)
                self.snapshot = taken
            return dict(response.metrics.values), response.step
        datums = [datum(self.images.render([text(24 + 3 * n, seq_id + n)]), seq_id + n) for n in range(4)]
        numbered = header(self.model_id, len(datums))
        numbered.seq_id = seq_id
        result = await client.forward_backward(numbered, datums)
        return dict(result.metrics), [logprobs_of(output).tolist() for output in result.outputs]

    async def restore(self, client: TrainerClient) -> int:
        """Restores the model up to its last answer; returns the last command of the durable point."""
        try:
            durable = (await client.restore_model(self.model_id, self.lora)).seq_id
        except NotFound:
            await self.create(client)
            durable = 0
        for seq_id in range(
            max(durable, 1), len(self.answers) + 1
        ):  # including the durable command, which has an answer
            assert await self.command(client, seq_id) == self.answers[seq_id], f"command {seq_id} after {durable}"
        return durable


@pytest.fixture
async def sampler() -> AsyncIterator[ReceivingSampler]:
    started = ReceivingSampler()
    await started.start()
    yield started
    await started.stop()


async def _until_durable(client: TrainerClient, model_id: str, seq_id: int) -> None:
    deadline = time.monotonic() + 20
    while (await client.info()).durable_seq_ids.get(model_id, 0) < seq_id:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def flip(path: Path) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "victims", "options"),
    [
        pytest.param("adapter", (1, None), (), id="adapter"),
        pytest.param("full", (0,), (), id="full"),
        pytest.param("adapter", (0,), SHARED, id="adapter-shared", marks=pytest.mark.long),
        pytest.param("full", (1,), SHARED, id="full-shared", marks=pytest.mark.long),
        pytest.param("adapter", (2,), REPLICAS, id="adapter-replicas", marks=pytest.mark.long),
        pytest.param("full", (3,), REPLICAS, id="full-replicas"),
    ],
)
async def test_killed_at_any_moment_it_comes_back_as_it_was(
    ground: Ground, kind: str, victims: tuple[int | None, ...], options: tuple[str, ...]
) -> None:
    """Kills any rank or the launcher; callers and the rest of the trainer notice it.

    `make long` runs the other variants, including replicas that share datums.
    """
    chance = random.Random(kind)
    client = await ground.trainer(*options)
    undisturbed = Gateway(ground.images, f"u-{kind}", KINDS[kind])
    await undisturbed.create(client)
    ends = [time.monotonic()]
    for seq_id in range(1, COMMANDS + 1):
        await undisturbed.train(client, seq_id)
        ends.append(time.monotonic())
    shortest_s = min(later - earlier for earlier, later in pairwise(ends))
    expected = await ground.weights(undisturbed.model_id)
    await client.delete_model(undisturbed.model_id)
    assert not list(ground.kept.glob(f"{undisturbed.model_id}/*"))
    disturbed = Gateway(ground.images, f"d-{kind}", KINDS[kind])
    await disturbed.create(client)
    restored = []
    for victim, answered in zip(victims, sorted(chance.sample(range(7, COMMANDS - 4), len(victims))), strict=True):
        await disturbed.train(client, answered)
        training = asyncio.create_task(disturbed.train(client))  # at least five commands, of which one may end
        await asyncio.sleep(chance.uniform(0.0, shortest_s))
        await ground.kill(victim, disturbed.model_id, training)
        client = await ground.trainer(*options)
        restored.append(await disturbed.restore(client))
    assert any(restored), "a durable point must exist before a kill"
    await disturbed.train(client)
    assert disturbed.answers == undisturbed.answers
    found = await ground.weights(disturbed.model_id)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


async def test_another_number_of_ranks_takes_the_models_as_they_are(ground: Ground, sampler: ReceivingSampler) -> None:
    """First two replicas of two ranks, which also push all parameters, then one rank, then two replicas of one."""
    client = await ground.trainer(*REPLICAS)
    gateways = [Gateway(ground.images, model_id, lora) for model_id, lora in KINDS.items()]
    before = {}
    for gateway in gateways:  # one after the other, because a full model needs the whole trainer
        await gateway.create(client)
        await gateway.train(client, 6)
        before[gateway.model_id] = await ground.weights(gateway.model_id)
        pushed = await client.push_snapshot(f"{gateway.model_id}@end-{ground.count}", [sampler.address])
        assert [result.error for result in pushed.results] == [""]
        for name, tensor in sampler.received[pushed.snapshot.snapshot_id].items() if gateway.lora is None else ():
            assert torch.equal(tensor, before["full"][f"model-00001.safetensors/{name}"])
        assert (await client.park_model(gateway.model_id)).seq_id == 6
    numerics = (await client.info()).numerics
    assert (numerics["ranks"], numerics["replicas"]) == ("4", "2")
    await ground.stop()

    client = await ground.trainer("--ranks", "1")
    for gateway in gateways:
        restored = await client.restore_model(gateway.model_id, gateway.lora)
        assert (restored.seq_id, restored.step) == (6, 2)
        in_the_way = next(other for other in gateways if other is not gateway)
        with pytest.raises(ResourceExhausted):  # a restored model waits for a free place
            await client.restore_model(in_the_way.model_id, in_the_way.lora)
        after = await ground.weights(gateway.model_id)
        assert all(torch.equal(after[name], tensor) for name, tensor in before[gateway.model_id].items())
        await gateway.train(client, 9)
        await client.park_model(gateway.model_id)
    said = "different numerics than before: ranks 1 instead of 4, replicas 1 instead of 2"
    assert ground.running.log.read_text().count(said) == 2
    await ground.stop()

    client = await ground.trainer("--replicas", "2")
    restored = await client.restore_model("full", None)
    assert (restored.seq_id, restored.step) == (9, 3)
    await gateways[1].train(client, 12)
    await client.park_model("full")
    assert (await client.restore_model("full", None)).step == 4
    await client.park_model("full")
    shard = next((ground.kept / "full" / "12" / "dcp").glob("*.distcp"))
    flip(shard)
    with pytest.raises(NotFound, match=f"damaged, dcp/{shard.name} does not match the recorded checksum"):
        await client.restore_model("full", None)


async def test_storage_that_fails_parking_snapshots_and_damage(
    ground: Ground, sampler: ReceivingSampler, tmp_path: Path
) -> None:
    """An adapter on a bfloat16 base. A rank is killed while the trainer is idle."""
    base = ("--dtype", "bfloat16")
    await ground.stop()
    shutil.rmtree(ground.kept, ignore_errors=True)
    ground.kept.write_text("a file is in the way: no folder can be made")
    client = await ground.trainer(*base)
    gateway = Gateway(ground.images, "a.b/c", LORA)
    await gateway.create(client)
    await gateway.train(client, 6)
    with pytest.raises(Unavailable, match="cannot be made durable"):
        await client.park_model("a.b/c")
    info = await client.info()
    assert (info.keeps_recovery, dict(info.durable_seq_ids)) == (True, {})
    ground.kept.unlink()
    await gateway.train(client, 9)
    await _until_durable(client, "a.b/c", 9)
    first = tmp_path / "first"
    shutil.copytree(ground.kept / "a%2Eb%2Fc" / "9", first)
    await gateway.train(client, 12)
    parked = await client.park_model("a.b/c")
    size_bytes = sum(path.stat().st_size for path in (ground.kept / "a%2Eb%2Fc").rglob("*") if path.is_file())
    assert (parked.seq_id, parked.size_bytes) == (12, size_bytes)
    assert await client.park_model("a.b/c") == parked
    info = await client.info(with_kept=True)
    assert (list(info.model_ids), list(info.kept_model_ids)) == ([], ["a.b/c"])
    assert await gateway.restore(client) == 12
    await asyncio.sleep(2.5)  # idle ranks have exchanged heartbeats
    await ground.kill(1, "a.b/c")

    flip(ground.kept / "a%2Eb%2Fc" / "12" / "optimizer.safetensors")
    shutil.copytree(first, ground.kept / "a%2Eb%2Fc" / "9")
    shutil.copytree(first, ground.kept / "a%2Eb%2Fc" / f"15{STAGING_SUFFIX}1")
    client = await ground.trainer(*base)
    assert await gateway.restore(client) == 9
    await _until_durable(client, "a.b/c", 12)
    assert not list(ground.kept.rglob(f"*{STAGING_SUFFIX}*"))
    response = await client.push_snapshot("a.b/c@2", [sampler.address])
    assert response.snapshot == gateway.snapshot
    await client.forget_snapshot("a.b/c@2")
    with pytest.raises(NotFound, match="neither in memory nor in the recovery store"):
        await client.push_snapshot("a.b/c@2", [sampler.address])
    await client.delete_model("a.b/c")
    assert [path.name for path in ground.kept.iterdir()] == [STORE]
    with pytest.raises(NotFound, match="no durable point"):
        await client.restore_model("a.b/c", LORA)
