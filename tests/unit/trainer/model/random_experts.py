"""A layer's experts with random weights, for tests of their computations."""

from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

COUNT, HIDDEN, INNER = 6, 24, 10


def random_experts(dtype: torch.dtype, inner: int = INNER) -> Any:
    """Returns COUNT experts with unaligned sides, the same at each call."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": inner, "num_experts": COUNT}
    experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return experts.to(dtype)
