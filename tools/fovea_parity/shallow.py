"""Cuts a large checkpoint to its first layers, so that a check on a CPU can run it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from fovea.runtime.model_files import read_json

LEAST_LAYERS = 2


def layers_needed(text: Any) -> int:
    """Returns the number of first layers that include each kind of layer, at least two."""
    kinds = list(getattr(text, "layer_types", None) or [])
    firsts = [kinds.index(kind) + 1 for kind in set(kinds)]
    firsts.append((getattr(text, "first_k_dense_replace", None) or 0) + 1)  # the first layer with experts
    count: int = min(text.num_hidden_layers, max([LEAST_LAYERS, *firsts]))
    return count


def cut(directory: Path, into: Path) -> int:
    """Writes the checkpoint's first layers, its tokenizer and its processor into `into`; returns the number of layers.

    A directory without weights gets random ones. Raises ValueError for a checkpoint that needs custom code or that
    transformers does not support.
    """
    raw = read_json(directory / "config.json")
    if raw.get("auto_map"):
        raise ValueError(f"{directory} needs custom code (auto_map in config.json), which Fovea never runs")
    config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    text, count = config.get_text_config(), layers_needed(config.get_text_config())
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:count]
    if getattr(text, "num_kv_shared_layers", 0):
        text.num_kv_shared_layers = 0
    auto: Any = AutoModelForCausalLM if text is config else AutoModelForMultimodalLM
    if hasattr(config, "enable_audio_output"):
        config.enable_audio_output = False  # Fovea uses no talker
    config = _without_lost_layers(config, count)
    has_weights = any(directory.glob("*.safetensors"))
    if has_weights:
        # The width of Gemma 4's table of per-layer embeddings depends on the number of layers. After the cut, its shape
        # no longer matches the checkpoint, so it gets random weights.
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
    # transformers 5 would save Qwen3-VL's experts in the layout of its modules. vLLM expects the published layout,
    # which is transposed.
    if model.config.model_type != "qwen3_vl_moe":
        model.save_pretrained(into)
        return
    state = model.state_dict()
    experts = [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    state |= {name: state[name].mT.contiguous() for name in experts}
    model.save_pretrained(into, state_dict=state, save_original_format=False)


def _without_lost_layers(config: Any, count: int) -> Any:
    """Returns the configuration without the entries for layers that are cut off, which Gemma 4's has."""
    said = config.to_dict()
    text = said.get("text_config", said)
    if not text.get("per_layer_config"):
        return config
    text["per_layer_config"] = {key: layer for key, layer in text["per_layer_config"].items() if int(key) < count}
    return type(config).from_dict(said)
