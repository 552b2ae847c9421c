"""A mixture of experts on two ranks: states, snapshots and exports store the experts in their own formats.

No file depends on whether ranks share each expert or divide the experts, and both modes load the same state.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fovea.api.v1 import model_input_pb2, weights_pb2
from fovea.wire import tensors
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.copied_trainer import CopiedTrainer
from tests.e2e.trainer.examples import datum, header
from tests.e2e.trainer.receiving_sampler import ReceivingSampler
from tests.families import ensure_family

LORA = weights_pb2.LoraConfig(rank=4, train_attention=True, train_mlp=True)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, tuple[str, dict[str, Tensor]]]:
    """The folder of a state, and the weights some steps later, of models that the first bench trained."""
    return {}


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "spread"])
async def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    scratch, directory = tmp_path_factory.mktemp("experts"), ensure_family("qwen3_moe")
    arguments = ["--keep-gathered", "never", "--token-budget", "48", "--expert-parallel", str(request.param)]
    process = CopiedTrainer(directory, scratch / "trainer.log", *arguments)
    nothing: Any = None
    running = Bench("qwen3_moe", directory, await process.ready(), process, nothing, None, scratch)
    yield running
    await running.client.close()
    assert process.stop() == 0, process.log.read_text()


async def _train(bench: Bench, model_id: str, steps: int) -> dict[str, float]:
    """Takes steps on texts; returns the metrics of the last forward_backward."""
    generator, datums = np.random.default_rng(1), []
    for seed, length in enumerate((17, 5, 40, 17, 3)):
        ids, targets = generator.integers(0, 1000, (2, length))
        rendered = model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(ids.astype(np.int32)))
        datums.append(datum(rendered, seed, target_tokens=targets))
    for _ in range(steps):
        response = await bench.client.forward_backward(header(model_id, len(datums)), datums)
        await bench.client.optim_step(model_id, adam())
    return dict(response.metrics)


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "full"])
async def test_training_goes_on_from_a_state(
    bench: Bench, lora: weights_pb2.LoraConfig | None, uninterrupted: dict[str, tuple[str, dict[str, Tensor]]]
) -> None:
    kind = "full" if lora is None else "adapter"
    folder = str(bench.scratch / kind)
    model_id = await bench.create(lora)
    metrics = await _train(bench, model_id, 2)
    loads = [metrics[f"expert_load/layer_{layer:02}:mean"] for layer in range(3)]
    assert all(1.0 <= load <= 8 / 2 for load in loads)
    assert metrics["expert_load:max"] == max(loads)
    await bench.client.save_state(model_id, folder)
    await _train(bench, model_id, 2)
    own = await bench.weights(model_id)
    first_folder, expected = uninterrupted.setdefault(kind, (folder, own))
    await bench.clean()
    resumed = await bench.create(lora)
    assert await bench.client.load_state(resumed, folder, optimizer=True) == 2
    assert (await bench.client.park_model(resumed)).size_bytes > 0
    assert (await bench.client.restore_model(resumed, lora)).step == 2
    await _train(bench, resumed, 2)
    _equal(await bench.weights(resumed), own)
    await bench.clean()
    if first_folder != folder:
        elsewhere = await bench.create(lora)
        assert await bench.client.load_state(elsewhere, first_folder, optimizer=True) == 2
        await _train(bench, elsewhere, 2)
        _equal(await bench.weights(elsewhere), expected)
        await bench.clean()


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "full"])
async def test_a_snapshot_is_pushed_from_memory_and_from_storage_alike(
    bench: Bench, lora: weights_pb2.LoraConfig | None
) -> None:
    sampler = ReceivingSampler()
    await sampler.start()
    model_id = await bench.create(lora)
    await _train(bench, model_id, 1)
    folder, name = bench.scratch / f"snapshot-{lora is None}", f"{model_id}@1"
    await bench.client.take_snapshot(model_id, name, str(folder))
    written = _tensors(folder)
    for uri in ("", str(folder)):
        response = await bench.client.push_snapshot(name, [sampler.address], uri)
        assert [result.error for result in response.results] == [""]
        received = sampler.received.pop(name)
        assert set(received) == set(written)
        assert all(torch.equal(received[key], tensor) for key, tensor in written.items())
        await bench.client.forget_snapshot(name)
        sampler.restart()
    parent = "model.layers.1.mlp.experts"
    if lora is None:
        assert {key: one.shape for key, one in written.items()} == {
            key: one.shape for key, one in _tensors(bench.model_dir).items()
        }
    else:
        assert list(written[f"base_model.model.{parent}.w2.lora_A.weight"].shape) == [8, 4, 96]
        await bench.client.take_snapshot(model_id, f"{model_id}@2", str(folder), is_export=True)
        exported = _tensors(folder)
        assert all(tensor.dim() == 2 for tensor in exported.values())
        shared = written[f"base_model.model.{parent}.w1.lora_A.weight"][0]
        assert torch.equal(exported[f"base_model.model.{parent}.7.gate_proj.lora_A.weight"], shared)
    await bench.clean()
    await sampler.stop()
