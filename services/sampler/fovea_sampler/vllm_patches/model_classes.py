"""Corrects what vLLM's model classes declare: the modules that adapters may change, and the names of parameters.

With the patch, adapters may change every `lm_head`, the gates of shared experts, and the tower of Qwen3-VL with
experts, and names in checkpoints map to parameters that vLLM would otherwise not find. Qwen3-Omni treats images as
Qwen3-VL does. Llama 4 keeps the order of channels, and the temperature of its attention, that its checkpoint has.

Replaces: `vllm.lora.model_manager.get_supported_lora_modules`, `LoRAModelManager._get_punica_wrapper` there,
    `vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA.create_lora_weights`, and `packed_modules_mapping` of
    `Qwen3VLMoeForConditionalGeneration`, and `can_replace_layer` of `vllm.lora.layers.FusedMoEWithLoRA`.
    For names: `hf_to_vllm_mapper` of the classes in `TOWERS`, of `Lfm2VLForConditionalGeneration` and of
    `MixtralForCausalLM`, adds `named_parameters` to the classes in `_LOOKING_UP`, and keeps
    `lora_base_layer_prefix` of `RoutedExperts` empty.
    For images: `__init__`, `get_mrope_input_positions` and `supports_mm_device_do_normalize` of
    `Qwen3OmniMoeThinkerForConditionalGeneration`.
    For Llama 4: `__init__` and `permute_qk_weight_for_rotary` of `Llama4ForCausalLM`, and `get_rope` in its module.
Why: Fovea's trainer adapts `lm_head` of every model. vLLM adapts an embedding only if the model's class lists it in
    `embedding_modules`. Qwen3 lists `lm_head`; Qwen2, and with it Qwen2.5-VL, does not, although its layers are the
    same. The patch adds `lm_head` to the supported modules of every model.
    In a vision model, vLLM adapts only modules inside the components of `get_mm_mapping`. `lm_head` of Idefics 3 and
    GLM-4.1V is outside them; the patch treats it as a part of the language model.
    vLLM refuses vocabularies of more than 258,048 tokens, a bound of earlier kernels. Gemma's has 262,208. The patch
    allocates the larger matrix itself.
    vLLM lists each module only under its first name. A submodule that two modules share has two names. vLLM does not
    replace it under the second name, unless another module is listed under that name: the gate of Qwen3.5's shared
    experts accepted an adapter and computed without it (an error of 1.3 nat). The patch lists all names.
    Qwen3-VL's classes declare the packed `qkv` of the vision tower, but the class for models with experts does not.
    The patch adds the declaration.
    If the kernel of a model's experts does not support adapters, the engine dies at its start. With the patch such
    experts stay unadapted, and a manifest with adapters for them is refused with the name of the module. The same
    holds on a GPU for Llama 4's experts, with inputs that the router's weight multiplies. vLLM's kernels give gate and
    up adapters inputs without that weight, and multiply the down adapter by it; `experts_cpu` does neither.
    transformers 5 removed the level `vision_model` from SigLIP and CLIP and saves checkpoints without it. vLLM's towers
    have the level and refuse such checkpoints. The patch inserts it; checkpoints on the hub have it and load as before.
    Pixtral's tower looks up a checkpoint's names among its own parameters. Once LoRA wraps its layers, as in LLaVA, the
    parameters have other names and no later weights load. (Other towers look up layer by layer.) The patch reports the
    parameters under their names without LoRA. DeepSeek-V3's and Llama 4's do the same and get the same patch.
    Once LoRA wraps experts, vLLM expects names with `base_layer` in a checkpoint and silently ignores the others, so a
    push left experts unchanged. The patch keeps the expected names as they are without LoRA.
    LFM2's short convolutions are called `conv` in checkpoints and `short_conv` in vLLM. LFM2-VL's mapper lacks that
    entry. Weights load, because the language model inside has a mapper of its own, but adapters do not find their
    module. The patch adds the entry.
    Mixtral's experts are below `block_sparse_moe` in checkpoints and vLLM, and below `mlp` in transformers and
    adapters. The patch adds an entry for that.
    Qwen3-Omni's tower expects normalised pixels and would use bytes as such. The patch normalises them, as Qwen3-VL
    does. Its positions assume a token after each image, without which the engine dies; the patch computes Qwen3-VL's,
    which are equal otherwise.
    Llama 4's loader changes the order of the outputs of queries and keys, so that its rotary embedding turns halves
    instead of neighbours. It does not do so for adapters, which then change other channels (an error of 1.3 nat). The
    patch keeps the order and turns neighbours. vLLM tunes the temperature of attention only with contexts above 32,768
    tokens, whatever config.json says; the patch does what it says. The patch embedding (`linear`) runs before the class
    token is added, but vLLM maps its rows to adapters as if the token were there (an error of 1.1 nat). The patch does
    not list the embedding, so an adapter of it is refused. Nor does it list `kv_b_proj` of DeepSeek-V3, which vLLM
    multiplies into other weights without its adapter.
Upstream: vllm-project/vllm issue 21500, closed without a change; none known for the others.
Delete when: `Qwen2ForCausalLM` and `Qwen2_5_VLForConditionalGeneration` have `lm_head` in their `embedding_modules`,
    `Idefics3ForConditionalGeneration` and `Glm4vForConditionalGeneration` have it among the parts of `get_mm_mapping`,
    `create_lora_weights` takes any vocabulary, `get_supported_lora_modules` has `expert_gate` of Qwen3.5 with experts,
    `Qwen3VLMoeForConditionalGeneration` has `qkv` in its mapping, and `can_replace_layer` asks the kernel,
    which computes adapters of experts with weighted inputs;
    and vLLM maps `vision_tower.embeddings` of each class to a parameter that its model has, `PixtralHFVisionModel`
    loads weights with `AutoWeightsLoader`, `RoutedExperts.get_expert_mapping` also maps checkpoint names when LoRA
    wraps the experts, LFM2-VL's mapper has the entries of LFM2's, and Mixtral's maps `.mlp.`; and Qwen3-Omni's class
    supports `mm_device_do_normalize`, and prompts that end with an image; and Llama 4's class changes the order of
    adapters too, and reads `attn_temperature_tuning` from config.json; and `get_mm_lora_token_counts` of Llama 4 gives
    the rows of the patch embedding.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from vllm.lora import model_manager
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models import llama4
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
from vllm.model_executor.models.lfm2_vl import Lfm2VLForConditionalGeneration
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration
from vllm.model_executor.models.llava_onevision import LlavaOnevisionForConditionalGeneration
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.mllama4 import Llama4ForConditionalGeneration
from vllm.model_executor.models.pixtral import PixtralHFVisionModel
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

_NAME = "lm_head"
_MOST_TOKENS = 258_048
"""The largest vocabulary for which vLLM allocates LoRA weights."""

TOWERS: tuple[Any, ...] = (
    Gemma3ForConditionalGeneration,
    Lfm2VLForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
)
"""vLLM's classes with a SigLIP or CLIP tower."""

