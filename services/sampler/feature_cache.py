"""Vision tensors by digest: fetched once from the renderer that made them, checked, and kept for further requests."""

import asyncio
from collections.abc import Sequence

import grpc

from fovea.api.v1 import model_input_pb2
from fovea.client.renderer import RendererClient
from fovea.runtime.byte_lru import ByteLru
from fovea.vision.vision_family import VisionFamily
from fovea.wire.errors import DeadlineExceeded, FeatureEvicted, InvalidInput, NotFound, Unavailable
from fovea.wire.features import FeatureTensors, check_feature, size_bytes
from fovea.wire.rendered_input import ImageSpan
from services.sampler import sampler_metrics

VisionFeature = model_input_pb2.VisionFeature


class FeatureStore:
    """A cache of features over the renderers.

    Args:
        vision: Knows what the tensors of an image must be; None for a model that takes text only.
        limit_bytes: The most memory of kept tensors; what was used longest ago goes first.
        default_source: Renderer to ask when a request names none.
        timeout_s: How long a renderer may take.
    """

    def __init__(
        self, vision: VisionFamily | None, limit_bytes: int, default_source: str, timeout_s: float = 60.0
    ) -> None:
        self._vision = vision
        self._default_source = default_source
        self._timeout_s = timeout_s
        self._kept: ByteLru[FeatureTensors] = ByteLru(limit_bytes)
        self._under_way: dict[tuple[str, str], asyncio.Task[FeatureTensors]] = {}
        self._clients: dict[str, RendererClient] = {}

    async def get(self, spans: Sequence[ImageSpan]) -> list[FeatureTensors]:
        """The tensors of each span, in order.

        Raises FeatureEvicted if the renderer no longer holds one or does not answer, InvalidInput if what it holds does
        not fit the request, Internal if it is not what the request promises.
        """
        return list(await asyncio.gather(*(self._get_one(span) for span in spans)))

    async def close(self) -> None:
        """Gives up fetches and closes all channels."""
        for task in self._under_way.values():
            task.cancel()
        for client in self._clients.values():
            await client.close()

    async def _get_one(self, span: ImageSpan) -> FeatureTensors:
        assert self._vision is not None  # a request with images is refused otherwise
        feature = span.feature
        # Both digests make the key: a caller that promises other tensors under a known image must not get those.
        key = (feature.digest, feature.tensors_sha256)
        kept = self._kept.get(key)
        if kept is not None:
            sampler_metrics.FEATURES.labels("hit").inc()
        else:
            sampler_metrics.FEATURES.labels("miss").inc()
            kept = await self._fetch_once(key, feature)
        # A hit is checked too: the grid is the request's own claim.
        if problem := self._vision.tensors_problem(span.grid, kept):
            raise InvalidInput(f"image {feature.digest}: {problem}", field="prompt.spans")
        return kept

    async def _fetch_once(self, key: tuple[str, str], feature: VisionFeature) -> FeatureTensors:
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._fetch(key, feature))
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        # One caller's cancellation must not take the tensors from the others.
        return await asyncio.shield(task)

    async def _fetch(self, key: tuple[str, str], feature: VisionFeature) -> FeatureTensors:
        source = feature.source or self._default_source
        if not source:
            raise InvalidInput(
                "prompt.spans[].feature.source is empty and this sampler has no --renderer", field="prompt.spans"
            )
        try:
            fetched = await self._client(source).fetch_features([feature.digest], self._timeout_s)
        except (NotFound, Unavailable, DeadlineExceeded) as error:
            # A renderer that is gone has lost its images too. UNAVAILABLE would blame this sampler.
            raise FeatureEvicted(
                f"image {feature.digest} cannot be had from the renderer at {source}; render it again: {error.message}",
                digest=feature.digest,
            ) from error
        tensors = fetched.get(feature.digest)
        check_feature(feature, tensors)
        assert tensors is not None  # check_feature refuses None
        self._keep(key, tensors)
        return tensors

    def _keep(self, key: tuple[str, str], tensors: FeatureTensors) -> None:
        if size_bytes(tensors) <= self._kept.limit_bytes:
            self._kept.put(key, tensors, size_bytes(tensors))
            sampler_metrics.FEATURE_BYTES.set(self._kept.used_bytes)

    def _client(self, source: str) -> RendererClient:
        if source not in self._clients:
            try:
                self._clients[source] = RendererClient(source)
            except (grpc.RpcError, ValueError) as error:
                raise InvalidInput(f"{source!r} is no host:port: {error}", field="prompt.spans") from error
        return self._clients[source]
