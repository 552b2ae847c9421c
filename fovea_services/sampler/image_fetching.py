"""Fetches the vision tensors of prompts from the renderers that computed them."""

import asyncio
from collections.abc import Sequence

import grpc

from fovea.api.v1 import model_input_pb2
from fovea.client.feature_cache import FeatureCache
from fovea.client.renderer import RendererClient
from fovea.runtime.tasks import SingleFlight
from fovea.vision.vision_family import VisionFamily
from fovea.wire.errors import DeadlineExceeded, FeatureEvicted, InvalidInput, NotFound, Unavailable
from fovea.wire.features import FeatureTensors, check_feature
from fovea.wire.rendered_input import ImageSpan
from fovea_services.sampler import sampler_metrics

_FIELD = "prompt.spans"


class ImageFetcher:
    """Fetches vision tensors from renderers and caches them. Concurrent requests for one image share one fetch.

    Args:
        vision: Declares the tensors that an image must have; None for a text model.
        limit_bytes: The most bytes of cached tensors; the least recently used are evicted first.
        default_source: The host:port of the renderer to ask when a request names none.
        timeout_s: Seconds that a renderer may take to answer.
    """

    def __init__(
        self, vision: VisionFamily | None, limit_bytes: int, default_source: str, timeout_s: float = 60.0
    ) -> None:
        self._timeout_s = timeout_s
        self._kept = FeatureCache(vision, limit_bytes, default_source)
        self._fetches: SingleFlight[tuple[str, str], FeatureTensors] = SingleFlight()
        self._clients: dict[str, RendererClient] = {}

    async def fetch(self, spans: Sequence[ImageSpan]) -> list[FeatureTensors]:
        """Returns the tensors of each span, in order.

        Raises FeatureEvicted if the renderer no longer holds an image or does not answer, InvalidInput if an image's
        tensors do not fit the request, Internal if they are not the ones of which the request gives the digest.
        """
        return list(await asyncio.gather(*(self._fetch_one(span) for span in spans)))

    async def close(self) -> None:
        """Cancels the running fetches and closes all channels."""
        await self._fetches.cancel()
        for client in self._clients.values():
            await client.close()

    async def _fetch_one(self, span: ImageSpan) -> FeatureTensors:
        feature = span.feature
        tensors = self._kept.get(feature)
        if tensors is not None:
            sampler_metrics.FEATURES.labels("hit").inc()
        else:
            sampler_metrics.FEATURES.labels("miss").inc()
            key = (feature.digest, feature.tensors_sha256)
            tensors = await self._fetches.run(key, lambda: self._ask_renderer(feature))
        self._kept.check(span, tensors, _FIELD)
        return tensors

    async def _ask_renderer(self, feature: model_input_pb2.VisionFeature) -> FeatureTensors:
        source = self._kept.source_of(feature, f"{_FIELD}[].feature")
        try:
            fetched = await self._client(source).fetch_features([feature.digest], self._timeout_s)
        except (NotFound, Unavailable, DeadlineExceeded) as error:
            # A renderer that is gone has lost its images too. UNAVAILABLE would make clients blame this sampler.
            raise FeatureEvicted(
                f"the renderer at {source} did not return image {feature.digest}; render it again: {error.message}",
                digest=feature.digest,
            ) from error
        tensors = check_feature(feature, fetched.get(feature.digest))
        self._kept.put(feature, tensors)
        sampler_metrics.FEATURE_BYTES.set(self._kept.used_bytes)
        return tensors

    def _client(self, source: str) -> RendererClient:
        if source not in self._clients:
            try:
                self._clients[source] = RendererClient(source)
            except (grpc.RpcError, ValueError) as error:
                raise InvalidInput(
                    f"the renderer's address {source!r} is not host:port: {error}", field=_FIELD
                ) from error
        return self._clients[source]
