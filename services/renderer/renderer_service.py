"""The renderer's gRPC service: put together from its settings, and run."""

# ruff: noqa: N802 - gRPC names the methods.

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import grpc

import fovea
from fovea.api.v1 import renderer_pb2, renderer_pb2_grpc
from fovea.runtime.server import ServiceServer
from fovea.wire.errors import Unavailable
from fovea.wire.features import iter_pieces
from fovea.wire.names import RENDERER_SERVICE
from services.renderer import families, model_directory, model_inputs, renderer_metrics
from services.renderer.families.base import Family
from services.renderer.image_caches import FeatureStore, ImageStore
from services.renderer.image_fetch import ImageFetcher
from services.renderer.image_header import ImageHeader
from services.renderer.model_directory import Checkpoint
from services.renderer.rendering import Renderer, ServedModel
from services.renderer.settings import RendererSettings
from services.renderer.worker_pool import WorkerPool, WorkerSettings

logger = logging.getLogger(__name__)


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
        with renderer_metrics.refusals_counted():
            rendered = await self._renderer.render(model_inputs.decode(request.input))
        return renderer_pb2.RenderResponse(rendered=model_inputs.encode(rendered, self._source))

    async def PutImage(
        self, request_iterator: AsyncIterator[renderer_pb2.PutImageRequest], context: grpc.aio.ServicerContext
    ) -> renderer_pb2.PutImageResponse:
        """See renderer.proto."""
        pieces = ((request.sha256, request.data) async for request in request_iterator)
        with renderer_metrics.refusals_counted():
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
            renderer_metrics.FETCHED_BYTES.inc(feature.size_bytes)


@asynccontextmanager
async def open_renderer(settings: RendererSettings) -> AsyncIterator[Renderer]:
    """A renderer whose workers are warm; they end when the context does.

    Raises ValueError if the model directory is not one that the renderer can serve, Unavailable if no worker starts.
    """
    model = model_directory.read(model_directory.locate(settings.model))
    family = families.choose(model)
    fetcher = ImageFetcher(settings.image_hosts, settings.image_fetch_timeout_s)
    features, images = FeatureStore(settings.feature_cache_bytes), ImageStore(settings.image_store_bytes)
    try:
        if not family.supports_images:
            served = _served(settings, model, family(model, {}), fingerprint="")
            yield Renderer(served, features, images, fetcher, _never)
            return
        pool = WorkerPool(_worker_settings(settings, model), settings.workers, settings.max_pending_images)
        ready = await pool.start()
        try:
            served = _served(settings, model, family(model, ready.settings), ready.fingerprint)
            yield Renderer(served, features, images, fetcher, pool.process)
        finally:
            await pool.close()
    finally:
        await fetcher.close()


async def serve(settings: RendererSettings) -> None:
    """Serves until SIGTERM or SIGINT. Health is SERVING once all workers are warm. Errors as in `open_renderer`."""
    server, servicer = ServiceServer(settings, [RENDERER_SERVICE]), RendererServicer()
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    try:
        async with open_renderer(settings) as renderer:
            servicer.attach(renderer, settings.advertise or server.address)
            model = renderer.model
            logger.info(
                "%s (%s), fingerprint %s", model.name, model.model_type, model.processor_fingerprint[:12] or "none"
            )
            await server.set_serving(True)
            await server.run_until_stopped()
    finally:
        # A server that is collected after its loop has closed complains at length.
        await server.grpc.stop(0)


def _served(settings: RendererSettings, model: Checkpoint, family: Family, fingerprint: str) -> ServedModel:
    return ServedModel(
        name=settings.model,
        model_type=model.model_type,
        family=family,
        vocabulary_size=model.vocabulary_size,
        max_context_length=settings.max_context_length or model.max_position_count,
        processor_fingerprint=fingerprint,
    )


def _worker_settings(settings: RendererSettings, model: Checkpoint) -> WorkerSettings:
    return WorkerSettings(
        model.directory, settings.worker_memory_bytes, settings.image_timeout_s, settings.start_timeout_s
    )


async def _never(header: ImageHeader, data: bytes) -> NoReturn:
    raise TypeError("a text-only model has no image workers")
