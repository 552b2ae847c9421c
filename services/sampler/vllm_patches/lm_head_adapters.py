"""Adapters of `lm_head` for every model.

Replaces: `vllm.lora.model_manager.get_supported_lora_modules`.
Why: a model says in `embedding_modules` which of its embeddings take LoRA. Qwen3 names `lm_head`; Qwen2, and with it
    Qwen2.5-VL, does not, though the layers that apply such an adapter are the same. Our trainer adapts it everywhere.
Upstream: vllm-project/vllm issue 21500, closed without a change.
Delete when: `Qwen2ForCausalLM` and `Qwen2_5_VLForConditionalGeneration` have `lm_head` in their `embedding_modules`.
"""

from typing import Any

import torch
from vllm.lora import model_manager


def apply() -> None:
    """Adds `lm_head` to what any model says; twice is no error."""
    ask_model: Any = model_manager.get_supported_lora_modules
    if ask_model.__module__ == __name__:
        return

    def supported(model: torch.nn.Module) -> list[str]:
        return sorted({*ask_model(model), "lm_head"})

    model_manager.get_supported_lora_modules = supported
