"""Assembles the sampler and runs it until it is stopped or its engine dies."""

import asyncio
import hashlib
import logging
import time
import uuid
from contextlib import aclosing, suppress

import numpy as np
import numpy.typing as npt

from fovea import vision
from fovea.api.v1 import model_input_pb2, sampler_pb2, sampler_pb2_grpc
from fovea.runtime.machine_memory import show_gpu_memory
from fovea.runtime.model_files import fingerprints, read_added_tokens
from fovea.runtime.server import ServiceServer
from fovea.vision.vision_family import VisionFamily
from fovea.wire.conventions import SAMPLER_SERVICE
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureTensors
from fovea_sampler.engine.manifest_check import checkpoint_directory
from fovea_sampler.engine.vllm_engine import Engine
from fovea_sampler.engine.vllm_launch import AdapterCapacity, runs_on_cpu
from fovea_sampler.engine_api import Limits, SampleEngine, SampleSpec
from fovea_sampler.generation import Generation, ImageFetcher
from fovea_sampler.pushes import SnapshotPushes
from fovea_sampler.sampler_servicer import EngineInfo, SamplerService
from fovea_sampler.settings import SamplerSettings
from fovea_sampler.weight_store import AdapterCache, SlotQueue, WeightStore

logger = logging.getLogger(__name__)

EXIT_ENGINE_DIED = 70
_WATCH_PERIOD_S = 0.2
_WARM_UP_TOKENS = 8


async def serve(settings: SamplerSettings, engine: Engine, capacity: AdapterCapacity, started: float) -> int:
    """Serves until a signal stops the process or the engine dies.

    Args:
        settings: The sampler's settings.
        engine: The launched engine.
        capacity: The room for adapters in a batch and in host memory.
        started: The start of the process, by `time.monotonic`.

    Returns:
        The exit code: 0 after a signal, 70 after the engine's death.
    """
    logger.info("%s", capacity)
    server = ServiceServer(settings, [SAMPLER_SERVICE])
    await engine.prepare()
    added_tokens = read_added_tokens(checkpoint_directory(settings.model))
    family = vision.bind(engine.config, added_tokens)
    images = ImageFetcher(family, settings.feature_cache_mib << 20, settings.renderer)
    slots = SlotQueue(
        capacity.batched, settings.max_lora_rank, capacity.slots * settings.max_lora_rank, settings.max_sequences
    )
    weights = WeightStore(engine, AdapterCache(settings.max_adapters, capacity.held_bytes), slots)
    keeps_cache = settings.inflight_cache == "keep"
    generation = Generation(engine, weights, images, settings.max_requests, keeps_cache)
    service = SamplerService(
        _facts(settings, engine, capacity), family, generation, weights, SnapshotPushes(engine, weights),
        engine.openai_serving(),
    )  # fmt: skip
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(service, server.grpc)
    if not runs_on_cpu(settings):
        show_gpu_memory()
    await server.start()
    watch = asyncio.create_task(_watch(engine, server, service))
    try:
        await _warm_up(engine, family, engine.limits)
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
    """Stops the service once the engine is dead. By then vLLM has failed every request in flight with an error."""
    while not engine.dead:  # noqa: ASYNC110 - vLLM sets a flag, not an event
        await asyncio.sleep(_WATCH_PERIOD_S)
    logger.critical("the engine has died; the process exits with code %d and must be restarted", EXIT_ENGINE_DIED)
    service.set_ready(False)
    await server.set_serving(False)
    server.request_stop()


def _facts(settings: SamplerSettings, engine: Engine, capacity: AdapterCapacity) -> EngineInfo:
    return EngineInfo(
        model=settings.model,
        instance_id=uuid.uuid4().hex,
        dtype=engine.dtype,
        max_lora_rank=settings.max_lora_rank if capacity.batched else 0,
        transfer_backend=engine.transfer_backend,
        transfer_worker_count=engine.worker_count,
        limits=engine.limits,
        max_batched_adapters=capacity.batched,
        adapter_memory_bytes=capacity.held_bytes,
        max_sequences=settings.max_sequences,
        model_files=fingerprints(checkpoint_directory(settings.model)),
    )


async def _warm_up(engine: SampleEngine, vision: VisionFamily | None, limits: Limits) -> None:
    """Draws one sample of each kind, so that the first request is as fast as later ones.

    Draws greedily and with a temperature, each with and without log-probabilities. The prompt has an image if the model
    takes images. Raises any error of the engine, which then cannot serve.
    """
    spans, images, tokens = _warm_up_prompt(vision)
    count = min(2, limits.max_top_logprobs)
    scores = sampler_pb2.SampleRequest(
        prompt_logprobs=True, top_prompt_logprobs=count, alt_token_count=count, top_sample_logprobs=count
    )
    greedy = sampler_pb2.SamplingParams(max_tokens=2, temperature=0.0, top_p=1.0, top_k=-1)
    drawn = sampler_pb2.SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, top_k=2, seed=1)
    for params in (greedy, drawn):
        for asked in (sampler_pb2.SampleRequest(), scores):
            request = sampler_pb2.SampleRequest(request_id="warm-up", sample_count=1)
            request.MergeFrom(asked)
            spec = SampleSpec(request, params, tokens, spans)
            async with aclosing(engine.sample(spec, 0, engine.prompt(spec, images), None)) as events:
                async for _ in events:
                    pass


def _warm_up_prompt(
    vision: VisionFamily | None,
) -> tuple[tuple[ImageSpan, ...], list[FeatureTensors], npt.NDArray[np.int32]]:
    reserved = vision.reserved_ids if vision else ()
    text = [token for token in range(_WARM_UP_TOKENS + len(reserved)) if token not in reserved][:_WARM_UP_TOKENS]
    if vision is None:
        return (), [], np.asarray(text, dtype=np.int32)
    tensors = vision.blank_image()
    ids, is_embedding = vision.replacement(tensors)
    feature = model_input_pb2.VisionFeature(digest=hashlib.sha256(b"warm-up").hexdigest())
    tokens = np.concatenate([text, ids, text]).astype(np.int32)
    return (ImageSpan(len(text), is_embedding, feature),), [tensors], tokens
