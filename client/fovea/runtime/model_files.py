"""Reads files of a base model that several services must interpret alike. Needs neither torch nor transformers."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea import vision
from fovea.vision.vision_family import VisionFamily

_TEXT_MODEL_TYPES = (
    *("deepseek_v3", "gemma3_text", "glm4_moe", "llama", "llama4_text", "mistral", "mixtral"),
    *("qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
)

MODEL_TYPES = tuple(sorted({*vision.MODEL_TYPES, *_TEXT_MODEL_TYPES}))
"""Values of `model_type` that Fovea supports in all services, unless `check_supported` rejects the rest of the config.
"""

STATE_LAYERS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), "linear_attention"),
    "lfm2": "conv",
}
"""Name in `layer_types` of layers that carry state from token to token, by `model_type` of the language model."""

LLAMA_LIKE = (
    *("llama", "mistral", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text"),
    *("mixtral", "qwen3_moe", "qwen3_omni_moe_text", "qwen3_vl_moe_text"),
)
"""Model types of language models with Llama's layers, on their own or within a vision model.

That means RMSNorm without an offset and a gated SiLU MLP or experts, with or without Qwen3's query and key norms. In a
model of 16 bits, trainer and sampler both keep their residual stream in float32.
"""

EXPERT_TYPES = (
    *("deepseek_v3", "gemma4", "glm4_moe", "glm4v_moe", "llama4", "llama4_text", "mixtral"),
    *("qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl_moe"),
)
"""Values of `model_type` of mixture-of-experts models that Fovea supports in all services."""

UNTRAINED = ("thinker.audio_tower.", "talker.", "code2wav.")
"""Beginnings of the names of tensors that the trainer does not hold, and that a checkpoint of all parameters copies.

They hear and speak in Qwen3-Omni.
"""

TRANSPOSED_EXPERTS = ("llama4", "llama4_text")
"""Values of `model_type` of models with experts [E, inputs, outputs], in files and in transformers."""

_LOGIT_CHANGES = ("logit_scale", "logits_scaling")
"""Entries that change logits after the unembedding; capping is not among them."""
_UNLIKE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Entries of config.json that describe how a checkpoint was written, not what it computes."""
ROUTING_ENTRIES = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
"""By `model_type`: entries that vLLM reads, with the only values that transformers computes. It does not write them."""
_FIXED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**ROUTING_ENTRIES["deepseek_v3"], "rope_interleave": True, "rms_norm_eps": 1e-6},
    "mixtral": {"sliding_window": None, "router_jitter_noise": 0.0, "hidden_act": "silu"},
}
"""By `model_type`: entries that vLLM or transformers ignores, and the value that it assumes."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_config(model: str, download: Callable[[str, str], str]) -> dict[str, Any]:
    """Reads `config.json` from a checkpoint folder or, for a Hugging Face model name, from the hub.

    Args:
        model: Checkpoint folder or Hugging Face model name.
        download: Downloads (model name, file) and returns the path, as `hf_hub_download` does.

    Raises:
        OSError: The file does not exist.
        ValueError: The file is not a JSON object.
    """
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        if path.parent.is_dir() or model.startswith((".", "/", "~")):
            raise FileNotFoundError(
                f"{path} does not exist; give --model a checkpoint folder or a Hugging Face model name"
            )
        path = Path(download(model, "config.json"))
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that contains one JSON object. Raises ValueError, which names the file, if it does not."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def language_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `config.json` for the language model, at the top level or in `text_config`."""
    whole = vision.with_parts(config)
    return {**whole, **(whole.get("text_config") or {})}


def check_directory(directory: Path) -> None:
    """Raises ValueError, in one line, for a checkpoint that any service would reject. Reads only small files."""
    config = read_json(directory / "config.json")
    check_supported(config)
    if vision.bind(config, read_added_tokens(directory)):
        read_image_processor(directory)


