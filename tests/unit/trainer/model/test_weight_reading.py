"""Weights of which each rank reads its own part equal those that transformers reads whole, bit for bit."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

import fovea_tinyvlm
from benchmarks import random_checkpoint
from fovea_trainer.model.packed_model import build_model, file_names, load_model
from fovea_trainer.model.sharding import ShardedModel
from fovea_trainer.model.weight_reading import read_weights
from fovea_trainer.settings import TrainerSettings
from fovea_weights import random_slices
from tests.families import ensure_family
from tests.ranks import run_ranks

CPU = torch.device("cpu")
# Tied and untied, renamed by transformers, with constants and many buffers, with stateful layers.
NAMES = ["gemma4_e2b", "llava_onevision", "qwen3_5"]
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 101,  # not a multiple of the ranks
}


def _reference(config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _whole(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _compared(model: Any, directory: Path, dtype: torch.dtype) -> Any:
    reference = _reference(model.config).from_pretrained(directory, dtype=dtype)
    expected, found = dict(_whole(reference)), dict(_whole(model))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    return reference


def _rank(rank: int, size: int, meeting: str, directories: dict[str, Path], experts: list[Path]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    for name, directory in directories.items():
        dtype = "float32" if name == "qwen3_vl" else "bfloat16"
        _, _, module = build_model(TrainerSettings(model=str(directory), dtype=dtype), directory, CPU)
        ShardedModel(module, mesh, False)
        read_weights(module.hf, directory, CPU)
        reference = _compared(module.hf, directory, getattr(torch, dtype))
        # A single rank stores the model once; FSDP would add a copy for computation.
        assert all(isinstance(one, DTensor) == (size > 1) for one in module.parameters())
        assert module.file_names == file_names(reference)
    for directory in experts:
        model = _sharded_experts(directory, mesh)
        read_weights(model, directory, CPU)
        _compared(model, directory, torch.bfloat16)
    dist.destroy_process_group()


def _sharded_experts(directory: Path, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = _reference(config).from_config(config, dtype=torch.bfloat16)
    for block in [block for block in model.modules() if isinstance(block, GradientCheckpointingLayer)]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _save_with_experts(config: PretrainedConfig, directory: Path) -> Path:
    """Saves in the hub's layout: one matrix per expert, or Qwen3-VL's with swapped last dimensions."""
    torch.manual_seed(3)
    _reference(config).from_config(config).save_pretrained(directory, max_shard_size="100KB")
    if config.model_type == "qwen3_vl_moe":
        for path in directory.glob("*.safetensors"):
            tensors = load_file(path)
            for name in [name for name in tensors if ".experts." in name and tensors[name].dim() == 3]:
                wanted = (4, 32, 48) if "gate_up" in name else (4, 24, 32)
                if tensors[name].shape != wanted:
                    tensors[name] = tensors[name].transpose(1, 2).contiguous()
            save_file(tensors, path, {"format": "pt"})
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    directories = {name: ensure_family(name) for name in ("qwen3_vl", *NAMES)}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    configs = (
        Qwen3MoeConfig(**EXPERTS),
        Qwen3VLMoeConfig(text_config=EXPERTS, vision_config={**vision, "deepstack_visual_indexes": [0]}),
    )
    experts = [_save_with_experts(config, tmp_path / config.model_type) for config in configs]
    run_ranks(_rank, 2, 2, str(tmp_path / "meeting"), directories, experts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \[3\], not \[\d+\]",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
            "lm_head.weight differs from model.embed_tokens.weight, to which it is tied",
        ),
    ],
    ids=["missing", "misshapen", "untied"],
)
def test_files_of_another_model(change: Callable[[dict[str, Tensor]], None], said: str, tmp_path: Path) -> None:
    base = fovea_tinyvlm.ensure("qwen3")
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    for path in base.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{tmp_path} do not match its config.json: {said}"):
        load_model(TrainerSettings(model=str(tmp_path)), tmp_path, CPU)


def test_weights_of_a_checkpoint_without_bytes(tmp_path: Path) -> None:
    base = ensure_family("qwen3_vl_moe")
    models = []
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        random_checkpoint.copy(base, tmp_path / name, seed)
        _, _, module = load_model(TrainerSettings(model=str(tmp_path / name)), tmp_path / name, CPU)
        models.append(dict(module.hf.named_parameters()))
    first, same, other = models
    for name, tensor in first.items():
        assert torch.equal(tensor, same[name])
        if tensor.dim() > 1:
            assert not torch.equal(tensor, other[name])
            assert tensor.std().item() == pytest.approx(0.02, rel=0.15), name
    (path,) = (tmp_path / "one").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        slices = random_slices(file, CPU)
    slice_ = slices["model.language_model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(slice_[2:4], slice_[...][2:4])
