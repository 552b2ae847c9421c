"""Converts validated requests into vLLM's inputs, and vLLM's outputs into the events of `engine_api`."""

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import BatchFeature
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import mm_input, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams, check_json_nesting
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from fovea.wire.conventions import MESSAGE_BYTES
from fovea.wire.errors import Internal, InvalidInput, NotFinite, Unavailable
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureTensors
from fovea_sampler.engine_api import FILLER_LOGPROB, Delta, Finish, PromptResult, SampleSpec, TopRows
from fovea_sampler.grammar_trials import FIELD as STRUCTURE_FIELD
from fovea_sampler.grammar_trials import Kind
from fovea_sampler.vllm_patches.draws import SUPPORT_KEY
from fovea_sampler.vllm_patches.grammar_budget import TriedParams
from fovea_sampler.vllm_patches.prompt_scorer import PLAN_KEY, ScorePlan, Scores
from fovea_sampler.vllm_patches.routed_experts import ASKED_KEY

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_MODALITY = "image"
_RENAMED = {"image_position_ids": "pixel_position_ids"}
"""Tensors that vLLM names differently than Hugging Face's processors do, with vLLM's name."""

_MOST_AT_ONCE = MESSAGE_BYTES // 16
"""The most tokens in one message. An id and a log-probability take 8 bytes, which leaves half of the message free."""
_MOST_SUPPORTS = 512
"""The most tokens in one message with their supports, of at most 3 KiB each, and their alternatives."""