def check_supported(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a config.json of a model that the trainer, the sampler or the renderer cannot run."""
    model_type = config.get("model_type")
    if vision.choose(config) is None and model_type not in _TEXT_MODEL_TYPES:
        experts = f", which has experts ({found})," if (found := experts_of(config)) else ""
        piece = vision.missing_piece(model_type)
        raise ValueError(
            f"model_type {model_type!r}{experts} is not supported{piece}; supported are {', '.join(MODEL_TYPES)}"
        )
    check_variant(config)


def check_variant(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a variant of a supported model that some service would compute wrongly.

    Args:
        config: config.json as stored, or as completed by transformers; stored files may omit default values.
    """
    name, text = config.get("model_type"), language_entries(config)
    if (found := experts_of(config)) and name not in EXPERT_TYPES:
        raise ValueError(
            f"{name} with experts ({found}) is not supported; supported mixtures of experts: {', '.join(EXPERT_TYPES)}"
        )
    chunked = "chunked_attention" if text.get("model_type") in TRANSPOSED_EXPERTS else None
    known = {"full_attention", "sliding_attention", chunked, STATE_LAYERS.get(str(text.get("model_type")))}
    if unknown := set(text.get("layer_types") or ()) - known:
        raise ValueError(f"layer types {sorted(unknown)} of {name} are not supported")
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ValueError(f"use_bidirectional_attention of {name} is not supported, only causal attention")
    if text.get("hidden_size_per_layer_input") and text.get("pad_token_id", 0) != 0:
        raise ValueError(
            f"pad_token_id of {name} is {text['pad_token_id']}, must be 0: at the positions of images, transformers "
            "looks up this id in the per-layer embeddings, while vLLM looks up 0"
        )
    _check_fixed(str(name), text)
    if text.get("model_type") in TRANSPOSED_EXPERTS:
        _check_llama4(str(name), text)
    if changed := [entry for entry in _LOGIT_CHANGES if text.get(entry) not in (None, 1.0)]:
        raise ValueError(
            f"{changed[0]} of {name} is not supported: logits must be the plain product with the unembedding"
        )
    if any(part.get("attention_dropout") for part in (text, vision.with_parts(config).get("vision_config") or {})):
        raise ValueError("attention_dropout must be 0")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # There is one set of parameters, or one per type of layer.
    for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"rope_type {rope_type!r} of {name} is not supported: its frequencies depend on the longest document "
                "of a micro-batch, so the result of a document would depend on the others. Use one with fixed "
                "frequencies: default, linear, llama3 or yarn"
            )


def _check_fixed(name: str, text: Mapping[str, Any]) -> None:
    """Raises ValueError for entries of the language model that vLLM would ignore, or that the trainer cannot read."""
    fixed = _FIXED.get(name, {})
    if other := [entry for entry, value in fixed.items() if text.get(entry, value) != value]:
        raise ValueError(
            f"{other[0]} of {name} is {text[other[0]]!r}, which vLLM or transformers would ignore; supported is "
            f"{fixed[other[0]]!r}"
        )
    if text.get("quantization_config"):
        raise ValueError(
            f"the weights of this {name} are quantised (quantization_config), which the trainer does not read: use a "
            "checkpoint in bfloat16"
        )


def _check_llama4(name: str, text: Mapping[str, Any]) -> None:
    """Raises ValueError for a language model of Llama 4 that transformers and vLLM would compute differently."""
    positive = {"attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4}
    found = {entry: text.get(entry, default) for entry, default in positive.items()}  # transformers' defaults
    if wrong := [entry for entry, value in found.items() if not isinstance(value, int) or value < 1]:
        raise ValueError(f"{wrong[0]} of {name} is {found[wrong[0]]!r}, must be positive")
    _, step, every = found.values()
    layers = range(int(text.get("num_hidden_layers", 48)))
    rotary = text.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]
    computed = {
        "attention_bias": False,
        "num_experts_per_tok": 1,
        "moe_layers": list(layers)[step - 1 :: step],
        "layer_types": ["chunked_attention" if turns else "full_attention" for turns in rotary],
    }
    for entry, value in computed.items():
        if text.get(entry) not in (None, value):
            raise ValueError(f"{entry} of {name} is {text[entry]!r}, but vLLM computes only {value!r}")


def experts_of(config: Mapping[str, Any]) -> str:
    """Returns the config entry that gives the number of experts; empty for a dense model."""
    text = language_entries(config)
    return next((entry for entry in _EXPERT_COUNTS if text.get(entry)), "")


@dataclass(frozen=True)
class MixtureSizes:
    """The sizes of the experts of a layer.

    Attributes:
        number: The number of experts.
        per_token: The number of experts that a token uses.
        inner: The intermediate size of an expert.
        shared: The intermediate size of the experts that all tokens use; 0 if there are none.
    """

    number: int
    per_token: int
    inner: int
    shared: int


