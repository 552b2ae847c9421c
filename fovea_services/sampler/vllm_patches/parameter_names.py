"""Maps names of checkpoints to parameters that vLLM would not find.

Replaces: `hf_to_vllm_mapper` of the classes in `TOWERS` and of `Lfm2VLForConditionalGeneration`, adds
    `named_parameters` to `PixtralHFVisionModel`, and keeps `lora_base_layer_prefix` of `RoutedExperts` empty.
Why: transformers 5 removed the level `vision_model` from SigLIP and CLIP and saves checkpoints without it. vLLM's
towers
    have the level and refuse such checkpoints. The patch inserts it; checkpoints on the hub have it and load as before.
    Pixtral's tower looks up a checkpoint's names among its own parameters. Once LoRA wraps its layers, as in LLaVA,
    the parameters have other names and no later weights load. (Other towers look up layer by layer.) The patch reports
    the parameters under their names without LoRA.
    Once LoRA wraps experts, vLLM expects names with `base_layer` in a checkpoint and silently ignores the others, so a
    push left experts unchanged. The patch keeps the expected names as they are without LoRA.
    LFM2's short convolutions are called `conv` in checkpoints and `short_conv` in vLLM. LFM2-VL's mapper lacks that
    entry. Weights load, because the language model inside has a mapper of its own, but adapters do not find their
    module. The patch adds the entry.
Upstream: none known.
Delete when: vLLM maps `vision_tower.embeddings` of each class to a parameter that its model has, `PixtralHFVisionModel`
    loads weights with `AutoWeightsLoader`, `RoutedExperts.get_expert_mapping` also maps checkpoint names when LoRA
    wraps the experts, and LFM2-VL's mapper has the entries of LFM2's.
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
"""vLLM's classes with a SigLIP or CLIP tower."""

_LEVEL = WeightsMapper(
    orig_to_new_regex={re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}
)
# Only the projections, which adapters can change; the language model's own mapper does not touch these names again.
_CONVOLUTION = WeightsMapper(orig_to_new_regex={re.compile(r"\.conv\.(in_proj|out_proj)\."): r".short_conv.\1."})


def _named_parameters(self: Any, *arguments: Any, **how: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in torch.nn.Module.named_parameters(self, *arguments, **how):
        yield name.replace(".base_layer.", "."), parameter


def apply() -> None:
    """Applies the patch to this process. It may be called twice."""
    PixtralHFVisionModel.named_parameters = _named_parameters
    RoutedExperts.lora_base_layer_prefix = property(lambda _: "", lambda _, prefix: None)
    missing = [(model, _LEVEL) for model in TOWERS] + [(Lfm2VLForConditionalGeneration, _CONVOLUTION)]
    for model, more in missing:
        if not more.orig_to_new_regex.keys() <= model.hf_to_vllm_mapper.orig_to_new_regex.keys():
            model.hf_to_vllm_mapper = model.hf_to_vllm_mapper | more
