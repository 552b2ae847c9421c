"""Counts the memory of a sampler's GPU with the sampler's own functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fovea_sampler.engine import engine_arguments
from fovea_sampler.engine.vllm_launch import AdapterCapacity, capacity_for, context
from fovea_sampler.settings import SamplerSettings


@dataclass(frozen=True)
class SamplerPlan:
    """The parts of a sampler's memory on each of its GPUs, in bytes.

    Attributes:
        weights_bytes: The model's weights.
        capacity: The room for adapters.
        slots_bytes: Their slots.
        push_bytes: Room for pushed full weights; 0 if they arrive in host memory.
        cache_bytes: The most that remains for the KV cache. vLLM subtracts the activations of its largest batch.
        cache_tokens: Tokens of that cache.
        context: The most tokens of a prompt and its completion; None leaves the choice to vLLM.
    """

    weights_bytes: int
    capacity: AdapterCapacity
    slots_bytes: int
    push_bytes: int
    cache_bytes: int
    cache_tokens: int
    context: int | None


def plan_sampler(
    settings: SamplerSettings, shapes: Mapping[str, tuple[int, ...]], config: Any, gpu_bytes: int
) -> SamplerPlan:
    """Returns the memory of a sampler.

    Args:
        settings: Settings of the sampler.
        shapes: Shapes of the checkpoint's tensors.
        config: Configuration of the model.
        gpu_bytes: Memory of each GPU.

    Raises:
        ValueError: The sampler refuses the settings, or has no room for a KV cache.
    """
    engine_arguments.check_expert_parallel(settings, config.to_dict())
    size = settings.tensor_parallel
    item_bytes = 4 if settings.dtype == "float32" else 2
    whole_bytes = item_bytes * sum(map(prod, shapes.values()))
    engine_bytes = int(gpu_bytes * settings.gpu_memory_fraction)
    push_bytes = 0
    if settings.full_push_room != "never" and settings.kv_cache_mib is None and not settings.shared_base:
        push_bytes = engine_arguments.room_for_pushes(settings.full_push_room, shapes, item_bytes, engine_bytes, size)
    slot_bytes = engine_arguments.slot_room(settings, gpu_bytes)
    capacity = capacity_for(settings, shapes, item_bytes, slot_bytes, host_bytes=2**62)
    slots_bytes = capacity.slots * capacity.adapter_bytes // size
    cache_bytes = engine_bytes - push_bytes - whole_bytes // size - slots_bytes
    if settings.kv_cache_mib is not None:
        cache_bytes = settings.kv_cache_mib << 20
    cache_tokens = max(cache_bytes, 0) // cache_bytes_per_token(config, item_bytes, size)
    if cache_tokens == 0:
        raise ValueError(
            f"the sampler's {engine_bytes >> 20:,} MiB leave no room for a KV cache beside "
            f"{whole_bytes // size >> 20:,} MiB of weights and {slots_bytes >> 20:,} MiB of adapter slots: "
            "raise sampler.gpu_memory_fraction, lower sampler.max_loras or sampler.max_lora_rank, or use a larger GPU"
        )
    return SamplerPlan(
        whole_bytes // size, capacity, slots_bytes, push_bytes, cache_bytes, cache_tokens, context(settings)
    )


def cache_bytes_per_token(config: Any, item_bytes: int, tensor_parallel: int) -> int:
    """Returns the bytes of keys and values of one token on each GPU, over all layers with attention to all tokens.

    Layers with a window or a state need a fixed amount per sequence, which is not counted.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    found = 0
    for index, kind in enumerate(kinds):
        layer = text.per_layer_config[index]  # in Gemma 4 layers differ in head size
        if latent := getattr(layer, "kv_lora_rank", None):  # one vector for all heads, on each GPU
            found += (latent + layer.qk_rope_head_dim) * item_bytes
            continue
        head_size = getattr(layer, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = max(1, layer.num_key_value_heads // tensor_parallel)
        found += 2 * heads * head_size * item_bytes if kind == "full_attention" else 0
    return max(found, 1)
