"""How many tokens a micro-batch may have: large ones keep a GPU busy, larger ones do not fit its memory."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

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


CPU_BUDGETS = Budgets(8192, MOST_PATCHES)
"""Larger ones make nothing faster there."""


def budgets_within(size_bytes: int, config: PretrainedConfig, dtype: torch.dtype, trains_vision: bool) -> Budgets:
    """The most tokens and patches whose activations fit into so much memory, but never less than is of use."""
    patches = MOST_PATCHES
    if trains_vision:
        tower_bytes = int(_TOWER_SHARE * size_bytes)
        patches = min(MOST_PATCHES, max(_LEAST_PATCHES, tower_bytes // patch_bytes(config, dtype)))
        size_bytes -= tower_bytes
    tokens = size_bytes // activation_bytes(config, dtype)
    return Budgets(max(_LEAST_TOKENS, min(MOST_TOKENS, tokens // 1024 * 1024)), patches)


def least_bytes(config: PretrainedConfig, dtype: torch.dtype, logit_chunk_bytes: int, trains_vision: bool) -> int:
    """What the smallest micro-batches take: activations, logits with their gradient and float32 form, the tower's."""
    logit_bytes = min(logit_chunk_bytes, _LEAST_TOKENS * config.get_text_config().vocab_size * dtype.itemsize)
    tower_bytes = _LEAST_PATCHES * patch_bytes(config, dtype) if trains_vision else 0
    return int(_LEAST_TOKENS * activation_bytes(config, dtype) + 4 * logit_bytes + tower_bytes)


def activation_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What a layer keeps of one token for its backward pass, over all layers; a quarter more than was measured."""
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = text.num_attention_heads + text.num_key_value_heads
    width = 8 * text.hidden_size + 3 * text.intermediate_size + 4 * head_size * heads
    return int(text.num_hidden_layers * width * dtype.itemsize)


def recomputed_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What one token takes where activations are computed again: the input of each layer, and all of one layer."""
    text = config.get_text_config()
    inputs_bytes = text.num_hidden_layers * text.hidden_size * dtype.itemsize
    return int(inputs_bytes + 2 * activation_bytes(config, dtype) // text.num_hidden_layers)


def patch_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What the vision tower keeps of one patch, likewise; counted, not measured."""
    vision = config.vision_config
    width = 16 * vision.hidden_size + 3 * vision.intermediate_size
    return int(vision.depth * width * dtype.itemsize)
