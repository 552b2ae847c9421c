"""Adapters of `lm_head` for every model.

Replaces: `vllm.lora.model_manager.get_supported_lora_modules`, and `LoRAModelManager._get_punica_wrapper` there.
Why: a model says in `embedding_modules` which of its embeddings take LoRA. Qwen3 names `lm_head`; Qwen2, and with it
    Qwen2.5-VL, does not, though the layers that apply such an adapter are the same. Our trainer adapts it everywhere.
    Of a vision model vLLM adapts what lies within its parts alone, and Idefics 3's `lm_head` stands beside them.
Upstream: vllm-project/vllm issue 21500, closed without a change.
Delete when: `Qwen2ForCausalLM` and `Qwen2_5_VLForConditionalGeneration` have `lm_head` in their `embedding_modules`,
    and `Idefics3ForConditionalGeneration` among the parts of `get_mm_mapping`.
"""

from typing import Any

import torch
from vllm.lora import model_manager

_NAME = "lm_head"


def apply() -> None:
    """Adds `lm_head` to what any model says; twice is no error."""
    ask_model: Any = model_manager.get_supported_lora_modules
    if ask_model.__module__ == __name__:
        return
    manager = model_manager.LoRAModelManager
    ask_manager = manager._get_punica_wrapper

    def supported(model: torch.nn.Module) -> list[str]:
        return sorted({*ask_model(model), _NAME})

    def wrapper_of(self: Any, module_name: str) -> Any:
        found = ask_manager(self, module_name)
        if found is None and module_name == _NAME:
            return self.punica_wrapper_mapping[self.mm_mapping.language_model[0]]
        return found

    model_manager.get_supported_lora_modules = supported
    manager._get_punica_wrapper = wrapper_of
