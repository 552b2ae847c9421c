"""Weights under training on their way to the samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tinker

from fovea_rollout.messages import Picture
from fovea_rollout.policy import Chunk, Policy, Sampled, SamplingSettings, WeightVersions
from fovea_rollout.tinker_policy import TinkerPolicy


class Publisher:
    """Saves weights for sampling, and makes policies of them.

    Args:
        training_client: Whose weights.
        is_inflight: Whether rollouts that run already move to the newest weights too.
    """

    def __init__(self, training_client: tinker.TrainingClient, *, is_inflight: bool) -> None:
        self._training_client = training_client
        self._is_inflight = is_inflight
        self._last: TinkerPolicy | None = None
        self.newest = 0

    async def publish(self, version: int) -> Policy:
        """Publishes the current weights; returns what samples with them. Raises what the SDK raises."""
        # Noted before the server is asked: it may sample with the new weights before we know that it does.
        self.newest = version
        kind: tinker.types.SamplingClientKind = "inflight" if self._is_inflight else "snapshot"
        client = await self._training_client.save_weights_and_get_sampling_client(kind=kind)
        self._last = TinkerPolicy(client, version) if self._last is None else self._last.on(client, version)
        return _MovingPolicy(self._last, version, self) if self._is_inflight else self._last


class _MovingPolicy:
    """A policy whose weights move while it samples.

    The Tinker API promises weights no older than those published when the client was made, and does not tell which
    newer ones a sample got: the stamps are those bounds.
    """

    def __init__(self, policy: TinkerPolicy, oldest: int, publisher: Publisher) -> None:
        self._policy, self._oldest, self._publisher = policy, oldest, publisher

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`."""
        sampled = await self._policy.sample(prompt, settings, stop_ids, conversation)
        return replace(sampled, versions=WeightVersions(self._oldest, self._publisher.newest))

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`."""
        return await self._policy.token_count(picture)
