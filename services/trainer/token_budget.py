"""How many tokens a micro-batch may have: large ones keep a GPU busy, larger ones do not fit its memory."""

import torch
from transformers import PretrainedConfig

from services.trainer.device_memory import free_bytes

CPU_TOKENS = 8192
MOST_TOKENS = 16384
"""More does not make a step faster, measured with a model of 4 billion parameters."""
_LEAST_TOKENS = 1024


def token_budget(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, reserved_bytes: int) -> int:
    """The most tokens whose activations fit beside what is allocated now and `reserved_bytes` to come."""
    if device.type == "cpu":
        return CPU_TOKENS
    tokens = (free_bytes(device) - reserved_bytes) // activation_bytes(config, dtype)
    return max(_LEAST_TOKENS, min(MOST_TOKENS, tokens // 1024 * 1024))


def activation_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What a layer keeps of one token for its backward pass, over all layers; a quarter more than was measured."""
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = text.num_attention_heads + text.num_key_value_heads
    width = 8 * text.hidden_size + 3 * text.intermediate_size + 4 * head_size * heads
    return int(text.num_hidden_layers * width * dtype.itemsize)
