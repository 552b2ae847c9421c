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


async def base_logprobs(data: Sequence[tinker.Datum], base: tinker.SamplingClient) -> list[Floats]:
    """The base model's log-probabilities of all targets, float64 [N] per datum.

    Rollouts that read and said the same are scored once. A scoring takes one token more than the rollout did:
    `RolloutSettings.max_context` must be below the server's own.

    Raises:
        InvalidInput: A datum's score has another length than its targets.
    """
    scored: AsyncCache[tuple[Hashable, ...], list[float | None]] = AsyncCache()

    async def score(index: int, datum: tinker.Datum) -> Floats:
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        read = datum.model_input.append_int(int(targets[-1]))
        scores = await scored.get(_identity(read), lambda: base.compute_logprobs(read))
        return _of_targets(scores, len(targets), index)

    return list(await asyncio.gather(*(score(index, datum) for index, datum in enumerate(data))))


def _identity(read: tinker.ModelInput) -> tuple[Hashable, ...]:
    """Equal for inputs that a model reads alike."""
    return tuple(
        tuple(chunk.tokens) if isinstance(chunk, tinker.EncodedTextChunk) else tuple(chunk.model_dump().values())
        for chunk in read.chunks
    )


def _of_targets(scores: list[float | None], count: int, index: int) -> Floats:
    if len(scores) != count + 1:
        raise InvalidInput(
            f"data[{index}] has {count} targets, but the base model scored {len(scores) - 1}: "
            "its pictures take another number of tokens",
            field=f"data[{index}].target_tokens",
        )
    return np.array(scores[1:], dtype=np.float64)
