"""Validates the `engine_arguments` setting, and derives single arguments of vLLM's engine."""

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from enum import EnumType
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fovea import vision
from fovea.runtime import model_files
from fovea.vision.processor_vl import ProcessorVL
from fovea.wire.errors import similar
from fovea.wire.manifest import most_placed_bytes
from fovea_sampler.settings import SamplerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SETTING_OF = {
    "max_model_len": "max_context",
    "max_num_seqs": "max_sequences",
    "max_num_batched_tokens": "max_batched_tokens",
    "kv_cache_memory_bytes": "kv_cache_mib",
    "gpu_memory_utilization": "gpu_memory_fraction",
    "tensor_parallel_size": "tensor_parallel",
    "enable_expert_parallel": "expert_parallel",
    "enforce_eager": "eager",
    "max_logprobs": "max_top_logprobs",
    "limit_mm_per_prompt": "max_images",
    "enable_lora": "max_loras",
    "enable_moe_shared_loras": "max_loras",
    "enable_tower_connector_lora": "max_loras",
} | {
    name: name
    for name in ("model", "dtype", "kv_cache_dtype", "block_size", "max_lora_rank", "max_loras", "max_cpu_loras")
}
"""Engine arguments that Fovea derives from a setting, and the name of that setting."""

# Memory that kernels and torch's allocator may still request while a snapshot waits on the GPU.
WORKING_BYTES = 2 * 2**30
# The fraction of a GPU's memory for adapter slots, taken from the KV cache.
_SLOT_SHARE = 1 / 6
# The largest fraction of the KV cache's memory that "auto" reserves for a snapshot.
_MOST_OF_CACHE = 1 / 3

_SAME_AS = {"lfm2": {"block_dim": "hidden_size", "conv_dim": "hidden_size"}}
"""By `model_type` of the language model: missing configuration entries and the entries from which they are copied."""

