"""Names of parameters.

Replaces: `hf_to_vllm_mapper` of the classes in `TOWERS` and of `Lfm2VLForConditionalGeneration`, adds
    `named_parameters` to `PixtralHFVisionModel`, and holds `lora_base_layer_prefix` of `RoutedExperts` empty.
Why: transformers 5 has taken the level `vision_model` out of SigLIP and CLIP and saves checkpoints without it; vLLM's
    towers have it and refuse them. Checkpoints of the hub have it too, and load as before.
    Pixtral's tower looks for the parameters of a checkpoint among its own by name. Once LoRA is around its layers, as
    it is in LLaVA's, they are called otherwise, and no later weights load. Others look layer by layer.
    Of experts, once LoRA is around them, vLLM looks for names with `base_layer` in a checkpoint and drops the others
    without a word: experts kept their weights when new ones came.
    LFM2's short convolutions are `conv` in checkpoints and `short_conv` in vLLM, which LFM2-VL's mapper does not say:
    weights load, for the language model inside has a mapper of its own, but no adapter finds its module.
Upstream: none known.
Delete when: vLLM maps `vision_tower.embeddings` of each to a parameter that its model has, `PixtralHFVisionModel`
    loads weights by `AutoWeightsLoader`, `RoutedExperts.get_expert_mapping` maps the names of checkpoints with LoRA
    around it too, and LFM2-VL's mapper has what LFM2's has.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
from vllm.model_executor.models.lfm2_vl import Lfm2VLForConditionalGeneration
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration
from vllm.model_executor.models.llava_onevision import LlavaOnevisionForConditionalGeneration
from vllm.model_executor.models.pixtral import PixtralHFVisionModel
from vllm.model_executor.models.utils import WeightsMapper

TOWERS: tuple[Any, ...] = (
    Gemma3ForConditionalGeneration,
    Lfm2VLForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
)
"""vLLM's classes with a SigLIP or CLIP."""

_LEVEL = WeightsMapper(
    orig_to_new_regex={re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}
)
# What of a short convolution an adapter can adapt; the language model's own mapper leaves these names alone.
_CONVOLUTION = WeightsMapper(orig_to_new_regex={re.compile(r"\.conv\.(in_proj|out_proj)\."): r".short_conv.\1."})


def _named_parameters(self: Any, *arguments: Any, **how: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in torch.nn.Module.named_parameters(self, *arguments, **how):
        yield name.replace(".base_layer.", "."), parameter


def apply() -> None:
    """Adds the level where it is missing, and names Pixtral's and experts' as without LoRA; twice is no error."""
    PixtralHFVisionModel.named_parameters = _named_parameters
    RoutedExperts.lora_base_layer_prefix = property(lambda _: "", lambda _, prefix: None)
    missing = [(model, _LEVEL) for model in TOWERS] + [(Lfm2VLForConditionalGeneration, _CONVOLUTION)]
    for model, more in missing:
        if not more.orig_to_new_regex.keys() <= model.hf_to_vllm_mapper.orig_to_new_regex.keys():
            model.hf_to_vllm_mapper = model.hf_to_vllm_mapper | more
