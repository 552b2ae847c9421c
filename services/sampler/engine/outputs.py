"""What vLLM says, as events."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput

from fovea.wire.errors import Internal, Unavailable
from services.sampler.engine_api import FILLER_LOGPROB, Delta, Finish, PromptFacts, SampleSpec, TopRows
from services.sampler.vllm_patches.prompt_scores import ScorePlan, Scores


def prompt_facts(result: RequestOutput, spec: SampleSpec, plan: ScorePlan | None) -> PromptFacts:
    """What the first result says of the prompt.

    Raises Unavailable if the engine gave the request up, Internal if the scores are missing or of another shape.
    """
    _finish(result.outputs[0].finish_reason)
    cached_token_count = result.num_cached_tokens or 0
    if plan is None:
        return PromptFacts(None, None, cached_token_count)
    if result.prompt_token_id_logprobs is None:
        raise Internal("the engine sent no scores of the prompt")
    try:
        scores = Scores.unpack(plan, result.prompt_token_id_logprobs)
    except ValueError as error:
        raise Internal(f"the engine sent other scores of the prompt than were asked for: {error}") from error
    return PromptFacts(
        logprobs=_from(plan, scores.actual, np.nan) if spec.request.prompt_logprobs else None,
        top=_top_from(plan, scores.top) if spec.request.top_prompt_logprobs else None,
        cached_token_count=cached_token_count,
        target_logprobs=scores.targets if spec.targets else None,
        alt=scores.alt if spec.request.alt_token_count else None,
    )


def deltas(result: RequestOutput, spec: SampleSpec, index: int) -> Iterator[Delta]:
    """The new tokens of a result of a request of one sequence. Raises Unavailable if the engine gave the request up."""
    (output,) = result.outputs
    finish = _finish(output.finish_reason)
    tokens = np.asarray(output.token_ids, dtype=np.int32)
    if not len(tokens) and finish is None:
        return
    flat = output.logprobs if isinstance(output.logprobs, FlatLogprobs) else FlatLogprobs()
    logprobs, top = _split(flat, len(tokens), spec.request.top_sample_logprobs)
    yield Delta(index, tokens, logprobs, top, finish)


def _from(plan: ScorePlan, rows: npt.NDArray, filler: float) -> npt.NDArray:
    """The rows at their prompt positions, [P, ...], filler before them."""
    whole = np.full((plan.row_count + 1, *rows.shape[1:]), filler, dtype=rows.dtype)
    whole[1 + plan.first_row :] = rows
    return whole


def _top_from(plan: ScorePlan, top: TopRows) -> TopRows:
    return TopRows(_from(plan, top.token_ids, 0), _from(plan, top.logprobs, FILLER_LOGPROB))


def _finish(reason: str | None) -> Finish | None:
    if reason is None or reason == "stop" or reason == "length":
        return reason  # type: ignore[return-value]
    if reason == "abort":
        raise Unavailable("the engine gave the request up")
    raise Internal(f"the engine ended the request with {reason!r}")


def _split(flat: FlatLogprobs, count: int, k: int) -> tuple[npt.NDArray[np.float32], TopRows | None]:
    """Logprobs [count] of sampled tokens and the k best [count, k].

    vLLM lists, at each position, the sampled token first and then the k best, with ranks.
    """
    if len(flat) != count:
        raise Internal(f"the engine sent logprobs of {len(flat)} positions instead of {count}")
    values = np.full(count, np.nan, dtype=np.float32)
    ids = np.zeros((count, k), dtype=np.int32)
    best = np.full((count, k), FILLER_LOGPROB, dtype=np.float32)
    for position, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        if start == end:
            continue
        values[position] = flat.logprobs[start]
        # By rank: results that vLLM merges, because they were not taken in time, name a token that is both the actual
        # and one of the best only once. The actual one comes first, so that its equal among the best replaces it.
        for entry in range(start, end):
            rank = flat.ranks[entry] or k + 1
            if rank <= k:
                ids[position, rank - 1], best[position, rank - 1] = flat.token_ids[entry], flat.logprobs[entry]
    return values, TopRows(ids, best) if k else None
