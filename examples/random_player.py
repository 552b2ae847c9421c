"""A player that knows what an answer looks like, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fovea_rollout import Chunk, Picture, Policy, Sampled, SamplingSettings, WeightVersions


class RandomPlayer:
    """A policy whose answers are drawn without a look at the prompt.

    Args:
        policy: Counts the tokens of pictures.
        tokenizer: Of the model that is to be taught.
        draw: Draws an answer.
    """

    def __init__(self, policy: Policy, tokenizer: Any, draw: Callable[[], str]) -> None:
        self._policy, self._tokenizer, self._draw = policy, tokenizer, draw

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`. Log-probabilities are 0: whoever learns from these answers needs none."""
        ids = (*self._tokenizer.encode(self._draw(), add_special_tokens=False), stop_ids[0])
        return Sampled(ids, (0.0,) * len(ids), "stop", WeightVersions(0, 0))

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`."""
        return await self._policy.token_count(picture)
