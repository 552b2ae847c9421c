"""Names of a SigLIP tower as transformers 5 writes them.

Replaces: `Gemma3ForConditionalGeneration.hf_to_vllm_mapper`.
Why: transformers 5 has taken the level `vision_model` out of SigLIP and saves checkpoints without it; vLLM's tower has
    it and refuses them. Checkpoints of the hub have it too, and load as before.
Upstream: none known.
Delete when: vLLM maps `vision_tower.embeddings` of Gemma 3 to a parameter that its model has.
"""

import re

from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
from vllm.model_executor.models.utils import WeightsMapper

_LEVEL = WeightsMapper(
    orig_to_new_regex={re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model."}
)


def apply() -> None:
    """Adds the level where it is missing; twice is no error."""
    mapper = Gemma3ForConditionalGeneration.hf_to_vllm_mapper
    if not _LEVEL.orig_to_new_regex.keys() <= mapper.orig_to_new_regex.keys():
        Gemma3ForConditionalGeneration.hf_to_vllm_mapper = mapper | _LEVEL