_LOOKING_UP: tuple[Any, ...] = (
    *(PixtralHFVisionModel, DeepseekV2Model),
    *(llama4.Llama4Model, Llama4ForConditionalGeneration),
)
"""vLLM's classes that look up names of checkpoints among all their parameters."""

_LEVEL = WeightsMapper(
    orig_to_new_regex={re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}
)
# Only the projections, which adapters can change; the language model's own mapper does not touch these names again.
_CONVOLUTION = WeightsMapper(orig_to_new_regex={re.compile(r"\.conv\.(in_proj|out_proj)\."): r".short_conv.\1."})
_MIXTURE = WeightsMapper(orig_to_new_regex={re.compile(r"\.mlp\."): ".block_sparse_moe."})


def _named_parameters(self: Any, *arguments: Any, **how: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in torch.nn.Module.named_parameters(self, *arguments, **how):
        yield name.replace(".base_layer.", "."), parameter


def apply() -> None:
    """Applies the patch to this process. It may be called twice."""
    _correct_names()
    _extend_adapted_modules()
    if not Qwen3OmniMoeThinkerForConditionalGeneration.supports_mm_device_do_normalize:
        _complete_omni(Qwen3OmniMoeThinkerForConditionalGeneration)
    if llama4.get_rope.__module__ != __name__:
        _follow_llama4(llama4.Llama4ForCausalLM)


def _complete_omni(model: Any) -> None:
    build = model.__init__

    def init(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        build(self, vllm_config=vllm_config, prefix=prefix)
        normalize = build_mm_input_norm(vllm_config.model_config)
        self.visual.register_forward_pre_hook(lambda tower, given: (normalize(given[0], tower.dtype), *given[1:]))

    def positions(self: Any, input_tokens: list[int], mm_features: list[Any]) -> Any:
        return Qwen3VLForConditionalGeneration._get_mrope_input_positions(input_tokens, mm_features, self.config)

    model.__init__, model.get_mrope_input_positions = init, positions
    model.supports_mm_device_do_normalize = True


def _follow_llama4(model: Any) -> None:
    build, get_rope = model.__init__, llama4.get_rope

    def turn_neighbours(*arguments: Any, **options: Any) -> Any:
        return get_rope(*arguments, **options | {"is_neox_style": False})

    def init(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config
        tuning = {"attn_temperature_tuning": config.hf_config.attn_temperature_tuning}
        config.override_generation_config = config.override_generation_config | tuning
        build(self, vllm_config=vllm_config, prefix=prefix)

    llama4.get_rope, model.__init__ = turn_neighbours, init
    model.permute_qk_weight_for_rotary = lambda _, name, weight: (name, weight)


def _correct_names() -> None:
    for owner in _LOOKING_UP:
        owner.named_parameters = _named_parameters
    RoutedExperts.lora_base_layer_prefix = property(lambda _: "", lambda _, prefix: None)
    missing = [(model, _LEVEL) for model in TOWERS]
    missing += [(Lfm2VLForConditionalGeneration, _CONVOLUTION), (MixtralForCausalLM, _MIXTURE)]
    for model, more in missing:
        if not more.orig_to_new_regex.keys() <= model.hf_to_vllm_mapper.orig_to_new_regex.keys():
            model.hf_to_vllm_mapper = model.hf_to_vllm_mapper | more


def _extend_adapted_modules() -> None:
    Qwen3VLMoeForConditionalGeneration.packed_modules_mapping |= {"qkv": ["qkv"]}
    ask_model: Any = model_manager.get_supported_lora_modules
    if ask_model.__module__ == __name__:
        return
    manager = model_manager.LoRAModelManager
    ask_manager = manager._get_punica_wrapper

    def supported(model: torch.nn.Module) -> list[str]:
        modules = model.named_modules(remove_duplicate=False)
        second = {name.rpartition(".")[2] for name, module in modules if isinstance(module, LinearBase)}
        left = "linear" if isinstance(model, Llama4ForConditionalGeneration) else "kv_b_proj"
        return sorted({*ask_model(model), *second, _NAME} - {left})

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
    """Makes vLLM's LoRA class for experts skip layers that cannot be adapted."""
    fits = wrapper.can_replace_layer

    def can_replace_layer(source_layer: Any, **how: Any) -> bool:
        if isinstance(source_layer, MoERunner) and _problem_of(source_layer):
            return False
        return bool(fits(source_layer=source_layer, **how))

    wrapper.can_replace_layer = can_replace_layer


def unadapted_experts(model: torch.nn.Module) -> dict[str, str]:
    """Returns the reason why experts cannot be adapted, keyed by their names, for those that cannot."""
    runners = ((name, module) for name, module in model.named_modules() if isinstance(module, MoERunner))
    return {name: problem for name, runner in runners if (problem := _problem_of(runner))}


def _problem_of(runner: Any) -> str:
    """Returns the reason why the experts of a layer cannot be adapted, or an empty string."""
    method = runner._quant_method
    if method.is_monolithic or method.moe_kernel is None or not method.moe_kernel.supports_lora():
        return "vLLM's kernel for them does not support adapters"
    if runner.routed_experts.apply_router_weight_on_input and not current_platform.is_cpu():
        return (
            "the router's weight multiplies their inputs, and on a GPU vLLM has no adapters for such experts: it gives "
            "the gate and up adapters inputs without the weight, and multiplies the down adapter by it"
        )
    return ""


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
