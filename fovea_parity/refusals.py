"""What a running Fovea must refuse by name, and that the next request works as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import tinker

from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc, sampler_pb2, trainer_pb2, weights_pb2
from fovea.client.renderer import RendererClient
from fovea.client.sampler import SamplerClient
from fovea.client.trainer import TrainerClient
from fovea.runtime import secret
from fovea.wire import tensors
from fovea.wire.errors import FoveaError
from fovea.wire.features import FeatureTensors, iter_pieces, size_bytes, tensors_sha256
from fovea_parity.prompts import Prompt, scores

_WAIT_S = 300
_MODEL = "parity-refusals"

Ask = Callable[[model_input_pb2.RenderedInput], Awaitable[None]]


def wrong_count_problem(service: tinker.ServiceClient, model: str, prompt: Prompt) -> str:
    """Of a prompt whose first image says that one more token replaces it than does."""
    chunks: list[Any] = list(prompt.input.chunks)
    at = next(number for number, chunk in enumerate(chunks) if isinstance(chunk, tinker.types.ImageChunk))
    chunks[at] = chunks[at].model_copy(update={"expected_tokens": chunks[at].expected_tokens + 1})
    sampling = service.create_sampling_client(base_model=model).result(_WAIT_S)
    before = scores(sampling, prompt)
    try:
        sampling.compute_logprobs(tinker.types.ModelInput(chunks=chunks)).result(_WAIT_S)
    except tinker.TinkerError as error:
        if "expected_tokens" not in str(error):
            return f"wrong expected_tokens are refused without their name: {error}"
    else:
        return "wrong expected_tokens are taken"
    return "" if np.array_equal(before, scores(sampling, prompt)) else "a refusal changes the next answer"


def wrong_tensor_problems(state: dict[str, Any], prompt: Prompt, adapts: bool) -> list[str]:
    """Of a prompt with one image, each of whose tensors in turn comes to sampler and trainer in a shape of its own.

    Args:
        adapts: Whether the model takes adapters; otherwise all parameters are asked for.
    """
    os.environ[secret.VARIABLE] = str(state["service_secret"])
    lora = weights_pb2.LoraConfig(rank=8, train_attention=True) if adapts else None
    with own_renderer() as (address, held):
        return asyncio.run(_wrong_tensor_problems(state, _message(prompt), lora, address, held))


def _message(prompt: Prompt) -> model_input_pb2.ModelInput:
    """The same over gRPC."""
    message = model_input_pb2.ModelInput()
    for chunk in prompt.input.chunks:
        if isinstance(chunk, tinker.types.ImageChunk):
            message.chunks.add().image.data = chunk.data
            message.chunks[-1].image.format = model_input_pb2.IMAGE_FORMAT_PNG
        elif isinstance(chunk, tinker.types.EncodedTextChunk):
            message.chunks.add().tokens.tokens = tensors.encode_tokens(list(chunk.tokens))
    return message


async def _wrong_tensor_problems(
    state: dict[str, Any],
    message: model_input_pb2.ModelInput,
    lora: weights_pb2.LoraConfig | None,
    address: str,
    held: dict[str, FeatureTensors],
) -> list[str]:
    at = {name: service["address"] for name, service in state["services"].items()}
    problems: list[str] = []
    async with RendererClient(at["renderer"]) as renderer, SamplerClient(at["sampler"]) as sampler:
        rendered = await renderer.render(message)
        digest = rendered.spans[0].feature.digest
        right = (await renderer.fetch_features([digest]))[digest]
        async with TrainerClient(at["trainer"]) as trainer:
            await trainer.create_model(_MODEL, lora, _WAIT_S)
            for name in right:
                wrong = spoilt(rendered, right | {name: right[name][None]}, address, held)
                for service, ask in {"sampler": _sample(sampler), "trainer": _train(trainer)}.items():
                    if problem := await refusal_problem(ask, wrong, rendered, name):
                        problems.append(f"{service}: {problem}")
            await trainer.delete_model(_MODEL)
    return problems


async def refusal_problem(
    ask: Ask, wrong: model_input_pb2.RenderedInput, right: model_input_pb2.RenderedInput, name: str
) -> str:
    """What is amiss in how a service takes an input whose tensor of this name is spoilt, or the empty string."""
    try:
        await ask(wrong)
    except FoveaError as error:
        if name not in error.message:
            return f"a wrong {name} is refused without its name: {error.message}"
    else:
        return f"a wrong {name} is taken"
    try:
        await ask(right)
    except FoveaError as error:
        return f"after a wrong {name} the right one fails: {error.message}"
    return ""


def spoilt(
    rendered: model_input_pb2.RenderedInput, wrong: FeatureTensors, address: str, held: dict[str, FeatureTensors]
) -> model_input_pb2.RenderedInput:
    """The same input, truly announced, but for whose tensors are what they should be."""
    changed = model_input_pb2.RenderedInput()
    changed.CopyFrom(rendered)
    feature = changed.spans[0].feature
    feature.digest = feature.tensors_sha256 = tensors_sha256(wrong)
    feature.size_bytes, feature.source = size_bytes(wrong), address
    held[feature.digest] = wrong
    return changed


def _sample(sampler: SamplerClient) -> Ask:
    async def ask(rendered: model_input_pb2.RenderedInput) -> None:
        request = sampler_pb2.SampleRequest(
            request_id=_MODEL, prompt=rendered, sample_count=1, params=sampler_pb2.SamplingParams(max_tokens=1)
        )
        async for _ in sampler.sample(request):
            pass

    return ask


def _train(trainer: TrainerClient) -> Ask:
    async def ask(rendered: model_input_pb2.RenderedInput) -> None:
        count = len(tensors.decode_tokens(rendered.tokens))
        given = {
            "target_tokens": tensors.encode(np.zeros(count, np.int64)),
            "weights": tensors.encode(np.ones(count, np.float32)),
        }
        header = trainer_pb2.ForwardBackwardHeader(model_id=_MODEL, loss_function="cross_entropy", datum_count=1)
        await trainer.forward_backward(header, [trainer_pb2.Datum(input=rendered, loss_inputs=given)])

    return ask


class _Held(renderer_pb2_grpc.RendererServiceServicer):
    """Gives out whatever it was given."""

    def __init__(self) -> None:
        self.features: dict[str, FeatureTensors] = {}

    def FetchFeatures(  # noqa: N802
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.ServicerContext
    ) -> Iterator[renderer_pb2.FetchFeaturesResponse]:
        for digest in request.digests:
            yield from iter_pieces(digest, self.features[digest])


@contextmanager
def own_renderer() -> Iterator[tuple[str, dict[str, FeatureTensors]]]:
    """The address of a renderer on a free port, and the tensors that it gives out, by digest."""
    service, server = _Held(), grpc.server(ThreadPoolExecutor(2))
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", service.features
    finally:
        server.stop(None)