class PromptMaker:
    """A maker of vLLM's inputs from tokens and vision tensors, without a tokenizer or an image processor.

    Args:
        model_config: vLLM's configuration of the model.
        processor: vLLM's multimodal processor, which declares the fields of images; None for a text model.
    """

    def __init__(self, model_config: Any, processor: Any) -> None:
        self._processor = processor
        self._dtype = model_config.dtype
        config = model_config.hf_config
        self._image_token_id = getattr(config, "image_token_id", getattr(config, "image_token_index", None))

    @classmethod
    def of(cls, llm: "AsyncLLM") -> "PromptMaker":
        """Returns the maker for an engine's model."""
        config = llm.model_config
        return cls(config, llm.renderer.mm_processor if config.supports_multimodal_inputs else None)

    def make(self, spec: SampleSpec, images: Sequence[FeatureTensors], loads: int = 0) -> Any:
        """Returns vLLM's input for a request.

        Args:
            spec: The request.
            images: The vision tensors of each span.
            loads: The number of full weights that were loaded before while the engine kept its caches. The request
                shares no entry with those that began before.
        """
        salt = f"{spec.request.cache_salt}#{loads}" if loads else spec.request.cache_salt
        tokens = spec.tokens.tolist()
        if not spec.spans:
            return tokens_input(tokens, cache_salt=salt or None)
        return mm_input(
            tokens,
            MultiModalKwargsItems({_MODALITY: [self.item(tensors) for tensors in images]}),
            # vLLM salts only the prefix cache. Its encoder cache is keyed by these names, so they contain the salt too.
            {_MODALITY: [f"{salt}:{span.feature.digest}" for span in spec.spans]},
            {_MODALITY: [_place_of(span) for span in spec.spans]},
            cache_salt=salt or None,
        )

    def item(self, tensors: FeatureTensors) -> MultiModalKwargsItem:
        """Returns the vLLM item of one image. vLLM's processor selects the tensors that it knows."""
        features = BatchFeature({_RENAMED.get(name, name): self._tensor(array) for name, array in tensors.items()})
        mask = features.get("pixel_attention_mask")
        if mask is not None and mask.ndim == 4:  # Idefics 3 adds a leading dimension of 1, which vLLM does not expect
            features.update({name: tensor.squeeze(0) for name, tensor in features.items() if tensor.ndim >= 4})
        if "target_sizes" in features:
            features.update(_slices(features.pop("target_sizes"), features["pixel_values"][0]))
        # vLLM's models also need the number of tiles, under one of these names. Hugging Face's processors omit it.
        tile_count = torch.tensor([len(features["pixel_values"])])
        features.update(num_patches=tile_count, image_num_patches=tile_count, patches_per_image=tile_count)
        features["aspect_ratios"] = torch.tensor([[1, 1]])  # vLLM's Llama 4 requires the entry and does not use it
        if self._image_token_id is not None:
            features["image_token_id"] = torch.tensor(self._image_token_id)
        fields = self._processor._get_mm_fields_config(features, {})
        items: MultiModalKwargsItems = MultiModalKwargsItems.from_hf_inputs(features, fields)
        return items[_MODALITY][0]

    def _tensor(self, array: npt.NDArray) -> torch.Tensor:
        # Copies read-only arrays: torch warns about every tensor over memory that is not writable.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _slices(sizes: torch.Tensor, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns vLLM's tensors of an image of MiniCPM-V, in which each slice is a padded row.

    Args:
        sizes: The patches of each slice, high and wide.
        pixels: The patches of all slices in one row, [channels, side, columns].
    """
    rows = torch.split(pixels, (sizes.prod(-1) * pixels.shape[1]).tolist(), -1)
    longest = max(row.shape[-1] for row in rows)
    padded = torch.stack([torch.nn.functional.pad(row, (0, longest - row.shape[-1])) for row in rows])
    return {"pixel_values": padded[None], "tgt_sizes": sizes.long()[None], "use_vit_merger": torch.tensor([[True]])}


def _place_of(span: ImageSpan) -> PlaceholderRange:
    is_embed = None if span.is_embedding.all() else torch.from_numpy(span.is_embedding)
    return PlaceholderRange(offset=span.offset, length=span.length, is_embed=is_embed)


def score_plan(spec: SampleSpec, index: int) -> ScorePlan | None:
    """Returns the prompt scores to compute while sequence `index` is drawn, or None. Only sequence 0 computes any."""
    if index or not spec.scores_prompt:
        return None
    seed = spec.seed_of(0)
    return ScorePlan.of(spec, secrets.randbits(63) if seed is None else seed)


def sampling_params(
    spec: SampleSpec,
    index: int,
    eos_token_ids: Sequence[int],
    plan: ScorePlan | None,
    structure: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Returns vLLM's parameters for drawing sequence `index` and for scoring the prompt by `plan` meanwhile.

    The grammar of `structure` must have passed `GrammarTrials.check`.
    """
    params = spec.params
    ends = [] if params.stop.ignore_eos else eos_token_ids
    return TriedParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,  # warm-ups and benchmarks leave it unset
        structured_outputs=structure,
        seed=spec.seed_of(index),
        stop=list(params.stop.strings),
        stop_token_ids=[*params.stop.token_ids, *ends],
        ignore_eos=params.stop.ignore_eos,
        logprobs=spec.request.top_sample_logprobs,
        flat_logprobs=True,
        # Only stop strings need text, and decoding it is most of the cost of log-probabilities.
        detokenize=bool(params.stop.strings),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY if _is_at_once(spec) else RequestOutputKind.DELTA,
        # A prompt token from the prefix cache has no logits, and the experts that computed it are not recorded.
        skip_reading_prefix_cache=plan is not None or spec.request.routed_experts,
        extra_args=_extra_arguments(spec, plan),
    )


@dataclass(frozen=True)
class Structure:
    """The kind and the text of a structured output's grammar, which must be tried before vLLM compiles it."""

    kind: Kind
    text: str

    @property
    def params(self) -> StructuredOutputsParams:
        """The same structure as vLLM's parameters."""
        if self.kind == "json_object":
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(**{"grammar" if self.kind == "lark" else self.kind: self.text})


def structure_of(text: str) -> Structure | None:
    """Returns the structure that a request asks for, or None for an empty text.

    Raises InvalidInput for a structure that vLLM does not know or that xgrammar does not support.
    """
    if not text:
        return None
    try:
        return _structure(StructuredOutputsParams(**json.loads(text)))
    except (TypeError, ValueError, VLLMValidationError) as error:
        message = f"{STRUCTURE_FIELD} is not a structure that vLLM accepts: {error}"
        raise InvalidInput(message, field=STRUCTURE_FIELD) from None


