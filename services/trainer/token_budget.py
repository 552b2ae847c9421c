"""How many tokens a micro-batch may have: large ones keep a GPU busy, larger ones do not fit its memory."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from services.trainer.device_memory import free_bytes

CPU_TOKENS = 8192
MOST_TOKENS = 16384
"""More does not make a step faster, measured with a model of 4 billion parameters."""
MOST_PATCHES = 65536
_LEAST_TOKENS = 1024
_LEAST_PATCHES = 4096
_TOWER_SHARE = 0.2
"""Of the memory for activations, where the vision tower is trained."""


@dataclass(frozen=True)
class Budgets:
    """The most tokens and patches of one micro-batch of one rank."""

    tokens: int
    patches: int


def fitting_budgets(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, reserved_bytes: int, trains_vision: bool
) -> Budgets:
    """The most tokens and patches whose activations fit beside what is allocated now and `reserved_bytes` to come."""
    if device.type == "cpu":
        return Budgets(CPU_TOKENS, MOST_PATCHES)
    return budgets_within(free_bytes(device) - reserved_bytes, config, dtype, trains_vision)


def budgets_within(size_bytes: int, config: PretrainedConfig, dtype: torch.dtype, trains_vision: bool) -> Budgets:
    """The same for so much memory."""
    patches = MOST_PATCHES
    if trains_vision:
        tower_bytes = int(_TOWER_SHARE * size_bytes)
        patches = min(MOST_PATCHES, max(_LEAST_PATCHES, tower_bytes // patch_bytes(config, dtype)))
        size_bytes -= tower_bytes
    tokens = size_bytes // activation_bytes(config, dtype)
    return Budgets(max(_LEAST_TOKENS, min(MOST_TOKENS, tokens // 1024 * 1024)), patches)


def activation_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What a layer keeps of one token for its backward pass, over all layers; a quarter more than was measured."""
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = text.num_attention_heads + text.num_key_value_heads
    width = 8 * text.hidden_size + 3 * text.intermediate_size + 4 * head_size * heads
    return int(text.num_hidden_layers * width * dtype.itemsize)


def patch_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What the vision tower keeps of one patch, likewise; counted, not measured."""
    vision = config.vision_config
    width = 16 * vision.hidden_size + 3 * vision.intermediate_size
    return int(vision.depth * width * dtype.itemsize)
