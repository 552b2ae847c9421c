"""A penalty for leaving the base model, put into the advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tinker

from fovea.wire.errors import InvalidInput
from fovea_rollout.async_cache import AsyncCache

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Penalty:
    """What is added to advantages.

    Attributes:
        terms: One array per datum, float64 [N], 0 where nothing was sampled.
        kl: Mean over all sampled tokens of log p_sampler - log p_base: an estimate of KL(policy || base), in nats per
            token, which may be below 0 on few tokens.
    """

    terms: list[Floats]
    kl: float


def kl_penalty(
    logprobs: Sequence[Floats], base: Sequence[Floats], masks: Sequence[Mask], coefficient: float
) -> Penalty:
    """term_t = coefficient * (mean(d) - d_t) with d_t = log p_sampler(t) - log p_base(t), the mean over the batch's
    sampled tokens; so the terms of a batch add up to 0, and tokens that are likelier than the base has them lose.

    It is the gradient of the reverse KL with a baseline, the form of tinker-cookbook's `incorporate_kl_penalty`.
    Valid at temperature 1, at which the base is scored.

    Args:
        logprobs: The sampler's, float64 [N] per datum.
        base: The base model's, likewise.
        masks: bool [N], true where a token was sampled.
        coefficient: Beta, in reward per nat.
    """
    if not len(logprobs) == len(base) == len(masks):
        raise InvalidInput(
            f"logprobs, base and masks are of {len(logprobs)}, {len(base)} and {len(masks)} datums", field="logprobs"
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

    A datum that cannot be scored has the error in its place: what the server raised, or InvalidInput for a score of
    another length than its targets and for a sampled token whose score is not finite.

    Rollouts that read and said the same are scored once. A scoring takes one token more than the rollout did:
    `RolloutSettings.max_context` must be below the server's own.

    Args:
        masks: bool [N] per datum, true where a token was sampled.

    Raises:
        Exception: The first datum's error, if there are several and none can be scored: then a setting or the server
            is wrong, not a rollout.
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
    """Equal for inputs that a model reads alike."""
    return tuple(
        tuple(chunk.tokens) if isinstance(chunk, tinker.EncodedTextChunk) else tuple(chunk.model_dump().values())
        for chunk in read.chunks
    )


def _of_targets(scores: list[float | None], mask: Mask, index: int) -> Floats:
    count = len(mask)
    if len(scores) != count + 1:
        raise InvalidInput(
            f"data[{index}] has {count} targets, but the base model scored {max(len(scores) - 1, 0)}: "
            "its pictures take another number of tokens",
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