def _structure(given: StructuredOutputsParams) -> Structure:
    """Repeats the checks of vLLM's SamplingParams._validate_structured_outputs.

    Raises ValueError, VLLMValidationError.
    """
    if given.json_object is not None:
        if given.json_object is not True:
            raise ValueError("json_object must be true; leave it out if you want no structure")
        return Structure("json_object", "")
    if given.choice is not None:
        if not given.choice or not all(isinstance(one, str) for one in given.choice):
            raise ValueError("choice must be a list of at least one string")
        return Structure("grammar", choice_as_grammar(given.choice))
    if given.json is not None:
        check_json_nesting(given.json if isinstance(given.json, str | dict) else None)
        schema = json.loads(given.json) if isinstance(given.json, str) else given.json
        if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
            raise ValueError("the JSON schema has keywords that xgrammar does not support")
        return Structure("json", json.dumps(schema))
    kind: Kind = "regex" if given.regex is not None else "grammar" if given.grammar is not None else "structural_tag"
    text = getattr(given, kind)
    if not isinstance(text, str) or "\0" in text or (kind != "regex" and not text.strip()):
        raise ValueError(f"{kind} must be a string that is not empty and contains no NUL characters")
    if kind == "structural_tag":
        check_json_nesting(text, structural_tag=True)
    return Structure("lark" if kind == "grammar" and grammar_is_likely_lark(text) else kind, text)


def _extra_arguments(spec: SampleSpec, plan: ScorePlan | None) -> dict[str, Any]:
    scores = {PLAN_KEY: plan.to_message()} if plan else {}
    asked = {ASKED_KEY: spec.request.routed_experts, SUPPORT_KEY: spec.request.sampled_support}
    return scores | {key: True for key, is_set in asked.items() if is_set}


def _is_at_once(spec: SampleSpec) -> bool:
    """Returns True if the whole sequence may be one message: requested, without alternatives, and short enough."""
    request = spec.request
    is_plain = not request.top_sample_logprobs and not request.sampled_support
    return request.at_once and is_plain and spec.params.max_tokens <= _MOST_AT_ONCE


def prompt_result(result: RequestOutput, spec: SampleSpec, plan: ScorePlan | None) -> PromptResult:
    """Returns the prompt's results from the engine's first output.

    Raises Unavailable if the engine aborted the request, Internal if the scores are missing or have a wrong shape,
    NotFinite if they are not finite.
    """
    _finish(result.outputs[0].finish_reason)
    cached_token_count = result.num_cached_tokens or 0
    if plan is None:
        return PromptResult(None, None, cached_token_count)
    if result.prompt_token_id_logprobs is None:
        raise Internal("the engine did not return the scores of the prompt")
    try:
        scores = Scores.unpack(plan, result.prompt_token_id_logprobs)
    except ValueError as error:
        raise Internal(f"the engine returned other prompt scores than were requested: {error}") from error
    _check_finite("the prompt", scores.actual, scores.top.logprobs, scores.targets, scores.alt.logprobs)
    return PromptResult(
        logprobs=_from(plan, scores.actual, np.nan) if spec.request.prompt_logprobs else None,
        top=_top_from(plan, scores.top) if spec.request.top_prompt_logprobs else None,
        cached_token_count=cached_token_count,
        target_logprobs=scores.targets if spec.targets else None,
        alt=scores.alt if spec.request.alt_token_count else None,
    )


def deltas(result: RequestOutput, spec: SampleSpec, index: int, is_adapted: bool = False) -> Iterator[Delta]:
    """Yields the new tokens of one output of the engine.

    Yields one Delta, unless several versions of the full weights made the tokens or supports need several messages.

    Args:
        result: The output of the engine.
        spec: The request.
        index: The number of the sequence in the request.
        is_adapted: Whether an adapter made the tokens; full weights do not change while a request uses one.

    Raises Unavailable if the engine aborted the request, Internal if its output is incomplete, NotFinite if a token's
    log-probability is not finite. A NaN or +inf among a position's logits makes all log-probabilities there NaN, so
    checking the sampled token's is enough.
    """
    (output,) = result.outputs
    finish = _finish(output.finish_reason)
    tokens = np.asarray(output.token_ids, dtype=np.int32)
    if not len(tokens) and finish is None:
        return
    flat = output.logprobs if isinstance(output.logprobs, FlatLogprobs) else FlatLogprobs()
    logprobs, top = _split(flat, len(tokens), spec.request.top_sample_logprobs)
    _check_finite("the sampled tokens", logprobs)
    experts = output.routed_experts if spec.request.routed_experts else None
    if spec.request.routed_experts and finish is not None and (experts is None or len(experts) < len(spec.tokens)):
        raise Internal("the engine did not return the experts of the sequence's tokens")
    makers = {} if is_adapted else _makers(output)
    supports = _supports(output) if spec.request.sampled_support else []
    starts = sorted({0, *makers, *range(0, len(supports), _MOST_SUPPORTS)})
    maker = None
    for start, end in pairwise((*starts, len(tokens))):
        part, is_last = slice(start, end), end == len(tokens)
        maker = makers.get(start, maker)
        yield Delta(
            index,
            tokens[part],
            logprobs[part],
            top and TopRows(top.token_ids[part], top.logprobs[part]),
            finish if is_last else None,
            experts if is_last else None,
            b"".join(supports[part]),
            maker,
        )


