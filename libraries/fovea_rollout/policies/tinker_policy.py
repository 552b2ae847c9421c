"""Samples from any Tinker server through the SDK, and publishes the weights to sample from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakSet

from fovea_rollout.late_sdk import tinker
from fovea_rollout.messages import Picture
from fovea_rollout.policies.async_cache import AsyncCache
from fovea_rollout.policies.experts_client import ExpertSource
from fovea_rollout.policies.policy import Chunk, Policy, Sampled, SamplingSettings, Tokens, WeightVersions


class TinkerPolicy:
    """A sampling client as a policy. The SDK retries requests that may be retried.

    Args:
        sampling_client: Client of the SDK.
        version: Number of training steps of its weights.
        token_counts: Known token counts of pictures by size, for policies of one model to share.
        experts: Returns the experts that computed a sequence, by its id; None if training does not follow them.
    """

    def __init__(
        self,
        sampling_client: tinker.SamplingClient,
        version: int = 0,
        token_counts: AsyncCache[tuple[int, int], int] | None = None,
        experts: ExpertSource | None = None,
    ) -> None:
        self._client = sampling_client
        self._experts = experts
        self._version = self._newest = version
        self._token_counts = AsyncCache() if token_counts is None else token_counts

    def set_version(self, version: int) -> None:
        """Sets the version of newer weights, to which an in-flight update has moved the client."""
        self._version = self._newest = version

    def expect_version(self, version: int) -> None:
        """States that samples in flight may continue with weights of this version from now on."""
        self._newest = version

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`. Raises what the SDK raises. Cancelling the call cancels the request on the server too.

        The API has no field for the conversation's id. A server with a prefix cache finds the conversation by its
        prompt.
        """
        oldest = self._version
        params = tinker.SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed,
            stop=await self._stop(settings.stop, stop_ids),
        )
        model_input = tinker.ModelInput(chunks=[_chunk(chunk) for chunk in prompt])
        answer = await self._client.sample(model_input, num_samples=1, sampling_params=params)
        (sequence,) = answer.sequences
        if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
            raise ValueError(f"the server returned {len(sequence.tokens)} tokens without a log-probability for each")
        return Sampled(
            tuple(sequence.tokens),
            tuple(sequence.logprobs),
            sequence.stop_reason,
            WeightVersions(oldest, self._newest),
            None if self._experts is None else await self._experts(sequence.sequence_id),
            getattr(sequence, "sequence_id", None) or "",  # missing from some servers and SDK versions
        )

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`. Asks the server once per picture size."""
        return await self._token_counts.get(picture.size, lambda: self._ask_token_count(picture))

    async def _ask_token_count(self, picture: Picture) -> int:
        scores = await self._client.compute_logprobs(tinker.ModelInput(chunks=[_chunk(picture)]))
        return len(scores)

    async def _stop(self, texts: Sequence[str], stop_ids: Sequence[int]) -> list[str] | list[int] | None:
        """Returns the stop condition. The API accepts either texts or ids, so ids beside texts become texts."""
        if not texts:
            return list(stop_ids) or None
        if not stop_ids:
            return list(texts)
        tokenizer = await asyncio.to_thread(self._client.get_tokenizer)
        return [*texts, *(tokenizer.decode([stop_id]) for stop_id in stop_ids)]


class WeightPublisher:
    """A publisher that saves weights for sampling, and returns policies that sample with these weights.

    Args:
        training_client: Client of the model to save.
        experts: See `TinkerPolicy`.
        is_recorded: Whether the server records samples for `stable_reinforce`.
        moves_samples: Whether samples in flight may continue with the weights that are published meanwhile. Otherwise
            each policy samples with exactly its weights.
    """

    def __init__(
        self,
        training_client: tinker.TrainingClient,
        *,
        experts: ExpertSource | None = None,
        is_recorded: bool = False,
        moves_samples: bool = False,
    ) -> None:
        self._training_client = training_client
        self._experts = experts
        self._is_recorded = is_recorded
        self._kind: tinker.types.SamplingClientKind = "inflight" if moves_samples else "snapshot"
        self._published: WeakSet[TinkerPolicy] = WeakSet()
        self._token_counts: AsyncCache[tuple[int, int], int] = AsyncCache()

    async def publish(self, version: int) -> Policy:
        """Publishes the current weights; returns a policy that samples with them. Raises what the SDK raises."""
        # The API does not report which weights an `inflight` client used: bounds are stated for all that may have been.
        for policy in self._published if self._kind == "inflight" else ():
            policy.expect_version(version)
        client = await self._training_client.save_weights_and_get_sampling_client(
            record_stability_info=self._is_recorded, kind=self._kind
        )
        policy = TinkerPolicy(client, version, self._token_counts, self._experts)
        self._published.add(policy)
        return policy


def _chunk(chunk: Chunk) -> tinker.EncodedTextChunk | tinker.types.ImageChunk:
    if isinstance(chunk, Tokens):
        return tinker.EncodedTextChunk(tokens=list(chunk.ids))
    return tinker.types.ImageChunk(data=chunk.data, format=chunk.format)