def mixture_sizes(config: Mapping[str, Any]) -> MixtureSizes | None:
    """Returns the sizes of a model's experts, or None for a dense model.

    Args:
        config: config.json as completed by transformers.
    """
    text = language_entries(config)
    if not (entry := experts_of(config)):
        return None
    inner = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = text.get("shared_expert_intermediate_size") or inner * (text.get("n_shared_experts") or 0)
    if text.get("model_type") in TRANSPOSED_EXPERTS:
        shared = inner  # Llama 4 has one shared expert, as wide as the others
    if text.get("enable_moe_block"):
        shared = text["intermediate_size"]  # Gemma 4 has a whole MLP beside the experts
    per_token = text.get("num_experts_per_tok") or text["top_k_experts"]
    return MixtureSizes(int(text[entry]), int(per_token), inner, int(shared))


def context_length(config: Mapping[str, Any]) -> int | None:
    """Returns the longest sequence that a model supports, in tokens; None if its config does not say.

    This is `max_position_embeddings`, scaled as the rotary embeddings are. For YaRN, some checkpoints store the length
    after scaling there (DeepSeek), others the length before it, as Qwen's instructions do. The larger result is used.
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
    """Returns the SHA-256, in hexadecimal, of each file of a checkpoint that all services must read alike."""
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
    """Returns the ids of the added tokens in `tokenizer.json`, keyed by text; empty if the file does not exist."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return {}
    return {token["content"]: int(token["id"]) for token in read_json(path).get("added_tokens", [])}


def read_image_processor(directory: Path) -> dict[str, Any]:
    """Reads the settings of a checkpoint's image processor from the file that transformers 5 would use.

    transformers 5 saves a processor as one `processor_config.json` that contains the image processor. Older versions
    saved the image processor as `preprocessor_config.json`.

    Raises:
        ValueError: Neither file describes an image processor, or one of them needs custom code.
    """
    whole, own = directory / "processor_config.json", directory / "preprocessor_config.json"
    found = {path: read_json(path) for path in (whole, own) if path.is_file()}
    nested = found.get(whole, {}).get("image_processor")
    parts = [*found.items(), *([(whole, nested)] if isinstance(nested, dict) else [])]
    if bringing := next((path for path, settings in parts if settings.get("auto_map")), None):
        raise ValueError(
            f"{bringing} needs custom code (auto_map, trust_remote_code), which Fovea never runs; use a "
            "checkpoint with "
            "a processor that is built into transformers"
        )
    if isinstance(nested, dict):
        return nested
    if own in found:
        return found[own]
    raise ValueError(
        f"{directory} describes no image processor: neither {own.name} nor image_processor in {whole.name}"
    )


@dataclass(frozen=True)
class ModelDirectory:
    """The parts of a model directory that the renderer needs."""

    directory: Path
    config: dict[str, Any]
    family: VisionFamily | None
    """The vision family, bound to the checkpoint; None for a text model."""

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json."""
        return str(self._require(self.config, "model_type"))

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids in the vocabulary of the embedding."""
        return int(self._require(language_entries(self.config), "vocab_size"))

    @property
    def max_position_count(self) -> int:
        """The longest sequence that the model supports, in tokens."""
        length = context_length(self.config)
        if length is None:
            raise ValueError(f"{self.directory / 'config.json'} has no max_position_embeddings")
        return length

    def _require(self, entries: Mapping[str, Any], key: str) -> Any:
        if entries.get(key) is None:
            raise ValueError(f"{self.directory / 'config.json'} has no {key}")
        return entries[key]


def read_directory(directory: Path) -> ModelDirectory:
    """Reads a model directory. Raises ValueError if it is not a model directory, or if its family is unknown."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; --model takes a model directory or a hub name")
    config = read_json(directory / "config.json")
    return ModelDirectory(directory, config, vision.bind(config, read_added_tokens(directory)))


def loadable_path(model: str) -> str:
    """Returns a model's path in a form with which clients find the tokenizer, also as the model's name.

    The SDK 0.38 cuts the last component off a name with two slashes (`org/model/variant`), so a path with two slashes
    gets a third one at its end. It is still the same path.
    """
    return f"{model}/" if model.count("/") == 2 and not model.endswith("/") else model


def locate(model: str) -> Path:
    """Returns the directory of `model`. A hub name is downloaded, without weights.

    Raises the error of huggingface_hub if the model does not exist or the hub cannot be reached.
    """
    directory = Path(model).expanduser()
    if directory.exists() or model.startswith((".", "/", "~")):
        return directory
    from huggingface_hub import snapshot_download  # slow to import, and only needed for a hub name

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.txt"]))
