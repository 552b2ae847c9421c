"""Samples from any server that speaks the Tinker API, through its SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import tinker
from tinker.types import ImageChunk

from fovea_rollout.messages import Picture
from fovea_rollout.picture_sizes import PictureSizes
from fovea_rollout.policy import Chunk, Sampled, SamplingSettings, Tokens, WeightVersions


class TinkerPolicy:
    """A sampling client as a policy. The SDK repeats by itself what may be repeated.

    Args:
        sampling_client: Made by the SDK.
        version: Training steps that its weights have taken.
    """

    def __init__(self, sampling_client: tinker.SamplingClient, version: int = 0) -> None:
        self._client = sampling_client
        self._version = version
        self._sizes = PictureSizes(self._ask_token_count)

    def moved(self, version: int) -> None:
        """Notes that an in-flight update moved the client to newer weights."""
        self._version = version

    def on(self, sampling_client: tinker.SamplingClient, version: int) -> TinkerPolicy:
        """The policy with other weights of the same model; what is known of pictures is shared."""
        other = TinkerPolicy(sampling_client, version)
        other._sizes = self._sizes
        return other

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`. Raises what the SDK raises; being cancelled cancels it on the server too.

        A server that keeps prefixes finds a conversation by its prompt: the API has no field for its id.
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
            raise ValueError(f"the server sent {len(sequence.tokens)} tokens without a log-probability for each")
        return Sampled(
            tuple(sequence.tokens),
            tuple(sequence.logprobs),
            sequence.stop_reason,
            WeightVersions(oldest, self._version),
        )

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`. The server is asked once a picture size."""
        return await self._sizes.token_count(picture)

    async def _ask_token_count(self, picture: Picture) -> int:
        scores = await self._client.compute_logprobs(tinker.ModelInput(chunks=[_chunk(picture)]))
        return len(scores)

    async def _stop(self, texts: Sequence[str], stop_ids: Sequence[int]) -> list[str] | list[int] | None:
        """The API takes either texts or ids: next to texts, the ids are written as texts too."""
        if not texts:
            return list(stop_ids) or None
        if not stop_ids:
            return list(texts)
        tokenizer = await asyncio.to_thread(self._client.get_tokenizer)
        return [*texts, *(tokenizer.decode([stop_id]) for stop_id in stop_ids)]


def _chunk(chunk: Chunk) -> tinker.EncodedTextChunk | ImageChunk:
    if isinstance(chunk, Tokens):
        return tinker.EncodedTextChunk(tokens=list(chunk.ids))
    return ImageChunk(data=chunk.data, format=chunk.format)
