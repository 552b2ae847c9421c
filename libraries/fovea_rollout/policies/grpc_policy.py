"""Samples from Fovea over gRPC. Each picture is sent once, and each sample names the weights that made it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Literal, cast

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2
from fovea.client import GatewayClient
from fovea.wire.errors import Internal, NotFound
from fovea.wire.tensors import decode, decode_floats, decode_tokens, encode_tokens
from fovea_rollout.messages import Picture, PictureFormat
from fovea_rollout.policies.async_cache import AsyncCache
from fovea_rollout.policies.policy import Chunk, Sampled, SamplingSettings, Tokens, WeightVersions

_FORMATS: dict[PictureFormat, model_input_pb2.ImageFormat] = {
    "png": model_input_pb2.IMAGE_FORMAT_PNG,
    "jpeg": model_input_pb2.IMAGE_FORMAT_JPEG,
}
_STOP_REASONS: dict[int, Literal["stop", "length"]] = {
    sampler_pb2.FINISH_REASON_STOP: "stop",
    sampler_pb2.FINISH_REASON_LENGTH: "length",
}


class GrpcPolicy:
    """A sampling session as a policy. The code that opened the session must send its heartbeats.

    Args:
        client: Client of the gateway.
        sampling_session_id: The session to sample from.
        version: Number of training steps of the session's weights.
        routed_experts: Whether samples include the experts that computed them; for mixtures of experts only.
    """

    def __init__(
        self, client: GatewayClient, sampling_session_id: str, version: int = 0, *, routed_experts: bool = False
    ) -> None:
        self._client = client
        self._routed_experts = routed_experts
        self._session_id = sampling_session_id
        self._version = version
        self._snapshots: dict[str, int] = {}
        self._token_counts: AsyncCache[tuple[int, int], int] = AsyncCache()
        self._uploads: AsyncCache[str, model_input_pb2.Chunk] = AsyncCache()

    def set_version(self, version: int, snapshot_id: str = "") -> None:
        """Sets the version of newer weights, to which an in-flight update has moved the session.

        Args:
            snapshot_id: The snapshot of these weights, as returned by the save. Samples that name it are known to be
                of this version.
        """
        self._version = version
        if snapshot_id:
            self._snapshots[snapshot_id] = version

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`. Raises FoveaError. Cancelling the call cancels the request in the engine too."""
        oldest = self._version
        request = gateway_pb2.SampleTokensRequest(
            sampling_session_id=self._session_id,
            sample_count=1,
            params=_params(settings, stop_ids),
            routed_experts=self._routed_experts,
        )
        deltas = [event.delta for event in await self._ask(request, prompt) if event.WhichOneof("event") == "delta"]
        if not deltas or deltas[-1].finish_reason not in _STOP_REASONS:
            raise Internal("the gateway closed the stream of a sample before the sequence was complete")
        versions = WeightVersions(oldest, self._version)
        if (exact := self._snapshots.get(deltas[-1].snapshot_id)) is not None:
            versions = WeightVersions(exact, exact)
        return Sampled(
            tuple(int(token) for delta in deltas for token in decode_tokens(delta.tokens)),
            tuple(float(logprob) for delta in deltas for logprob in decode_floats(delta.logprobs)),
            _STOP_REASONS[deltas[-1].finish_reason],
            versions,
            decode(deltas[-1].routed_experts) if self._routed_experts else None,
        )

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`. Asks the server once per picture size."""
        return await self._token_counts.get(picture.size, lambda: self._ask_token_count(picture))

    async def _ask_token_count(self, picture: Picture) -> int:
        request = gateway_pb2.SampleTokensRequest(
            sampling_session_id=self._session_id,
            sample_count=1,
            prompt_logprobs=True,
            params=sampler_pb2.SamplingParams(max_tokens=1),
        )
        for event in await self._ask(request, [picture]):
            if event.WhichOneof("event") == "prompt":
                return len(decode_floats(event.prompt.logprobs))
        raise Internal("the gateway returned no log-probabilities of a prompt")

    async def _ask(
        self, request: gateway_pb2.SampleTokensRequest, prompt: Sequence[Chunk]
    ) -> list[gateway_pb2.SampleTokensResponse]:
        """Samples. Sends pictures again, once, if the gateway has dropped one of them."""
        for is_last in (False, True):
            sent = [await self._chunk(chunk) for chunk in prompt]
            del request.prompt.chunks[:]
            request.prompt.chunks.extend(sent)
            try:
                # Closing the generator cancels the call, so it must be closed at once if this task is cancelled.
                async with aclosing(cast(Any, self._client.sample(request))) as events:
                    return [event async for event in events]
            except NotFound as error:
                if is_last or not (error.field or "").endswith("image_reference.sha256"):
                    raise
                for chunk, message in zip(prompt, sent, strict=True):
                    if isinstance(chunk, Picture):
                        self._uploads.forget(chunk.digest, message)
        raise AssertionError("both tries either return or raise")

    async def _chunk(self, chunk: Chunk) -> model_input_pb2.Chunk:
        if isinstance(chunk, Tokens):
            return model_input_pb2.Chunk(tokens=model_input_pb2.TokenChunk(tokens=encode_tokens(chunk.ids)))
        picture = chunk
        return await self._uploads.get(picture.digest, lambda: self._upload(picture))

    async def _upload(self, picture: Picture) -> model_input_pb2.Chunk:
        sha256 = await self._client.upload_image(picture.data)
        reference = model_input_pb2.ImageReference(sha256=sha256, format=_FORMATS[picture.format])
        return model_input_pb2.Chunk(image_reference=reference)


def _params(settings: SamplingSettings, stop_ids: Sequence[int]) -> sampler_pb2.SamplingParams:
    return sampler_pb2.SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        stop=sampler_pb2.StopCondition(token_ids=stop_ids, strings=settings.stop),
    )
