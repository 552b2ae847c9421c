"""Checked requests in vLLM's terms."""

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from transformers import BatchFeature
from vllm import SamplingParams
from vllm.inputs import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind

from fovea.wire.features import FeatureTensors
from fovea.wire.limits import MESSAGE_BYTES
from services.sampler.engine_api import SampleSpec
from services.sampler.vllm_patches.prompt_scores import PLAN_KEY, ScorePlan

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_MODALITY = "image"
_MOST_AT_ONCE = MESSAGE_BYTES // 16
"""Tokens of one message: an id and a log-probability take 8 bytes."""


class PromptMaker:
    """Makes vLLM's inputs from tokens and vision tensors. Runs no tokenizer and no image processor."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._processor: Any = llm.renderer.mm_processor if llm.model_config.supports_multimodal_inputs else None

    def make(self, spec: SampleSpec, images: Sequence[FeatureTensors]) -> Any:
        """The engine input; `images` holds the tensors of each span."""
        tokens, salt = spec.tokens.tolist(), spec.request.cache_salt or None
        if not spec.spans:
            return tokens_input(tokens, cache_salt=salt)
        return mm_input(
            tokens,
            MultiModalKwargsItems({_MODALITY: [self._item(tensors) for tensors in images]}),
            # vLLM salts the prefix cache alone; its encoder cache goes by these names.
            {_MODALITY: [f"{spec.request.cache_salt}:{span.feature.digest}" for span in spec.spans]},
            {_MODALITY: [PlaceholderRange(offset=span.offset, length=span.length) for span in spec.spans]},
            cache_salt=salt,
        )

    def _item(self, tensors: FeatureTensors) -> MultiModalKwargsItem:
        features = BatchFeature({name: _tensor(array) for name, array in tensors.items()})
        fields = self._processor._get_mm_fields_config(features, {})
        items: MultiModalKwargsItems = MultiModalKwargsItems.from_hf_inputs(features, fields)
        return items[_MODALITY][0]


def _tensor(array: npt.NDArray) -> torch.Tensor:
    # torch warns of memory that it could not write to, though nobody writes here.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def score_plan(spec: SampleSpec, index: int) -> ScorePlan | None:
    """What to score of the prompt while sequence `index` is drawn: the first one does it for all."""
    if index or not spec.scores_prompt:
        return None
    seed = spec.seed_of(0)
    return ScorePlan.of(spec, secrets.randbits(63) if seed is None else seed)


def sampling_params(
    spec: SampleSpec, index: int, eos_token_ids: Sequence[int], plan: ScorePlan | None
) -> SamplingParams:
    """How sequence `index` is drawn, and what is scored of the prompt meanwhile."""
    params = spec.params
    ends = [] if params.stop.ignore_eos else eos_token_ids
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=spec.seed_of(index),
        stop=list(params.stop.strings),
        stop_token_ids=[*params.stop.token_ids, *ends],
        ignore_eos=params.stop.ignore_eos,
        logprobs=spec.request.top_sample_logprobs,
        flat_logprobs=True,
        # Only stop strings need text; making it is most of the cost of logprobs.
        detokenize=bool(params.stop.strings),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY if _is_at_once(spec) else RequestOutputKind.DELTA,
        # A prompt token that comes from the cache has no logits.
        skip_reading_prefix_cache=plan is not None,
        extra_args={PLAN_KEY: plan.to_message()} if plan else None,
    )


def _is_at_once(spec: SampleSpec) -> bool:
    """Whether a sequence may come as one message: alternatives of a long one would not fit, ids and logprobs do."""
    return spec.request.at_once and not spec.request.top_sample_logprobs and spec.params.max_tokens <= _MOST_AT_ONCE