def _makers(output: CompletionOutput) -> dict[int, str]:
    """Returns the full weights that made an output's tokens, by the first of their tokens in the output."""
    spans = output.weight_versions or []
    if not (spans and output.token_ids):
        return {0: spans[-1].version} if spans else {}
    before = spans[-1].end - len(output.token_ids)
    return {max(one.start - before, 0): one.version for one in spans if one.end > max(one.start, before)}


def _supports(output: CompletionOutput) -> list[bytes]:
    """Returns the packed support of each token of an output."""
    rows = [bytes(row) for row in output.sampling_mask.token_ids] if output.sampling_mask else []
    if len(rows) != len(output.token_ids):
        raise Internal(f"the engine returned the supports of {len(rows)} of {len(output.token_ids)} tokens")
    return rows


def _check_finite(of_what: str, *logprobs: npt.NDArray[np.float32]) -> None:
    """Raises NotFinite if any value of the arrays is NaN or infinite."""
    if not all(np.isfinite(values).all() for values in logprobs):
        raise NotFinite(f"log-probabilities of {of_what} are NaN or infinite")


def _from(plan: ScorePlan, rows: npt.NDArray, filler: float) -> npt.NDArray:
    """Returns the rows at their prompt positions, [P, ...], with `filler` before them."""
    whole = np.full((plan.row_count + 1, *rows.shape[1:]), filler, dtype=rows.dtype)
    whole[1 + plan.first_row :] = rows
    return whole


def _top_from(plan: ScorePlan, top: TopRows) -> TopRows:
    return TopRows(_from(plan, top.token_ids, 0), _from(plan, top.logprobs, FILLER_LOGPROB))


def _finish(reason: str | None) -> Finish | None:
    if reason is None or reason == "stop" or reason == "length":
        return reason  # type: ignore[return-value]
    if reason == "abort":
        raise Unavailable("the engine aborted the request; try again")
    raise Internal(f"the engine ended the request with {reason!r}")


def _split(flat: FlatLogprobs, count: int, k: int) -> tuple[npt.NDArray[np.float32], TopRows | None]:
    """Returns the log-probabilities of the sampled tokens [count] and the k best alternatives [count, k].

    At each position, vLLM lists the sampled token first and then the k best tokens, each with its rank.
    """
    if len(flat) != count:
        raise Internal(f"the engine returned log-probabilities of {len(flat)} positions instead of {count}")
    values = np.full(count, np.nan, dtype=np.float32)
    ids = np.zeros((count, k), dtype=np.int32)
    best = np.full((count, k), FILLER_LOGPROB, dtype=np.float32)
    for position, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        if start == end:
            continue
        values[position] = flat.logprobs[start]
        # Entries are placed by rank, not by order. If the sampled token is among the best, vLLM lists it once in an
        # output that it merged because it was not read in time, and twice in any other. The second, equal entry then
        # overwrites the first.
        for entry in range(start, end):
            rank = flat.ranks[entry] or k + 1
            if rank <= k and flat.logprobs[entry] > -np.inf:  # -inf is outside the support
                ids[position, rank - 1], best[position, rank - 1] = flat.token_ids[entry], flat.logprobs[entry]
    return values, TopRows(ids, best) if k else None
