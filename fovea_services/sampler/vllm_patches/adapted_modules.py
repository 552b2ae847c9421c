"""Which modules take adapters: `lm_head` of every model, gates of shared experts, the tower of Qwen3-VL with experts.

Replaces: `vllm.lora.model_manager.get_supported_lora_modules`, `LoRAModelManager._get_punica_wrapper` there,
    `vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA.create_lora_weights`, and `packed_modules_mapping` of
    `Qwen3VLMoeForConditionalGeneration`, and `can_replace_layer` of `vllm.lora.layers.FusedMoEWithLoRA`.
Why: a model says in `embedding_modules` which of its embeddings take LoRA. Qwen3 names `lm_head`; Qwen2, and with it
    Qwen2.5-VL, does not, though the layers that apply such an adapter are the same. Our trainer adapts it everywhere.
    Of a vision model vLLM adapts what lies within its parts alone, and the `lm_head` of Idefics 3 and GLM-4.1V stands
    beside them. It refuses vocabularies beyond 258,048, a bound of earlier kernels: Gemma's has 262,208.
    A module that another one holds by a second name is adapted by its first alone if no module has the second for its
    first: the gate of Qwen3.5's shared experts took an adapter and computed without it (1.3 nat).
    Qwen3-VL's classes say that `qkv` of a tower comes packed, but that of the models with experts.
    Experts whose kernel takes no adapters end the engine at its start; here they are left as they are, and adapters of
    them are refused by name.
Upstream: vllm-project/vllm issue 21500, closed without a change; of the others none known.
Delete when: `Qwen2ForCausalLM` and `Qwen2_5_VLForConditionalGeneration` have `lm_head` in their `embedding_modules`,
    `Idefics3ForConditionalGeneration` and `Glm4vForConditionalGeneration` have it among the parts of `get_mm_mapping`,
    `create_lora_weights` takes any vocabulary, `get_supported_lora_modules` has `expert_gate` of Qwen3.5 with experts,
    `Qwen3VLMoeForConditionalGeneration` has `qkv` in its mapping, and `can_replace_layer` asks the kernel.
"""

from typing import Any

import torch
from vllm.lora import model_manager
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

_NAME = "lm_head"
_MOST_TOKENS = 258_048
"""The largest vocabulary for which vLLM makes room."""


def apply() -> None:
    """Adds them to what models say; twice is no error."""
    Qwen3VLMoeForConditionalGeneration.packed_modules_mapping |= {"qkv": ["qkv"]}
    ask_model: Any = model_manager.get_supported_lora_modules
    if ask_model.__module__ == __name__:
        return
    manager = model_manager.LoRAModelManager
    ask_manager = manager._get_punica_wrapper

    def supported(model: torch.nn.Module) -> list[str]:
        modules = model.named_modules(remove_duplicate=False)
        second = {name.rpartition(".")[2] for name, module in modules if isinstance(module, LinearBase)}
        return sorted({*ask_model(model), *second, _NAME})

    def wrapper_of(self: Any, module_name: str) -> Any:
        found = ask_manager(self, module_name)
        if found is None and module_name.rpartition(".")[2] == _NAME:
            return self.punica_wrapper_mapping[self.mm_mapping.language_model[0]]
        return found

    _ask_kernels(FusedMoEWithLoRA)
    _ask_kernels(FusedMoE3DWithLoRA)
    model_manager.get_supported_lora_modules = supported
    manager._get_punica_wrapper = wrapper_of
    make_room = LogitsProcessorWithLoRA.create_lora_weights
    LogitsProcessorWithLoRA.create_lora_weights = lambda *arguments: _make_room(make_room, *arguments)


def _ask_kernels(wrapper: Any) -> None:
    """Has a wrapper of experts leave those alone whose kernel takes no adapters."""
    fits = wrapper.can_replace_layer

    def can_replace_layer(source_layer: Any, **how: Any) -> bool:
        if isinstance(source_layer, MoERunner):
            method = source_layer._quant_method
            if method.is_monolithic or method.moe_kernel is None or not method.moe_kernel.supports_lora():
                return False
        return bool(fits(source_layer=source_layer, **how))

    wrapper.can_replace_layer = can_replace_layer


def _make_room(make_room: Any, layer: Any, max_loras: int, *arguments: Any) -> None:
    """vLLM's own for as many tokens as it takes; then B, whose rows are the tokens, for all of them."""
    logits = layer.base_layer
    token_count = logits.vocab_size
    try:
        logits.vocab_size = min(token_count, _MOST_TOKENS)
        make_room(layer, max_loras, *arguments)
    finally:
        logits.vocab_size = token_count
    if token_count > _MOST_TOKENS:
        small = layer.lora_b_stacked
        layer.lora_b_stacked = small.new_zeros(max_loras, 1, token_count, small.shape[-1])
