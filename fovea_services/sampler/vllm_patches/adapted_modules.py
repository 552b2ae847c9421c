"""Lets adapters change more modules: every `lm_head`, gates of shared experts, and the tower of Qwen3-VL with experts.

Replaces: `vllm.lora.model_manager.get_supported_lora_modules`, `LoRAModelManager._get_punica_wrapper` there,
    `vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA.create_lora_weights`, and `packed_modules_mapping` of
    `Qwen3VLMoeForConditionalGeneration`, and `can_replace_layer` of `vllm.lora.layers.FusedMoEWithLoRA`.
Why: Fovea's trainer adapts `lm_head` of every model. vLLM adapts an embedding only if the model's class lists it in
    `embedding_modules`. Qwen3 lists `lm_head`; Qwen2, and with it Qwen2.5-VL, does not, although its layers are the
    same. The patch adds `lm_head` to the supported modules of every model.
    In a vision model, vLLM adapts only modules inside the components of `get_mm_mapping`. `lm_head` of Idefics 3 and
    GLM-4.1V is outside them; the patch treats it as a part of the language model.
    vLLM refuses vocabularies of more than 258,048 tokens, a bound of earlier kernels. Gemma's has 262,208. The patch
    allocates the larger matrix itself.
    vLLM lists each module only under its first name. If two modules share a submodule and its second name is not the
    first name of another one, it is not replaced there: the gate of Qwen3.5's shared experts accepted an adapter and
    computed without it (an error of 1.3 nat). The patch lists modules under all their names.
    Qwen3-VL's classes declare the packed `qkv` of the vision tower, but the class for models with experts does not.
    The patch adds the declaration.
    If the kernel of a model's experts does not support adapters, the engine dies at its start. With the patch such
    experts stay unadapted, and a manifest with adapters for them is refused with the name of the module.
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
"""The largest vocabulary for which vLLM allocates LoRA weights."""


def apply() -> None:
    """Applies the patch to this process. It may be called twice."""
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
    """Makes vLLM's LoRA class for experts skip layers of which the kernel does not support adapters."""
    fits = wrapper.can_replace_layer

    def can_replace_layer(source_layer: Any, **how: Any) -> bool:
        if isinstance(source_layer, MoERunner):
            method = source_layer._quant_method
            if method.is_monolithic or method.moe_kernel is None or not method.moe_kernel.supports_lora():
                return False
        return bool(fits(source_layer=source_layer, **how))

    wrapper.can_replace_layer = can_replace_layer


def _make_room(make_room: Any, layer: Any, max_loras: int, *arguments: Any) -> None:
    """Calls vLLM's method with the largest vocabulary that it accepts, then allocates B, with a row per token."""
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
