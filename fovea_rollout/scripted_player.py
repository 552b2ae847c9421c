"""A player whose answers a program writes, for warm-ups and for bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fovea_rollout.messages import Picture
from fovea_rollout.policy import Chunk, Policy, Sampled, SamplingSettings, WeightVersions


class ScriptedPlayer:
    """A policy that is no model.

    Args:
        policy: Counts the tokens of pictures.
        tokenizer: Of the model that is to be taught.
        answer: Writes an answer to a prompt: from the pictures in it, or whatever they show.
    """

    def __init__(self, policy: Policy, tokenizer: Any, answer: Callable[[Sequence[Chunk]], str]) -> None:
        self._policy, self._tokenizer, self._answer = policy, tokenizer, answer

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`. Log-probabilities are 0: whoever learns from these answers needs none."""
        ids = (*self._tokenizer.encode(self._answer(prompt), add_special_tokens=False), stop_ids[0])
        return Sampled(ids, (0.0,) * len(ids), "stop", WeightVersions(0, 0))

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`."""
        return await self._policy.token_count(picture)
