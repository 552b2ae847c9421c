"""Samples a turn in several requests, so that an unfinished turn continues with newer weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Picture
from fovea_rollout.policies.policy import (
    Chunk,
    Policy,
    Portion,
    Sampled,
    SamplingSettings,
    Tokens,
    derived_seed,
    joined_versions,
)

_MOST_BYTES_PER_LETTER = 4


class ResumingPolicy:
    """A policy with weights that change while it samples.

    A turn is sampled in requests of at most `portion` tokens. Each request uses the newest weights and reads the tokens
    of the requests before it as the end of its prompt. `Sampled.resumed` states the weights of each portion.

    Args:
        policy: Samples until the first `move`.
        portion: The most tokens of one request.
        decode: Decodes tokens, to find a stop text that begins in one portion and ends in the next.

    Raises:
        InvalidInput: `portion` is below 1.
    """

    def __init__(self, policy: Policy, portion: int, decode: Callable[[Sequence[int]], str]) -> None:
        if portion < 1:
            raise InvalidInput(f"portion is {portion}; it must be 1 or more", field="portion")
        self._policy, self._portion, self._decode = policy, portion, decode

    def move(self, policy: Policy) -> None:
        """Uses the weights of another policy for every request that has not begun."""
        self._policy = policy

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`. Raises what the policies raise."""
        parts: list[Sampled] = []
        ids: tuple[int, ...] = ()
        while True:
            count = min(self._portion, settings.max_tokens - len(ids))
            part = await self._policy.sample(
                (*prompt, Tokens(ids)) if ids else prompt, _resumed(settings, count, len(ids)), stop_ids, conversation
            )
            part = self._cut(ids, part, settings.stop)
            parts.append(part)
            ids += part.ids
            if part.stop_reason == "stop" or not part.ids or len(ids) >= settings.max_tokens:
                return _joined(parts)

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`."""
        return await self._policy.token_count(picture)

    def _cut(self, before: tuple[int, ...], part: Sampled, stops: Sequence[str]) -> Sampled:
        """Ends a portion after the token that completes a stop text, if the text began in an earlier portion.

        A sampler finds only the stop texts that begin in its own request.
        """
        if not (before and stops):
            return part
        reach = _MOST_BYTES_PER_LETTER * max(map(len, stops))  # a token has at least one byte
        border = before[-reach:]
        for count in range(1, min(reach, len(part.ids)) + 1):
            text = self._decode((*border, *part.ids[:count]))
            if any(stop in text for stop in stops):
                return _shortened(part, count)
        return part


def _resumed(settings: SamplingSettings, count: int, place: int) -> SamplingSettings:
    """Returns the settings of a request for `count` tokens after the first `place` ones of its turn.

    Every request has its own seed: with the same one, it would repeat the random numbers of the request before.
    """
    seed = settings.seed if settings.seed is None or not place else derived_seed(settings.seed, place)
    return replace(settings, max_tokens=count, seed=seed)


def _shortened(part: Sampled, count: int) -> Sampled:
    dropped = len(part.ids) - count
    experts = part.experts if part.experts is None or not dropped else part.experts[:-dropped]
    ids, logprobs = part.ids[:count], part.logprobs[:count]
    return replace(part, ids=ids, logprobs=logprobs, stop_reason="stop", experts=experts)


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """Returns the turn that the requests sampled together. The experts of a token are those of its first request."""
    if len(parts) == 1:
        return parts[0]
    experts = parts[0].experts
    for part in parts[1:]:
        if experts is not None:
            experts = None if part.experts is None else np.concatenate([experts, part.experts[len(experts) :]])
    return Sampled(
        tuple(token for part in parts for token in part.ids),
        tuple(logprob for part in parts for logprob in part.logprobs),
        parts[-1].stop_reason,
        joined_versions(part.versions for part in parts),
        experts,
        resumed=tuple(Portion(len(part.ids), part.versions, part.sequence_id) for part in parts if part.ids),
    )
