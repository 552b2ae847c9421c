"""Puts a renderer together from its settings, and runs it."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from fovea.api.v1 import renderer_pb2_grpc
from fovea.runtime.server import ServiceServer
from services.renderer import checkpoint, families
from services.renderer.checkpoint import Checkpoint
from services.renderer.families.base import Family
from services.renderer.feature_store import FeatureStore
from services.renderer.image_fetch import ImageFetcher
from services.renderer.image_header import ImageHeader
from services.renderer.image_store import ImageStore
from services.renderer.rendering import Renderer, ServedModel
from services.renderer.servicer import SERVICE_NAME, RendererServicer
from services.renderer.settings import RendererSettings
from services.renderer.worker_pool import WorkerPool
from services.renderer.worker_process import WorkerSettings

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_renderer(settings: RendererSettings) -> AsyncIterator[Renderer]:
    """A renderer whose workers are warm; they end when the context does.

    Raises ValueError if the model directory is not one that the renderer can serve, Unavailable if no worker starts.
    """
    model = checkpoint.read(checkpoint.locate(settings.model))
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
    server, servicer = ServiceServer(settings, [SERVICE_NAME]), RendererServicer()
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
