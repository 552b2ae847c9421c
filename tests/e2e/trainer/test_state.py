"""Loads restore saved states, and training continues as if uninterrupted."""

import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsspec.core import url_to_fs
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import Internal, InvalidInput, NotFound, ResourceExhausted
from fovea_trainer.weights.torch_checkpoint import Writer
from tests.e2e.trainer.conftest import Bench, adam
from tests.e2e.trainer.examples import datums_of, header
from tests.small_disk import fill


@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_resumes_bit_close(vlm: Bench, kind: str, new_bucket: Callable[[], str]) -> None:
    """One family stores its states in a bucket, the other on a disk."""
    place = "s3" if vlm.kind == "qwen3_vl" else "disk"
    lora = weights_pb2.LoraConfig(rank=4, train_attention=True, train_unembedding=True) if kind == "adapter" else None
    folder = f"{vlm.scratch if place == 'disk' else new_bucket()}/states/{kind}"
    model_id = await vlm.create(lora)
    await _train(vlm, model_id, 2)
    saved = await vlm.client.save_state(model_id, folder)
    assert saved.step == 2
    assert saved.size_bytes == _size_bytes(folder)
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


@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_a_full_disk_is_named_and_nothing_else_is_lost(qwen3: Bench, kind: str, small_disk: Path) -> None:
    model_id = await (qwen3.adapter() if kind == "adapter" else qwen3.create(None))
    await qwen3.client.save_state(model_id, f"{small_disk}/first")
    await _train(qwen3, model_id, 1)
    for spare_bytes in (0, 2**16, 2**18):
        fill(small_disk / "junk", spare_bytes)
        with pytest.raises(ResourceExhausted, match=f"the disk of {small_disk}/.* is full.*delete checkpoints"):
            await qwen3.client.save_state(model_id, f"{small_disk}/first")
        with pytest.raises(ResourceExhausted, match="is full"):
            await qwen3.client.take_snapshot(model_id, f"{model_id}@{spare_bytes}", f"{small_disk}/snapshot")
        (small_disk / "junk").unlink()
    assert os.listdir(small_disk) == ["first"], "a failed save must leave nothing"
    assert await qwen3.client.load_state(model_id, f"{small_disk}/first", optimizer=True) == 0, (
        "the previous state must be complete"
    )
    await _train(qwen3, model_id, 1)
    assert (await qwen3.client.save_state(model_id, f"{small_disk}/second")).step == 1


@pytest.mark.parametrize("place", ["disk", "s3"])
async def test_saving_replaces_what_was_there(qwen3: Bench, place: str, new_bucket: Callable[[], str]) -> None:
    folder = f"file://{qwen3.scratch}/alone" if place == "disk" else new_bucket()
    first, second = await qwen3.adapter(rank=2), await qwen3.adapter(rank=3)
    await qwen3.client.save_state(first, f"{folder.removeprefix('file://')}/replaced")
    await qwen3.client.save_state(second, f"{folder}/replaced")
    files, path = url_to_fs(folder)
    files.invalidate_cache()
    assert json.loads(files.cat_file(f"{path}/replaced/adapter_config.json"))["r"] == 3
    assert [name.rpartition("/")[2] for name in files.ls(path, detail=False)] == ["replaced"]


@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_snapshots_kept_in_a_bucket_are_whole(qwen3: Bench, kind: str, new_bucket: Callable[[], str]) -> None:
    model_id = await (qwen3.adapter() if kind == "adapter" else qwen3.create(None))
    url, folder = f"{new_bucket()}/kept", qwen3.scratch / f"kept-{kind}"
    await qwen3.client.take_snapshot(model_id, f"{model_id}@1", url)
    files, path = url_to_fs(url)
    files.get(path, str(folder), recursive=True)
    kept = load_file(*folder.glob("*.safetensors"))
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {
        name: tensor.tolist() for name, tensor in (await qwen3.weights(model_id)).items()
    }


@pytest.mark.parametrize("place", ["disk", "s3"])
@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_a_refusal_of_storage_is_reported_and_costs_nothing(qwen3: Bench, kind: str, place: str) -> None:
    (qwen3.scratch / "file").touch()
    url, said = (f"{qwen3.scratch}/file/below", "NotADirectoryError") if place == "disk" else ("s3://none/b", "bucket")
    model_id = await (qwen3.adapter() if kind == "adapter" else qwen3.create(None))
    with pytest.raises((Internal, NotFound), match=said):
        await qwen3.client.save_state(model_id, url)
    with pytest.raises((Internal, NotFound), match=said):
        await qwen3.client.take_snapshot(model_id, f"{model_id}@1", url)
    await _train(qwen3, model_id, 1)
    await qwen3.client.save_state(model_id, f"{qwen3.scratch}/below")


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
    with pytest.raises(InvalidInput, match=r"\(rank, alpha\)"):
        await qwen3.client.load_state(large, str(folder), optimizer=True)
    narrow = await qwen3.adapter(rank=2, train_mlp=False)
    with pytest.raises(InvalidInput, match=r"which the model does not train"):
        await qwen3.client.load_state(narrow, str(folder), optimizer=False)
    with pytest.raises(NotFound, match="nothing was saved there"):
        await qwen3.client.load_state(small, str(folder / "nowhere"), optimizer=False)
    (folder / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidInput, match="damaged"):
        await qwen3.client.load_state(small, str(folder), optimizer=False)
    described = (folder / "state.json").read_bytes()
    for torn in (described[:9], b"[]", described.replace(b'"step"', b'"stop"')):
        (folder / "state.json").write_bytes(torn)
        with pytest.raises(InvalidInput, match="is damaged"):
            await qwen3.client.load_state(small, str(folder), optimizer=False)
    (folder / "state.json").write_bytes(described)
    with pytest.raises(InvalidInput, match="uri"):
        await qwen3.client.save_state(small, "nosuchprotocol://folder")
    after = await qwen3.weights(large)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    await qwen3.clean()
    full = await qwen3.create(None)
    with pytest.raises(InvalidInput, match="holds adapter parameters"):
        await qwen3.client.load_state(full, str(folder), optimizer=False)
    await _train(qwen3, full, 1)


