"""The gRPC face of the renderer: each call is decoded, handed on, and encoded."""

# ruff: noqa: N802 - gRPC names the methods.

from collections.abc import AsyncIterator

import grpc

import fovea
from fovea.api.v1 import renderer_pb2, renderer_pb2_grpc
from fovea.wire.errors import Unavailable
from fovea.wire.features import iter_pieces
from services.renderer import chunks, metrics
from services.renderer.rendering import Renderer

SERVICE_NAME = renderer_pb2.DESCRIPTOR.services_by_name["RendererService"].full_name


class RendererServicer(renderer_pb2_grpc.RendererServiceServicer):
    """Serves one Renderer once there is one: the server listens, and says NOT_SERVING, while workers warm up."""

    def __init__(self) -> None:
        self._attached: Renderer | None = None
        self._source = ""

    def attach(self, renderer: Renderer, source: str) -> None:
        """Takes requests from now on; `source` is the address that consumers fetch tensors from."""
        self._attached, self._source = renderer, source

    @property
    def _renderer(self) -> Renderer:
        if self._attached is None:
            raise Unavailable("the renderer's workers are warming up; wait until its health is SERVING")
        return self._attached

    async def GetRendererInfo(
        self, request: renderer_pb2.GetRendererInfoRequest, context: grpc.aio.ServicerContext
    ) -> renderer_pb2.GetRendererInfoResponse:
        """See renderer.proto."""
        model = self._renderer.model
        return renderer_pb2.GetRendererInfoResponse(
            model=model.name,
            family=model.model_type,
            supports_images=model.family.supports_images,
            processor_fingerprint=model.processor_fingerprint,
            vocabulary_size=model.vocabulary_size,
            max_context_length=model.max_context_length,
            reserved_token_ids=sorted(model.family.reserved_ids),
            version=fovea.__version__,
        )

    async def Render(
        self, request: renderer_pb2.RenderRequest, context: grpc.aio.ServicerContext
    ) -> renderer_pb2.RenderResponse:
        """See renderer.proto."""
        with metrics.refusals_counted():
            rendered = await self._renderer.render(chunks.decode(request.input))
        return renderer_pb2.RenderResponse(rendered=chunks.encode(rendered, self._source))

    async def PutImage(
        self, request_iterator: AsyncIterator[renderer_pb2.PutImageRequest], context: grpc.aio.ServicerContext
    ) -> renderer_pb2.PutImageResponse:
        """See renderer.proto."""
        pieces = ((request.sha256, request.data) async for request in request_iterator)
        with metrics.refusals_counted():
            size_bytes = await self._renderer.images.put(pieces)
        return renderer_pb2.PutImageResponse(size_bytes=size_bytes)

    async def FetchFeatures(
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[renderer_pb2.FetchFeaturesResponse]:
        """See renderer.proto."""
        # All are held here before the first is sent: what one client fetches cannot fall out while it is fetching.
        features = [self._renderer.features.held(digest) for digest in dict.fromkeys(request.digests)]
        for feature in features:
            for piece in iter_pieces(feature.digest, feature.tensors):
                yield piece
            metrics.FETCHED_BYTES.inc(feature.size_bytes)
