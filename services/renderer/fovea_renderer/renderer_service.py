"""The renderer's gRPC service, and the code that assembles and runs it."""

# ruff: noqa: N802 - gRPC names the methods.

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

import fovea
from fovea.api.v1 import renderer_pb2, renderer_pb2_grpc
from fovea.runtime.model_files import ModelDirectory, fingerprints, locate, read_directory
from fovea.runtime.server import ServiceServer
from fovea.wire.conventions import RENDERER_SERVICE
from fovea.wire.errors import Unavailable
from fovea.wire.tensors import iter_pieces
from fovea_renderer import input_messages, renderer_metrics
from fovea_renderer.image_sources import FeatureCache, ImageCache, ImageFetcher
from fovea_renderer.rendering import ImageSupport, Renderer, ServedModel
from fovea_renderer.settings import RendererSettings
from fovea_renderer.worker_pool import WorkerPool, WorkerSettings

logger = logging.getLogger(__name__)


class RendererServicer(renderer_pb2_grpc.RendererServiceServicer):
    """The gRPC methods of one Renderer. While the workers warm up, the server listens and its health is NOT_SERVING."""

    def __init__(self, opened: asyncio.Future[Renderer]) -> None:
        self._opened = opened

    @property
    def _renderer(self) -> Renderer:
        if not self._opened.done():
            raise Unavailable("the renderer's workers are warming up; wait until its health is SERVING")
        return self._opened.result()

    async def GetRendererInfo(
        self, request: renderer_pb2.GetRendererInfoRequest, context: grpc.aio.ServicerContext
    ) -> renderer_pb2.GetRendererInfoResponse:
        """Implements `GetRendererInfo` of renderer.proto."""
        model = self._renderer.model
        images = model.image_support
        return renderer_pb2.GetRendererInfoResponse(
            model=model.name,
            family=model.model_type,
            supports_images=images is not None,
            processor_fingerprint=images.fingerprint if images else "",
            vocabulary_size=model.vocabulary_size,
            max_context_length=model.max_context_length,
            model_files=model.files,
            reserved_token_ids=sorted(images.family.reserved_ids) if images else (),
            version=fovea.__version__,
        )

    async def Render(
        self, request: renderer_pb2.RenderRequest, context: grpc.aio.ServicerContext
    ) -> renderer_pb2.RenderResponse:
        """Implements `Render` of renderer.proto."""
        with renderer_metrics.refusals_counted():
            rendered = await self._renderer.render(input_messages.decode(request.input))
        return renderer_pb2.RenderResponse(rendered=input_messages.encode(rendered, self._renderer.source))

    async def PutImage(
        self, request_iterator: AsyncIterator[renderer_pb2.PutImageRequest], context: grpc.aio.ServicerContext
    ) -> renderer_pb2.PutImageResponse:
        """Implements `PutImage` of renderer.proto."""
        pieces = ((request.sha256, request.data) async for request in request_iterator)
        with renderer_metrics.refusals_counted():
            size_bytes = await self._renderer.images.put(pieces)
        return renderer_pb2.PutImageResponse(size_bytes=size_bytes)

    async def FetchFeatures(
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[renderer_pb2.FetchFeaturesResponse]:
        """Implements `FetchFeatures` of renderer.proto."""
        # Collects all features before it sends the first, so that none is evicted while this client fetches.
        features = [self._renderer.features.held(digest) for digest in dict.fromkeys(request.digests)]
        for feature in features:
            for piece in iter_pieces(feature.digest, feature.tensors):
                yield piece
            renderer_metrics.FETCHED_BYTES.inc(feature.size_bytes)


@asynccontextmanager
async def open_renderer(settings: RendererSettings, address: str) -> AsyncIterator[Renderer]:
    """Opens a renderer with warm workers, which end with the context. `address` is the address of its server.

    Raises ValueError if the renderer cannot serve the model directory, and Unavailable if a worker does not start.
    """
    checkpoint = read_directory(locate(settings.model))
    files = fingerprints(checkpoint.directory)
    fetcher = ImageFetcher(settings.image_hosts, settings.image_fetch_timeout_s)
    features, images = FeatureCache(settings.feature_cache_bytes), ImageCache(settings.image_store_bytes)
    try:
        async with _open_image_support(settings, checkpoint) as image_support:
            model = ServedModel(
                name=settings.model,
                model_type=checkpoint.model_type,
                vocabulary_size=checkpoint.vocabulary_size,
                max_context_length=settings.max_context_length or checkpoint.max_position_count,
                image_support=image_support,
                files=files,
            )
            yield Renderer(model, features, images, fetcher, settings.advertise or address)
    finally:
        await fetcher.close()


async def serve(settings: RendererSettings) -> None:
    """Serves until SIGTERM or SIGINT. Health is SERVING once all workers are warm. Raises as `open_renderer` does."""
    server = ServiceServer(settings, [RENDERER_SERVICE])
    opened: asyncio.Future[Renderer] = asyncio.get_running_loop().create_future()
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(RendererServicer(opened), server.grpc)
    await server.start()
    try:
        async with open_renderer(settings, server.address) as renderer:
            opened.set_result(renderer)
            model = renderer.model
            fingerprint = model.image_support.fingerprint[:12] if model.image_support else "none"
            logger.info("%s (%s), fingerprint %s", model.name, model.model_type, fingerprint)
            await server.set_serving(True)
            await server.run_until_stopped()
    finally:
        # If the server were garbage-collected after its event loop is closed, gRPC would log long warnings.
        await server.grpc.stop(0)


@asynccontextmanager
async def _open_image_support(
    settings: RendererSettings, checkpoint: ModelDirectory
) -> AsyncIterator[ImageSupport | None]:
    """Starts the workers of a vision-language model and warms them up; yields None for a text model."""
    if checkpoint.family is None:
        yield None
        return
    worker_settings = WorkerSettings(
        checkpoint.directory, settings.worker_memory_bytes, settings.image_timeout_s, settings.start_timeout_s
    )
    pool = WorkerPool(worker_settings, settings.workers, settings.max_pending_images)
    ready = await pool.start()
    try:
        token_count = checkpoint.family.token_counter(ready.settings)
        yield ImageSupport(checkpoint.family, token_count, pool.process, ready.fingerprint)
    finally:
        await pool.close()