@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_a_state_with_weights_out_of_bounds_is_refused(qwen3: Bench, kind: str) -> None:
    """Numbers above the largest float16 are refused like non-finite ones; the model stays unchanged."""
    model_id = await (qwen3.adapter(rank=32) if kind == "adapter" else qwen3.create(None))
    folder = qwen3.scratch / f"large-{kind}"
    await qwen3.client.save_state(model_id, str(folder))
    before = await qwen3.weights(model_id)
    for value, said in ((1e30, "the limit is 65504"), (float("nan"), "not finite")):
        name = _spoil(folder, kind, value)
        with pytest.raises(InvalidInput, match=rf"large-{kind} has .* in {re.escape(name)}.*{said}"):
            await qwen3.client.load_state(model_id, str(folder), optimizer=True)
    for key, tensor in (await qwen3.weights(model_id)).items():
        assert torch.equal(before[key], tensor)
    await _train(qwen3, model_id, 1)


def _spoil(folder: Path, kind: str, value: float) -> str:
    """Changes one number of the saved weights; returns the name of its tensor."""
    if kind == "adapter":
        weights = load_file(folder / "adapter_model.safetensors")
        name = sorted(weights)[-1]
        weights[name][0, 0] = value
        save_file(weights, folder / "adapter_model.safetensors")
        return name
    dcp_to_torch_save(folder / "dcp", folder / "whole.pt")
    state = torch.load(folder / "whole.pt")
    name = sorted(state["weights"])[-1]
    state["weights"][name].view(-1)[-1] = value
    shutil.rmtree(folder / "dcp")
    save_checkpoint(state, storage_writer=Writer(f"file://{folder}/dcp", str(folder), False), no_dist=True)
    return name


async def test_full_state_of_another_model_is_refused(qwen3: Bench, qwen3_vl: Bench) -> None:
    folder = str(qwen3.scratch / "full-text")
    await qwen3.client.save_state(await qwen3.create(None), folder)
    model_id = await qwen3_vl.create(None)
    with pytest.raises(InvalidInput, match="saved from another model"):
        await qwen3_vl.client.load_state(model_id, folder, optimizer=True)
    await _train(qwen3_vl, model_id, 1)


class _Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._folder),)


async def test_a_checkpoint_that_would_run_code_is_refused(qwen3: Bench) -> None:
    folder, made = qwen3.scratch / "attack", qwen3.scratch / "made"
    model_id = await qwen3.create(None)
    await qwen3.client.save_state(model_id, str(folder))
    (folder / "dcp/.metadata").write_bytes(pickle.dumps(_Attack(made)))
    with pytest.raises(InvalidInput, match=r"not the metadata of a checkpoint: it names posix\.mkdir"):
        await qwen3.client.load_state(model_id, str(folder), optimizer=True)
    assert not made.exists()
    await _train(qwen3, model_id, 1)


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:1/state", "{outside}/a", "{scratch}/../../{name}/a", "{scratch}/out/a"]
)
async def test_places_outside_of_the_roots_are_refused(qwen3: Bench, uri: str) -> None:
    """Every call with a path refuses it; the trainer continues. The paths are empty folders made for this test, because
    a faulty trainer would overwrite them.
    """
    roots = qwen3.scratch.parent  # see TrainerProcess
    with tempfile.TemporaryDirectory(prefix="fovea-outside-", dir=roots.parent) as outside:
        link = qwen3.scratch / "out"
        link.unlink(missing_ok=True)
        link.symlink_to(outside)
        place = uri.format(scratch=qwen3.scratch, outside=outside, name=Path(outside).name)
        model_id = await qwen3.adapter()
        for call in (
            qwen3.client.save_state(model_id, place),
            qwen3.client.load_state(model_id, place, optimizer=True),
            qwen3.client.take_snapshot(model_id, f"{model_id}@1", place),
            qwen3.client.push_snapshot(f"{model_id}@2", ["127.0.0.1:1"], uri=place),
        ):
            with pytest.raises(InvalidInput, match="--checkpoints"):
                await call
        assert not os.listdir(outside)
    await _train(qwen3, model_id, 1)


def _size_bytes(folder: str) -> int:
    files, path = url_to_fs(folder)
    files.invalidate_cache()
    return sum(entry["size"] for entry in files.find(path, detail=True).values())


async def _train(bench: Bench, model_id: str, steps: int) -> None:
    datums = datums_of(bench.images, "text" if bench.kind == "qwen3" else "mixed")
    for _ in range(steps):
        await bench.client.forward_backward(header(model_id, len(datums)), datums)
        await bench.client.optim_step(model_id, adam())
