"""A penalty for the distance to the base model, which is added to the advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fovea.wire.errors import InvalidInput
from fovea_rollout.late_sdk import tinker
from fovea_rollout.policies.async_cache import AsyncCache

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Penalty:
    """The terms of a KL penalty.

    Attributes:
        terms: The terms to add to the advantages, one float64 [N] array per datum; 0 for targets that were not sampled.
        kl: Mean of log p_sampler - log p_base over all sampled tokens, in nats per token. It estimates
            KL(policy || base), and can be negative for few tokens.
    """

    terms: list[Floats]
    kl: float


def kl_penalty(
    logprobs: Sequence[Floats], base: Sequence[Floats], masks: Sequence[Mask], coefficient: float
) -> Penalty:
    """Returns term_t = coefficient * (mean(d) - d_t) with d_t = log p_sampler(t) - log p_base(t).

    The mean is over the batch's sampled tokens, so the terms of a batch add up to 0. A token with d_t above the mean
    gets a negative term.

    This is the gradient of the reverse KL with a baseline, as in tinker-cookbook's `incorporate_kl_penalty`. It is
    valid only at temperature 1, because the base model is scored at that temperature.

    Args:
        logprobs: Log-probabilities of the sampler, float64 [N] per datum.
        base: Log-probabilities of the base model, float64 [N] per datum.
        masks: bool [N] per datum, true for sampled tokens.
        coefficient: Beta, in reward per nat.
    """
    if not len(logprobs) == len(base) == len(masks):
        raise InvalidInput(
            f"logprobs, base and masks have {len(logprobs)}, {len(base)} and {len(masks)} datums; they must have"
            " the same number",
            field="logprobs",
        )
    differences = [np.where(mask, ours - theirs, 0.0) for ours, theirs, mask in zip(logprobs, base, masks, strict=True)]
    count = sum(int(mask.sum()) for mask in masks)
    kl = float(sum(difference.sum() for difference in differences) / max(count, 1))
    terms = [
        coefficient * np.where(mask, kl - difference, 0.0) for difference, mask in zip(differences, masks, strict=True)
    ]
    return Penalty(terms, kl)


async def base_logprobs(
    data: Sequence[tinker.Datum], masks: Sequence[Mask], base: tinker.SamplingClient
) -> list[Floats | Exception]:
    """Returns the base model's log-probabilities of all targets, float64 [N] per datum.

    For a datum that cannot be scored, the list contains the error instead. It is the server's error, or InvalidInput if
    the number of scores is not the number of targets, or if the score of a sampled token is not finite.

    Identical rollouts are scored once. Scoring a rollout needs one token more than sampling it did, so
    `RolloutSettings.max_context` must be below the server's context length.

    Args:
        masks: bool [N] per datum, true for sampled tokens.

    Raises:
        Exception: The first datum's error, if there are several datums and none can be scored. Then a setting or the
            server is wrong, not a rollout.
    """
    scored: AsyncCache[tuple[Hashable, ...], list[float | None]] = AsyncCache()

    async def score(index: int, datum: tinker.Datum, mask: Mask) -> Floats | Exception:
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        read = datum.model_input.append_int(int(targets[-1]))
        try:
            scores = await scored.get(_identity(read), lambda: base.compute_logprobs(read))
            return _of_targets(scores, mask, index)
        except Exception as error:  # of any class: the caller leaves this rollout out and reports the error
            return error

    scorings = (score(index, datum, mask) for index, (datum, mask) in enumerate(zip(data, masks, strict=True)))
    found = await asyncio.gather(*scorings)
    errors = [one for one in found if isinstance(one, Exception)]
    if len(errors) == len(data) > 1:
        raise errors[0]
    return list(found)


def _identity(read: tinker.ModelInput) -> tuple[Hashable, ...]:
    """Returns a key that is equal for inputs with the same tokens and pictures."""
    return tuple(
        tuple(chunk.tokens) if isinstance(chunk, tinker.EncodedTextChunk) else tuple(chunk.model_dump().values())
        for chunk in read.chunks
    )


def _of_targets(scores: list[float | None], mask: Mask, index: int) -> Floats:
    count = len(mask)
    if len(scores) != count + 1:
        raise InvalidInput(
            f"data[{index}] has {count} targets, but the base model scored {max(len(scores) - 1, 0)}: "
            "the base model's pictures have another number of tokens",
            field=f"data[{index}].target_tokens",
        )
    found = np.array(scores[1:], dtype=np.float64)
    wrong = np.flatnonzero(mask & ~np.isfinite(found))
    if wrong.size:
        field = f"data[{index}].target_tokens[{wrong[0]}]"
        raise InvalidInput(
            f"{field}: the base model's log-probability is {found[wrong[0]]}; it must be finite", field=field
        )
    return found
