"""The plan's sizes equal the bytes that the ranks of a real trainer allocate."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fovea_tinyvlm
from fovea_plan.trainer_plan import TrainerPlan
from fovea_trainer.command_queue import CreateModel, DeleteModel, TakeSnapshot
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import MOMENTS
from fovea_trainer.model.sharding import local_of
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine
from tests.families import ensure_family
from tests.ranks import run_ranks

LORA = LoraSettings(8, 32.0, 7, True, True, True, False)
GPU_BYTES = 8 * 2**30
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("qwen3_vl", {"ranks": 1}),
    "two ranks, float32": ("qwen3_vl", {"ranks": 2, "dtype": "float32"}),
    "three ranks, uneven shards": ("qwen3_vl", {"ranks": 3, "keep_gathered": "never"}),
    "two replicas": ("qwen3_vl", {"ranks": 4, "replicas": 2}),
    "experts over ranks": ("qwen3_vl_moe", {"ranks": 2, "expert_parallel": 2, "keep_gathered": "never"}),
}


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rank(rank: int, size: int, directory: Path, given: dict[str, Any], folder: Path) -> None:
    """Runs one rank; rank 0 writes the bytes that it holds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    settings = TrainerSettings(model=str(directory), device="cpu", recovery="", **given)
    engine = TrainingEngine(settings, directory, ControlGroup(), torch.device("cpu"), None)
    engine.warm_up()
    found = {"base": _size(local_of(shard) for _, shard in engine._sharded.named_shards())}
    for kind, lora in (("adapter", LORA), ("full", None)):
        engine.execute(CreateModel(kind, lora))
        model: Any = engine.model(kind)
        gradients = model.gradients()
        moments = [values[name] for values in model.optimizer.moments() for name in MOMENTS]
        if kind == "adapter":
            weights = model.weights
            cast = [] if weights.cast_weights is weights.flat else [weights.cast_weights]
            found[kind] = _size([weights.flat, *cast, *moments, *gradients])
        else:
            masters = [one for name, one in model.masters.items() if one.data_ptr() != model.locals[name].data_ptr()]
            found[kind] = _size([*masters, *moments, *gradients])
            found["passing"] = model.pending_bytes
        found[f"{kind} snapshot"] = engine.execute(TakeSnapshot(kind, f"{kind}@1", "", False)).identity.size_bytes
        engine.execute(DeleteModel(kind))
    if rank == 0:
        torch.save(found, folder / "found")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_allocates_what_is_planned(layout: str, tmp_path: Path) -> None:
    family, given = LAYOUTS[layout]
    directory = fovea_tinyvlm.ensure("qwen3_vl") if family == "qwen3_vl" else ensure_family(family)
    given = {"dtype": "bfloat16", **given}
    run_ranks(_rank, given["ranks"], given["ranks"], directory, given, tmp_path)
    found: dict[str, int] = torch.load(tmp_path / "found")
    plan = TrainerPlan(TrainerSettings(model=str(directory), **given), directory, GPU_BYTES)
    adapter, full = plan.adapter(LORA), plan.full()
    assert plan.base_bytes == found["base"]
    assert adapter.size_bytes == found["adapter"]
    assert full.size_bytes == pytest.approx(
        found["full"] + found["passing"], rel=0.03
    )  # norms pass through each rank, too
    assert (adapter.snapshot_bytes, full.snapshot_bytes) == (found["adapter snapshot"], found["full snapshot"])
