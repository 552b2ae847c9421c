"""What the files of a base model say that several services must read alike. Needs neither torch nor transformers."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fovea import vision

_TEXT_MODEL_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe")

MODEL_TYPES = tuple(sorted({*vision.MODEL_TYPES, *_TEXT_MODEL_TYPES}))
"""The values of `model_type` that a whole Fovea runs, if `check_supported` finds nothing else."""

STATE_LAYERS = {"qwen3_5_text": "linear_attention", "qwen3_5_moe_text": "linear_attention", "lfm2": "conv"}
"""What `layer_types` calls layers that carry a state from token to token, by the language model's `model_type`."""

EXPERT_TYPES = ("qwen3_5_moe", "qwen3_moe", "qwen3_vl_moe")
"""The values of `model_type` of mixtures of experts that a whole Fovea runs."""

_LOGIT_CHANGES = ("logit_scale", "logits_scaling")
"""What some families do to logits after the unembedding, besides capping them."""
_UNLIKE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Entries of config.json that say how a checkpoint was written, not what it computes."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_config(model: str, download: Callable[[str, str], str]) -> dict[str, Any]:
    """`config.json` of a checkpoint's directory or, by hub name, of the hub.

    Args:
        download: Fetches (hub name, file) and returns its path, as `hf_hub_download` does.

    Raises OSError if there is none, ValueError if it is none.
    """
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        if path.parent.is_dir() or model.startswith((".", "/", "~")):
            raise FileNotFoundError(f"{path} does not exist; --model names a checkpoint directory or a hub name")
        path = Path(download(model, "config.json"))
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ValueError, naming the file, if it does not."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def language_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's entries of `config.json`: at the top or, in newer checkpoints, in `text_config`."""
    return {**config, **(config.get("text_config") or {})}


def check_directory(directory: Path) -> None:
    """Raises ValueError, in one line, for a checkpoint that one of the services would refuse. Reads little files."""
    config = read_json(directory / "config.json")
    check_supported(config)
    if vision.bind(config, read_added_tokens(directory)):
        read_image_processor(directory)


def check_supported(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a config.json of which the trainer, the sampler or the renderer cannot run the model."""
    model_type = config.get("model_type")
    if vision.choose(config) is None and model_type not in _TEXT_MODEL_TYPES:
        experts = f", which has experts ({found})," if (found := experts_of(config)) else ""
        raise ValueError(f"model_type {model_type!r}{experts} is not supported; supported are {', '.join(MODEL_TYPES)}")
    check_variant(config)


def check_variant(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a variant of a supported model that would be computed wrongly where documents are packed.

    Args:
        config: As the file has it, or as transformers completes it: a file may leave out what is the default.
    """
    name, text = config.get("model_type"), language_entries(config)
    if (found := experts_of(config)) and name not in EXPERT_TYPES:
        raise ValueError(f"{name} with experts ({found}) is not supported; of mixtures, {', '.join(EXPERT_TYPES)} are")
    known = {"full_attention", "sliding_attention", STATE_LAYERS.get(str(text.get("model_type")))}
    if unknown := set(text.get("layer_types") or ()) - known:
        raise ValueError(f"layer types {sorted(unknown)} of {name} are not supported")
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ValueError(f"use_bidirectional_attention of {name} is not supported, only causal attention")
    if text.get("hidden_size_per_layer_input") and text.get("pad_token_id", 0) != 0:
        raise ValueError(
            f"pad_token_id of {name} is {text['pad_token_id']}, must be 0: where images stand, transformers looks it up"
            " in the embeddings of the layers and vLLM 0"
        )
    if changed := [entry for entry in _LOGIT_CHANGES if text.get(entry) not in (None, 1.0)]:
        raise ValueError(f"{changed[0]} of {name} is not supported: logits are products alone")
    if any(part.get("attention_dropout") for part in (text, config.get("vision_config") or {})):
        raise ValueError("attention_dropout must be 0")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # One set of parameters, or one for each type of layer.
    for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"rope_type {rope_type!r} of {name} is not supported: its frequencies depend on the longest document "
                "of a micro-batch, so what a document gets would depend on its neighbours. Take one whose frequencies "
                "are fixed: default, linear, llama3, yarn"
            )


def experts_of(config: Mapping[str, Any]) -> str:
    """The entry of a configuration that says how many experts its language model has; empty if it is dense."""
    text = language_entries(config)
    return next((entry for entry in _EXPERT_COUNTS if text.get(entry)), "")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that a model was made for, in tokens; None if its configuration does not say.

    `max_position_embeddings`, scaled as the rotary embeddings are. With YaRN some checkpoints give the length after
    scaling there (DeepSeek), some the one before it, as Qwen's own instructions do: the longer of the two holds.
    """
    text = language_entries(config)
    length = text.get("max_position_embeddings")
    if length is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1.0
    if kind == "yarn":
        return max(int(length), int((rope.get("original_max_position_embeddings") or length) * factor))
    return int(length * (factor if kind == "linear" else 1))


def fingerprints(directory: Path) -> dict[str, str]:
    """SHA-256, hexadecimal, of what all services must read alike of a checkpoint, by the name of it."""
    config = read_json(directory / "config.json")
    found = {"config.json": _digest({key: value for key, value in config.items() if key not in _UNLIKE})}
    if (tokenizer := directory / "tokenizer.json").is_file():
        found[tokenizer.name] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    if vision.choose(config):
        found["image processor"] = _digest(read_image_processor(directory))
    return found


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_added_tokens(directory: Path) -> dict[str, int]:
    """Ids of the added tokens of a directory's `tokenizer.json` by their text; empty if there is no such file."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return {}
    return {token["content"]: int(token["id"]) for token in read_json(path).get("added_tokens", [])}


def read_image_processor(directory: Path) -> dict[str, Any]:
    """Settings of a checkpoint's image processor, found as transformers 5 finds them.

    It saves a processor as one `processor_config.json` with the image processor in it; before, that one had a
    `preprocessor_config.json` of its own. Raises ValueError, naming both files, if neither says, and naming the one
    that brings code of its own, whichever is read.
    """
    whole, own = directory / "processor_config.json", directory / "preprocessor_config.json"
    found = {path: read_json(path) for path in (whole, own) if path.is_file()}
    nested = found.get(whole, {}).get("image_processor")
    parts = [*found.items(), *([(whole, nested)] if isinstance(nested, dict) else [])]
    if bringing := next((path for path, settings in parts if settings.get("auto_map")), None):
        raise ValueError(
            f"{bringing} brings code of its own (auto_map, trust_remote_code), which Fovea never runs; take a"
            " checkpoint whose processor transformers knows itself"
        )
    if isinstance(nested, dict):
        return nested
    if own in found:
        return found[own]
    raise ValueError(
        f"{directory} describes no image processor: neither {own.name} nor image_processor in {whole.name}"
    )
