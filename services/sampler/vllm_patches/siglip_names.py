"""Names of a SigLIP or CLIP tower as transformers 5 writes them.

Replaces: `hf_to_vllm_mapper` of the classes in `MODELS`.
Why: transformers 5 has taken the level `vision_model` out of SigLIP and CLIP and saves checkpoints without it; vLLM's
    towers have it and refuse them. Checkpoints of the hub have it too, and load as before.
Upstream: none known.
Delete when: vLLM maps `vision_tower.embeddings` of each to a parameter that its model has.
"""

import re
from typing import Any

from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
from vllm.model_executor.models.lfm2_vl import Lfm2VLForConditionalGeneration
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration
from vllm.model_executor.models.llava_onevision import LlavaOnevisionForConditionalGeneration
from vllm.model_executor.models.utils import WeightsMapper

MODELS: tuple[Any, ...] = (
    Gemma3ForConditionalGeneration,
    Lfm2VLForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
)
"""vLLM's classes with such a tower."""

_LEVEL = WeightsMapper(
    orig_to_new_regex={re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}
)


def apply() -> None:
    """Adds the level where it is missing; twice is no error."""
    for model in MODELS:
        if not _LEVEL.orig_to_new_regex.keys() <= model.hf_to_vllm_mapper.orig_to_new_regex.keys():
            model.hf_to_vllm_mapper = model.hf_to_vllm_mapper | _LEVEL
