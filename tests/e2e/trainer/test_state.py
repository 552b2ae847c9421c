"""What was saved is what is loaded, and training goes on from it as if nothing had been."""

import json
from pathlib import Path

import pytest
import torch

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import InvalidInput, NotFound
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.examples import datums_of, header


@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_resumes_bit_close(vlm: Bench, kind: str) -> None:
    lora = weights_pb2.LoraConfig(rank=4, train_attention=True, train_unembedding=True) if kind == "adapter" else None
    folder = str(vlm.scratch / f"state-{kind}")
    model_id = await vlm.create(lora)
    await _train(vlm, model_id, 2)
    saved = await vlm.client.save_state(model_id, folder)
    assert saved.step == 2
    assert saved.size_bytes == _size_bytes(Path(folder))
    await _train(vlm, model_id, 2)
    uninterrupted = await vlm.weights(model_id)
    await vlm.clean()
    resumed = await vlm.create(lora)
    assert await vlm.client.load_state(resumed, folder, optimizer=True) == 2
    await _train(vlm, resumed, 2)
    for name, tensor in (await vlm.weights(resumed)).items():
        torch.testing.assert_close(tensor, uninterrupted[name], rtol=1e-6, atol=1e-7)
    await vlm.clean()
    fresh = await vlm.create(lora)
    assert await vlm.client.load_state(fresh, folder, optimizer=False) == 0
    await _train(vlm, fresh, 2)
    weights = await vlm.weights(fresh)
    assert any(not torch.allclose(weights[name], tensor, atol=1e-5) for name, tensor in uninterrupted.items())


async def test_saving_replaces_what_was_there(qwen3: Bench) -> None:
    folder = qwen3.scratch / "replaced"
    first, second = await qwen3.adapter(rank=2), await qwen3.adapter(rank=3)
    await qwen3.client.save_state(first, str(folder))
    await qwen3.client.save_state(second, f"file://{folder}")
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3
    assert [path.name for path in folder.parent.glob("replaced*")] == ["replaced"]


async def test_loading_drops_gradients(qwen3: Bench) -> None:
    model_id = await qwen3.adapter()
    folder = str(qwen3.scratch / "dropped")
    await qwen3.client.save_state(model_id, folder)
    datums = datums_of(qwen3.images, "text")
    await qwen3.client.forward_backward(header(model_id, len(datums)), datums)
    await qwen3.client.load_state(model_id, folder, optimizer=True)
    response = await qwen3.client.optim_step(model_id, adam())
    assert response.metrics.values["grad_norm:mean"] == 0


async def test_state_that_does_not_fit_is_refused(qwen3: Bench) -> None:
    folder = qwen3.scratch / "misfit"
    small = await qwen3.adapter(rank=2)
    await qwen3.client.save_state(small, str(folder))
    large = await qwen3.adapter(rank=4)
    before = await qwen3.weights(large)
    with pytest.raises(InvalidInput, match="rank and alpha"):
        await qwen3.client.load_state(large, str(folder), optimizer=True)
    narrow = await qwen3.adapter(rank=2, train_mlp=False)
    with pytest.raises(InvalidInput, match=r"which the model does not train"):
        await qwen3.client.load_state(narrow, str(folder), optimizer=False)
    with pytest.raises(NotFound, match="nothing was saved there"):
        await qwen3.client.load_state(small, str(folder / "nowhere"), optimizer=False)
    (folder / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidInput, match="damaged"):
        await qwen3.client.load_state(small, str(folder), optimizer=False)
    with pytest.raises(InvalidInput, match="uri"):
        await qwen3.client.save_state(small, "nosuchprotocol://folder")
    after = await qwen3.weights(large)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    await qwen3.clean()
    full = await qwen3.create(None)
    with pytest.raises(InvalidInput, match="holds adapter parameters"):
        await qwen3.client.load_state(full, str(folder), optimizer=False)
    await _train(qwen3, full, 1)


async def test_full_state_of_another_model_is_refused(qwen3: Bench, qwen3_vl: Bench) -> None:
    folder = str(qwen3.scratch / "full-text")
    await qwen3.client.save_state(await qwen3.create(None), folder)
    model_id = await qwen3_vl.create(None)
    with pytest.raises(InvalidInput, match="saved from another model"):
        await qwen3_vl.client.load_state(model_id, folder, optimizer=True)
    await _train(qwen3_vl, model_id, 1)


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def _train(bench: Bench, model_id: str, steps: int) -> None:
    datums = datums_of(bench.images, "text" if bench.kind == "qwen3" else "mixed")
    for _ in range(steps):
        await bench.client.forward_backward(header(model_id, len(datums)), datums)
        await bench.client.optim_step(model_id, adam())