_ANOTHER_MODEL = "renderer, trainer and sampler must read the same model"
_OTHER_NUMBERS = "the trainer rounds neither weights nor layer inputs, so the two would compute different models"
_ONE_ENGINE = "a push must reach every worker and find whole layers there; to scale out, start more samplers"
_OWN_EXPERTS = "Fovea's own scheduler returns the experts of tokens: set routed_experts in a request instead"
_GUESSES = (
    "with speculative tokens vLLM returns log-probabilities after top-k and top-p, and on a CPU none at all (NaN)"
)
_OWN_SLOTS = "adapters of different ranks share the memory of a slot, which vLLM would split by rank"
_OTHER_DRAWS = "the log-probabilities would not be those of the distribution from which tokens are drawn"
_REASONS = {
    _ANOTHER_MODEL: "model_weights tokenizer tokenizer_mode tokenizer_revision revision code_revision hf_config_path"
    " config_format runner convert model_impl model_class_overrides trust_remote_code language_model_only"
    " mm_encoder_only override_generation_config mm_processor_kwargs",
    _OTHER_NUMBERS: "quantization quantization_config allow_deprecated_quantization mm_encoder_attn_dtype"
    " mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path video_pruning_rate kv_sharing_fast_prefill",
    _ONE_ENGINE: "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size nnodes node_rank"
    " master_addr master_port data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local"
    " data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb"
    " data_parallel_multi_port_external_lb data_parallel_backend enable_eplb eplb_config enable_elastic_ep",
    _OWN_SLOTS: "fully_sharded_loras",
    _GUESSES: "speculative_config spec_method spec_model spec_tokens",
    _OTHER_DRAWS: "logits_processors watermark_config diffusion_config",
    _OWN_EXPERTS: "scheduler_cls enable_return_routed_experts aux_output_config",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Engine arguments that must keep vLLM's default, and the reason."""


def checked(given: Mapping[str, Any], made: Collection[str]) -> dict[str, Any]:
    """Returns the arguments of `given`, converted to vLLM's types.

    Args:
        given: Values by the field names of vLLM's AsyncEngineArgs.
        made: Names of the arguments that Fovea sets itself.

    Raises ValueError, naming the argument, for an argument that vLLM does not know, that Fovea sets itself, that would
    break a guarantee of Fovea, or that has a wrong type.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = dataclasses.fields(AsyncEngineArgs)
    types: dict[str, Any] = {field.name: field.type for field in fields if not field.name.startswith("_")}
    for name in given:
        if problem := _problem(name, types, made):
            raise ValueError(f"--engine-arguments: {problem}")
    config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    typed: Any = {name: (types[name], ...) for name in given}
    model: type[BaseModel] = create_model("EngineArguments", __config__=config, **typed)
    try:
        parsed = model.model_validate({name: _member(types[name], value) for name, value in given.items()})
    except ValidationError as error:
        raise ValueError(f"--engine-arguments: {in_one_line(error)}") from None
    return {name: getattr(parsed, name) for name in given}


def check_expert_parallel(settings: SamplerSettings, config: Mapping[str, Any]) -> None:
    """Raises ValueError for expert parallelism on one device or for a model without experts."""
    if not settings.expert_parallel:
        return
    if settings.tensor_parallel == 1:
        raise ValueError("--expert-parallel spreads experts over several devices; set --tensor-parallel above 1")
    if not model_files.experts_of(config):
        raise ValueError(f"--expert-parallel: {settings.model} has no experts")


def in_one_line(error: ValidationError) -> str:
    """Returns the location and the message of each error, separated by semicolons."""
    return "; ".join(": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in error.errors())


def _member(kind: Any, value: Any) -> Any:
    """Converts the name of an enumeration member to the member, as vLLM's command line does, because pydantic does not.

    Returns all other values unchanged.
    """
    for option in (kind, *get_args(kind)):
        if isinstance(option, EnumType) and isinstance(value, str) and value in option.__members__:
            return option[value]
    return value


def _problem(name: str, known: Collection[str], made: Collection[str]) -> str:
    """Returns the reason why an argument of that name is refused, or an empty string if it is accepted."""
    if name in SETTING_OF:
        return f"{name} follows from Fovea's own --{SETTING_OF[name].replace('_', '-')}; set that instead"
    if name in REFUSED:
        return f"{name} must keep vLLM's default: {REFUSED[name]}"
    if name in made:
        return f"{name} must keep the value that Fovea gives it"
    if name not in known:
        return f"vLLM has no engine argument {name}{similar(name, known)}"
    return ""


def quick_compilation(max_sequences: int) -> dict[str, Any]:
    """Returns vLLM's `compilation_config` for `fast_start`: no compilation, and CUDA graphs only for decoding.

    vLLM's default also captures graphs for mixed batches of up to 512 tokens, and each of them once more with adapters.

    Args:
        max_sequences: The most sequences in one batch, which is the largest graph.
    """
    sizes = sorted({1, 2, 4, *range(8, max_sequences, 8), max_sequences})
    sizes = [size for size in sizes if size <= max_sequences]
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


def start_steps(config: "VllmConfig") -> str:
    """Returns the steps of the engine's start, for the log: on a GPU, all but the first can take minutes."""
    compilation, steps = config.compilation_config, ["loads the weights"]
    if compilation.mode:
        steps.append(
            f"compiles the model (later starts read it from {os.environ.get('VLLM_CACHE_ROOT', '~/.cache/vllm')})"
        )
    if sizes := compilation.cudagraph_capture_sizes:
        steps.append(f"captures CUDA graphs of {len(sizes)} batch sizes, the largest {max(sizes)}")
    return ", ".join(steps)


def slot_room(settings: SamplerSettings, device_bytes: int) -> int:
    """Returns the default size in bytes of the adapter slots on a GPU with this much memory."""
    return int(device_bytes * settings.gpu_memory_fraction * _SLOT_SHARE)


def room_for_pushes(
    wanted: Literal["auto", "always", "never"],
    shapes: Mapping[str, tuple[int, ...]],
    item_bytes: int,
    engine_bytes: int,
    tensor_parallel: int,
) -> int:
    """Returns the bytes of each GPU that the KV cache must leave free for arriving full weights; 0 to reserve none.

    Args:
        wanted: The setting `full_push_room`.
        shapes: Shapes of the checkpoint's tensors.
        item_bytes: Bytes of one element of the model.
        engine_bytes: Bytes of each GPU that the engine may use.
        tensor_parallel: GPUs over which the model is split. Each receives its part of pushed weights, and needs memory
            to load divided tensors in full shape.

    Raises ValueError if `always` would leave no KV cache.
    """
    sizes = {name: item_bytes * math.prod(shape) for name, shape in shapes.items()}
    part_bytes = sum(sizes.values()) // tensor_parallel
    placed_bytes = most_placed_bytes(sizes.items()) if tensor_parallel > 1 else 0
    room, cache = part_bytes + placed_bytes + WORKING_BYTES, engine_bytes - part_bytes
    if wanted == "always" and room >= cache:
        raise ValueError(
            f"--full-push-room always needs {room / 2**30:.1f} GiB of each GPU, but beside the model the engine has "
            f"{cache / 2**30:.1f} GiB: use auto or never, a larger --gpu-memory-fraction, or more GPUs"
        )
    return room if wanted == "always" or (wanted == "auto" and room <= cache * _MOST_OF_CACHE) else 0


def missing_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration entries that vLLM needs and transformers does not write, in the form of `hf_overrides`.

    Checkpoints on the hub from before transformers supported their model contain these entries.
    """
    text = config.get("text_config", config)
    known = _SAME_AS.get(text.get("model_type"), {})
    missing = {name: text[other] for name, other in known.items() if name not in text}
    routing = model_files.ROUTING_ENTRIES.get(str(text.get("model_type")), {})
    missing |= {name: value for name, value in routing.items() if name not in text}
    if not missing:
        return {}
    return {"text_config": missing} if "text_config" in config else missing


def pixels_are_normalized(config: Mapping[str, Any]) -> bool:
    """Returns True if the pixels of a model arrive normalised by its processor, not as uint8."""
    family = vision.choose(config)
    return family is not None and issubclass(family, ProcessorVL)
