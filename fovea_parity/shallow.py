"""A checkpoint of a few layers, cut from a large one: what a check on a CPU can hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from fovea.runtime.model_files import read_json

LEAST_LAYERS = 2


def layers_needed(text: Any) -> int:
    """The first layers that hold each kind of layer once, at least two."""
    kinds = list(getattr(text, "layer_types", None) or [])
    firsts = [kinds.index(kind) + 1 for kind in set(kinds)]
    count: int = min(text.num_hidden_layers, max([LEAST_LAYERS, *firsts]))
    return count


def cut(directory: Path, into: Path) -> int:
    """Writes the checkpoint's first layers into `into`, with its own tokenizer and processor; returns how many.

    A directory without weights gets random ones. Raises ValueError for a checkpoint that brings code of its own, and
    for one that transformers does not know.
    """
    raw = read_json(directory / "config.json")
    if raw.get("auto_map"):
        raise ValueError(f"{directory} brings code of its own (auto_map in config.json), which Fovea never runs")
    config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    text, count = config.get_text_config(), layers_needed(config.get_text_config())
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:count]
    if getattr(text, "num_kv_shared_layers", 0):
        text.num_kv_shared_layers = 0
    auto: Any = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
    config = _without_lost_layers(config, count)
    has_weights = any(directory.glob("*.safetensors"))
    if has_weights:
        # Gemma 4's embeddings per layer are a table as wide as its layers are many: cut, it gets random weights too.
        is_cut_across = bool(getattr(text, "hidden_size_per_layer_input", 0))
        model = auto.from_pretrained(
            directory, config=config, dtype=torch.float32, ignore_mismatched_sizes=is_cut_across
        )
    else:
        model = auto.from_config(config, dtype=torch.float32)
    _save(model, into)
    for path in directory.iterdir():
        is_of_text = path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json")
        if is_of_text and not (into / path.name).exists():
            shutil.copy(path, into)
    return count


def _save(model: Any, into: Path) -> None:
    # transformers 5 would write Qwen3-VL's experts as its modules have them; vLLM knows them transposed, as published.
    if model.config.model_type != "qwen3_vl_moe":
        model.save_pretrained(into)
        return
    state = model.state_dict()
    experts = [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    state |= {name: state[name].mT.contiguous() for name in experts}
    model.save_pretrained(into, state_dict=state, save_original_format=False)


def _without_lost_layers(config: Any, count: int) -> Any:
    """The configuration without what it says of single layers that are cut off, as Gemma 4's does."""
    said = config.to_dict()
    text = said.get("text_config", said)
    if not text.get("per_layer_config"):
        return config
    text["per_layer_config"] = {key: layer for key, layer in text["per_layer_config"].items() if int(key) < count}
    return type(config).from_dict(said)
