"""Puts the sampler together and runs it until it is stopped or its engine dies."""

import asyncio
import logging
import time
import uuid
from contextlib import suppress

from fovea import vision
from fovea.api.v1 import sampler_pb2_grpc
from fovea.runtime.checkpoint import read_added_tokens
from fovea.runtime.gpu_memory import show_gpu_memory
from fovea.runtime.server import ServiceServer
from fovea.wire.names import SAMPLER_SERVICE
from services.sampler.adapters import AdapterShelf
from services.sampler.engine.adapter_capacity import AdapterRoom
from services.sampler.engine.vllm_engine import Engine
from services.sampler.engine.vllm_launch import checkpoint_directory, runs_on_cpu
from services.sampler.image_fetching import ImageFetcher
from services.sampler.pushes import SnapshotPushes
from services.sampler.sample_runner import Sampling
from services.sampler.sampler_servicer import EngineFacts, SamplerService
from services.sampler.settings import SamplerSettings
from services.sampler.warmup import warm_up
from services.sampler.weight_store import Snapshots

logger = logging.getLogger(__name__)

EXIT_ENGINE_DIED = 70
_WATCH_PERIOD_S = 0.2


async def serve(settings: SamplerSettings, engine: Engine, room: AdapterRoom, started: float) -> int:
    """Serves until a signal (returns 0) or until the engine dies (returns 70). `started` is of `time.monotonic`."""
    logger.info("%s", room)
    server = ServiceServer(settings, [SAMPLER_SERVICE])
    await engine.prepare()
    added_tokens = read_added_tokens(checkpoint_directory(settings.model))
    family = vision.bind(engine.config, added_tokens)
    images = ImageFetcher(family, settings.feature_cache_mib << 20, settings.renderer)
    shelf = AdapterShelf(settings.max_adapters, room.held_bytes)
    snapshots = Snapshots(engine, shelf)
    sampling = Sampling(engine, snapshots, images, settings.max_requests)
    service = SamplerService(
        _facts(settings, engine, room), family, sampling, snapshots, SnapshotPushes(engine, snapshots)
    )
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(service, server.grpc)
    if not runs_on_cpu(settings):
        show_gpu_memory()
    await server.start()
    watch = asyncio.create_task(_watch(engine, server, service))
    try:
        await warm_up(engine, family, engine.limits)
        if not engine.dead:
            service.set_ready(True)
            await server.set_serving(True)
            logger.info("ready %.1f s after the start", time.monotonic() - started)
        await server.run_until_stopped()
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await images.close()
    return EXIT_ENGINE_DIED if engine.dead else 0


async def _watch(engine: Engine, server: ServiceServer, service: SamplerService) -> None:
    """Ends the service once the engine is dead. Requests in flight have failed by then: vLLM tells each of them."""
    while not engine.dead:  # noqa: ASYNC110 - vLLM sets a flag and no event
        await asyncio.sleep(_WATCH_PERIOD_S)
    logger.critical("the engine has died; this process exits with code %d and is to be restarted", EXIT_ENGINE_DIED)
    service.set_ready(False)
    await server.set_serving(False)
    server.request_stop()


def _facts(settings: SamplerSettings, engine: Engine, room: AdapterRoom) -> EngineFacts:
    return EngineFacts(
        model=settings.model,
        instance_id=uuid.uuid4().hex,
        dtype=engine.dtype,
        max_lora_rank=settings.max_lora_rank,
        transfer_backend=engine.transfer_backend,
        transfer_worker_count=engine.worker_count,
        limits=engine.limits,
        max_batched_adapters=room.batched,
        adapter_memory_bytes=room.held_bytes,
    )
