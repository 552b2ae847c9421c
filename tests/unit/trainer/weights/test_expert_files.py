"""Full parameters of mixtures of experts as files: the base's tensors are restored one by one, also
on several ranks.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fovea.runtime.model_files import UNTRAINED
from fovea.wire.errors import InvalidInput
from fovea_trainer.model.expert_routing import expert_mesh
from fovea_trainer.model.packed_model import build_model
from fovea_trainer.model.sharding import ShardedModel, local_of, rank_mesh
from fovea_trainer.model.weight_reading import read_weights
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights import weight_files
from fovea_trainer.weights.checkpoint_folder import Folder
from tests.families import ensure_family
from tests.ranks import run_ranks

NAMES = [
    *("qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "mixtral", "glm4_moe", "glm4v_moe"),
    *("qwen3_next", "gemma4_26b", "deepseek_v3", "qwen3_omni_moe", "llama4", "llama4_text"),
]
CPU = torch.device("cpu")


def _rank(
    rank: int, size: int, replicas: int, spreads: tuple[int, ...], folder: str, directories: dict[str, Path]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    for spread, (name, directory) in itertools.product(spreads, directories.items()):
        _, _, module = build_model(TrainerSettings(model=str(directory), dtype="float32"), directory, CPU)
        experts = expert_mesh("cpu", size, spread, 8, replicas)
        sharded = ShardedModel(module, rank_mesh("cpu", size, replicas), False, experts)
        read_weights(module.hf, directory, CPU)
        like = dict(sharded.named_shards())
        locals_ = {key: local_of(shard).clone() for key, shard in like.items()}
        whole = list(weight_files.gathered(locals_, like, module.expert_layouts))
        files = weight_files.in_files(like, module.expert_layouts)
        assert [(one.shape, one.dtype) for one in files.values()] == [(one.shape, one.dtype) for one in whole]
        published = load_file(directory / "model.safetensors")
        assert set(files) == {key for key in published if not key.startswith(UNTRAINED)}
        assert all(torch.equal(one, published[key]) for key, one in zip(files, whole, strict=True))
        target = Folder.at(f"{folder}/{name}-{spread}")
        Path(target.path).mkdir(exist_ok=True)
        weight_files.write_checkpoint(zip(files, whole, strict=True), target, directory, ControlGroup())
        index = json.loads((Path(target.path) / weight_files.INDEX).read_text())
        copied = load_file(Path(target.path) / index["weight_map"][min(published)])
        assert set(index["weight_map"]) == set(published)
        assert torch.equal(copied[min(published)], published[min(published)])
        back = weight_files.read_shards(target, like, module.expert_layouts)
        assert all(torch.equal(back[key], local) for key, local in locals_.items())
    dist.destroy_process_group()


# Each family is laid out by one rank, by two, by four in two replicas, and in one of two other layouts; in both in
# `make long`.
OTHERS = [(4, 1, (2,)), (2, 2, (1,))]
LAYOUTS = [
    (1, 1, (1,), NAMES),
    (2, 1, (1, 2), NAMES),
    (4, 2, (1, 2), NAMES),
    *((*layout, NAMES[number :: len(OTHERS)]) for number, layout in enumerate(OTHERS)),
    *(pytest.param(*layout, NAMES, marks=pytest.mark.long) for layout in OTHERS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "replicas", "spreads", "names"), LAYOUTS)
def test_files_are_laid_out_as_the_base_s(
    ranks: int, replicas: int, spreads: tuple[int, ...], names: list[str], tmp_path: Path
) -> None:
    run_ranks(_rank, ranks, ranks, replicas, spreads, str(tmp_path), {name: ensure_family(name) for name in names})


def test_adapters_of_experts_come_back_together() -> None:
    parent = "base_model.model.model.language_model.layers.0.mlp.experts"
    adapter = {
        f"{parent}.w1.lora_A.weight": torch.rand(1, 2, 8),  # all experts share this one
        f"{parent}.w1.lora_B.weight": torch.rand(4, 8, 2),
        "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight": torch.rand(2, 8),
    }
    apart = dict(weight_files.one_by_one(adapter))
    assert len(apart) == 9
    together = weight_files.of_experts(apart, adapter)
    assert together.keys() == adapter.keys()
    assert all(together[name].equal(tensor) for name, tensor in adapter.items())
    assert weight_files.of_experts(adapter, adapter).keys() == adapter.keys(), (
        "tensors of one file must stay in one file"
    )
    apart[f"{parent}.2.gate_proj.lora_A.weight"] = torch.zeros(2, 8)
    with pytest.raises(InvalidInput, match="one that all share"):
        weight_files.of_experts(apart, adapter)
