"""A merged checkpoint equals transformers' base plus the trainer's adapter, parameter by parameter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from fovea.runtime.model_files import read_json
from fovea.wire.errors import InvalidInput
from fovea_data.adapter_merge import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, merge_adapter, spread_shared_experts
from fovea_data.base_model import trained_part
from fovea_trainer.model.lora import LoraSettings, LoraWeights
from fovea_trainer.model.packed_model import build_model
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights.weight_files import one_by_one, peft_files
from tests.families import ensure_family

CPU = torch.device("cpu")
# Tied, renamed by transformers, with experts in each of the three layouts, with stateful layers.
NAMES = ["qwen3_vl", "gemma3", "qwen3_vl_moe"]
MORE = [
    "qwen2_vl",
    "llava_next",
    "glm4v",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_5_moe",
    "mixtral",
    "glm4_moe",
    "gemma4_26b",
    "deepseek_v3",
    "qwen3_omni_moe",
    "llama4",
    "llama4_text",
]
HALVES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def trained(directory: Path, rank: int = 4) -> LoraWeights:
    """Returns the trainer's adapter of all modules, with B no longer zero."""
    family, _, module = build_model(TrainerSettings(model=str(directory), dtype="float32"), directory, CPU)
    targets = list(family.lora_targets(module.hf))
    sees = any(target.vision for target in targets)
    settings = LoraSettings(rank, 8.0, 0, True, True, True, sees)
    weights = LoraWeights(settings, targets, CPU, torch.float32)
    with torch.no_grad():
        weights.flat.copy_(torch.randn(weights.flat.shape, generator=torch.Generator().manual_seed(1)) / 8)
    return weights


def written(weights: LoraWeights, directory: Path, folder: Path, is_export: bool) -> Path:
    """Writes the adapter's files as the trainer does: for itself, or as an export."""
    tensors = dict(weights.named(weights.flat.detach()))
    named = one_by_one(tensors) if is_export else tensors.items()
    folder.mkdir()
    for name, parts in peft_files(named, weights.settings.rank, weights.settings.alpha, str(directory)).items():
        (folder / name).write_bytes(b"".join(bytes(part) for part in parts))
    return folder


def loaded(directory: Path) -> Any:
    part = trained_part(AutoConfig.from_pretrained(directory))
    kind: Any = AutoModelForImageTextToText if hasattr(part, "vision_config") else AutoModelForCausalLM
    return kind.from_pretrained(directory, config=part)


def expected(directory: Path, weights: LoraWeights) -> dict[str, Tensor]:
    """Returns the base's parameters with the adapter added, by their names in transformers' model."""
    model = loaded(directory)
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}
    factors = {
        name.removeprefix("base_model.model.").removesuffix(".weight"): factor
        for name, factor in weights.named(weights.flat.detach())
    }
    for module in {name.rpartition(".lora_")[0] for name in factors}:
        a, b = factors[f"{module}.lora_A"], factors[f"{module}.lora_B"]
        if a.dim() == 2:
            found[f"{module}.weight"] += weights.settings.scale * (b @ a)
    for stacked in [name for name in found if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parent, _, projection = stacked.rpartition(".")
        halves = [(factors[f"{parent}.{w}.lora_A"], factors[f"{parent}.{w}.lora_B"]) for w in HALVES[projection]]
        added = weights.settings.scale * torch.cat([b @ a for a, b in halves], dim=1)
        found[stacked] += added if found[stacked].shape == added.shape else added.mT
    return found


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_each_family_is_merged_as_its_modules_are(name: str, tmp_path: Path) -> None:
    directory = ensure_family(name)
    weights = trained(directory)
    wanted = expected(directory, weights)
    names = []
    for is_export in (True, False):
        adapter = written(weights, directory, tmp_path / f"adapter-{is_export}", is_export)
        spread_shared_experts(adapter)
        names.append(read_json(adapter / ADAPTER_CONFIG)["target_modules"])
        out = tmp_path / f"merged-{is_export}"
        out.mkdir()
        told: list[int] = []
        merge_adapter(adapter, directory, out, shard_bytes=2**20, on_bytes=told.append)
        shards = sorted(out.glob("model-*.safetensors"))
        assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
        assert sum(told) == read_json(out / INDEX)["metadata"]["total_size"]
        model = loaded(out)
        found = dict(model.named_parameters(remove_duplicate=False))
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6, msg=key)
    assert names[0] == names[1], "the trainer's own export must name the same modules"


def test_files_have_the_base_s_names_and_a_head_of_their_own(tmp_path: Path) -> None:
    directory = ensure_family("gemma3")
    adapter = written(trained(directory), directory, tmp_path / "adapter", True)
    merge_adapter(adapter, directory, directory_of(tmp_path))
    assert keys(tmp_path / "merged") == {*keys(directory), "language_model.lm_head.weight"}
    config = read_json(tmp_path / "merged" / "config.json")
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, False)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    for kept in ("processor_config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "merged" / kept).read_bytes() == (directory / kept).read_bytes()


def test_what_is_not_adapted_stays_to_the_bit(tmp_path: Path) -> None:
    directory = ensure_family("qwen3_vl")
    adapter = written(trained(directory), directory, tmp_path / "adapter", True)
    merge_adapter(adapter, directory, directory_of(tmp_path))
    adapted = {name.removesuffix(".lora_A") for name in trained(directory)._whole_shapes}
    base, merged = (load_file(one / "model.safetensors") for one in (directory, tmp_path / "merged"))
    names = [name for name in base if name.removesuffix(".weight") not in adapted]
    assert names
    assert all(torch.equal(base[name], merged[name]) for name in names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "has peft_type IA3; only LORA can be merged"),
        ({"use_dora": True}, "has use_dora True"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern"),
    ],
)
def test_adapters_of_other_kinds_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    directory = ensure_family("qwen3_vl")
    adapter = written(trained(directory), directory, tmp_path / "adapter", True)
    config = read_json(adapter / ADAPTER_CONFIG) | changes
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=words):
        merge_adapter(adapter, directory, directory_of(tmp_path))


def test_another_base_is_refused_by_the_module_that_does_not_fit(tmp_path: Path) -> None:
    directory = ensure_family("qwen3_vl")
    adapter = written(trained(directory), directory, tmp_path / "adapter", True)
    with pytest.raises(InvalidInput, match="give the base model of the adapter"):
        merge_adapter(adapter, ensure_family("qwen2_vl"), directory_of(tmp_path))
    assert list((tmp_path / "merged").iterdir()) == []


def test_bases_that_nothing_can_be_added_to_are_refused(tmp_path: Path) -> None:
    directory = ensure_family("qwen3_vl")
    adapter = written(trained(directory), directory, tmp_path / "adapter", True)
    base = tmp_path / "base"
    shutil.copytree(directory, base)
    config = read_json(base / "config.json")
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(InvalidInput, match="is quantised"):
        merge_adapter(adapter, base, directory_of(tmp_path))
    (base / "config.json").write_text(json.dumps(config))
    (base / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"has no model\.safetensors"):
        merge_adapter(adapter, base, tmp_path / "merged")
    (adapter / ADAPTER_WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(InvalidInput, match="is not a safetensors file"):
        merge_adapter(adapter, directory, tmp_path / "merged")


def directory_of(tmp_path: Path) -> Path:
    (tmp_path / "merged").mkdir()
    return tmp_path / "merged"


def keys(directory: Path) -> set[str]:
    return set(load_file(directory / "model.safetensors"))
