"""Checks that a running Fovea refuses malformed images with the name of the field, and that it then still works."""

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
from fovea.client.inference import RendererClient, SamplerClient
from fovea.client.trainer import TrainerClient
from fovea.runtime import credentials
from fovea.wire import tensors
from fovea.wire.errors import FoveaError
from fovea.wire.tensors import FeatureTensors, iter_pieces, size_bytes, tensors_sha256
from fovea_parity.prompts import Prompt, scores

_WAIT_S = 300
_MODEL = "parity-refusals"

Ask = Callable[[model_input_pb2.RenderedInput], Awaitable[None]]


def wrong_count_problem(service: tinker.ServiceClient, model: str, prompt: Prompt) -> str:
    """Sends a prompt with a wrong `expected_tokens` of its first image; returns the problem of the response, or ""."""
    chunks: list[Any] = list(prompt.input.chunks)
    at = next(number for number, chunk in enumerate(chunks) if isinstance(chunk, tinker.types.ImageChunk))
    chunks[at] = chunks[at].model_copy(update={"expected_tokens": chunks[at].expected_tokens + 1})
    sampling = service.create_sampling_client(base_model=model).result(_WAIT_S)
    before = scores(sampling, prompt)
    try:
        sampling.compute_logprobs(tinker.types.ModelInput(chunks=chunks)).result(_WAIT_S)
    except tinker.TinkerError as error:
        if "expected_tokens" not in str(error):
            return f"wrong expected_tokens are refused, but the error does not name the field: {error}"
    else:
        return "wrong expected_tokens are accepted"
    return "" if np.array_equal(before, scores(sampling, prompt)) else "a refusal changes the next answer"


def wrong_tensor_problems(state: dict[str, Any], prompt: Prompt, adapts: bool) -> list[str]:
    """Sends a prompt to sampler and trainer with each tensor of its image, in turn, in a wrong shape.

    Args:
        state: The state of the running Fovea.
        prompt: A prompt with one image.
        adapts: True if the model supports adapters; otherwise the check trains all parameters.

    Returns:
        The problems of the responses.
    """
    os.environ[credentials.SECRET_VARIABLE] = str(state["service_secret"])
    lora = weights_pb2.LoraConfig(rank=8, train_attention=True) if adapts else None
    with running_renderer() as (address, held):
        return asyncio.run(_wrong_tensor_problems(state, _message(prompt), lora, address, held))


def _message(prompt: Prompt) -> model_input_pb2.ModelInput:
    """Returns the prompt as a protobuf message."""
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
                wrong = with_wrong_tensors(rendered, right | {name: right[name][None]}, address, held)
                for service, ask in {"sampler": _sample(sampler), "trainer": _train(trainer)}.items():
                    if problem := await refusal_problem(ask, wrong, rendered, name):
                        problems.append(f"{service}: {problem}")
            await trainer.delete_model(_MODEL)
    return problems


async def refusal_problem(
    ask: Ask, wrong: model_input_pb2.RenderedInput, right: model_input_pb2.RenderedInput, name: str
) -> str:
    """Returns the problem of a service's response to an input with a wrong tensor, or an empty string.

    Args:
        ask: Sends an input to the service.
        wrong: The input with the wrong tensor.
        right: The same input with the right tensors.
        name: The name of the wrong tensor.
    """
    try:
        await ask(wrong)
    except FoveaError as error:
        if name not in error.message:
            return f"a wrong {name} is refused, but the error does not name it: {error.message}"
    else:
        return f"a wrong {name} is accepted"
    try:
        await ask(right)
    except FoveaError as error:
        return f"after a wrong {name} the right one fails: {error.message}"
    return ""


def with_wrong_tensors(
    rendered: model_input_pb2.RenderedInput, wrong: FeatureTensors, address: str, held: dict[str, FeatureTensors]
) -> model_input_pb2.RenderedInput:
    """Returns a copy of an input that announces the wrong tensors, with their true digest and size.

    The tensors are stored in `held`, from which the renderer at `address` serves them.
    """
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


class _TensorServer(renderer_pb2_grpc.RendererServiceServicer):
    """A renderer that serves the tensors in `features`."""

    def __init__(self) -> None:
        self.features: dict[str, FeatureTensors] = {}

    def FetchFeatures(  # noqa: N802
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.ServicerContext
    ) -> Iterator[renderer_pb2.FetchFeaturesResponse]:
        for digest in request.digests:
            yield from iter_pieces(digest, self.features[digest])


@contextmanager
def running_renderer() -> Iterator[tuple[str, dict[str, FeatureTensors]]]:
    """Runs a renderer on a free port; yields its address and the dictionary of its tensors, by digest."""
    service, server = _TensorServer(), grpc.server(ThreadPoolExecutor(2))
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", service.features
    finally:
        server.stop(None)
