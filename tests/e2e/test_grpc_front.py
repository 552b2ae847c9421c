"""The main path over gRPC, without the Tinker SDK: a model learns a picture, and its snapshot describes it."""

import asyncio
import pathlib

import numpy as np
import pytest
from transformers import AutoTokenizer

from fovea.api.v1 import gateway_pb2, model_input_pb2, sampler_pb2, trainer_pb2, weights_pb2
from fovea.client import GatewayClient
from fovea.wire.errors import InvalidInput, NotFound, Unauthenticated
from fovea.wire.tensors import decode, decode_tokens, encode, encode_tokens
from tests.e2e.prompts import picture
from tests.e2e.stack import API_KEY, Stack

ADAM = trainer_pb2.AdamParams(learning_rate=5e-3, beta1=0.9, beta2=0.95, eps=1e-8)
LORA = weights_pb2.LoraConfig(
    rank=8, seed=1, train_attention=True, train_mlp=True, train_unembedding=True, train_vision=True
)


def image_input(model: pathlib.Path, data: bytes, *texts: str) -> model_input_pb2.ModelInput:
    tokenizer = AutoTokenizer.from_pretrained(model)
    before, *after = [encode_tokens(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    png = model_input_pb2.ImageChunk(data=data, format=model_input_pb2.IMAGE_FORMAT_PNG)
    chunk, tokens = model_input_pb2.Chunk, model_input_pb2.TokenChunk
    return model_input_pb2.ModelInput(
        chunks=[chunk(tokens=tokens(tokens=before)), chunk(image=png), *(chunk(tokens=tokens(tokens=t)) for t in after)]
    )


async def sample(client: GatewayClient, session: str, prompt: model_input_pb2.ModelInput, count: int) -> list[int]:
    params = sampler_pb2.SamplingParams(
        max_tokens=count, temperature=0.0, stop=sampler_pb2.StopCondition(ignore_eos=True)
    )
    request = gateway_pb2.SampleTokensRequest(sampling_session_id=session, prompt=prompt, sample_count=1, params=params)
    return [int(i) async for event in client.sample(request) for i in decode_tokens(event.delta.tokens)]


async def test_a_model_learns_a_picture(stack: Stack) -> None:
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        (served,) = await client.capabilities()
        assert served.name == stack.model_name
        assert served.supports_images
        session = await client.create_session()
        model = await client.create_model(session, 0, served.name, LORA)
        # Two megabytes of noise, so that the image must be sent separately from the request.
        big = noise_png()
        question, answer = "<|vision_end|>Who?<|im_end|>", "<|im_end|>"
        prompt = image_input(stack.model, big, "<|vision_start|>", question)
        whole = image_input(stack.model, big, "<|vision_start|>", question, "Ada")
        length = await prompt_length(client, session, served.name, whole)
        tokenizer = AutoTokenizer.from_pretrained(stack.model)
        answer_ids = [*tokenizer.encode("Ada", add_special_tokens=False), tokenizer.convert_tokens_to_ids(answer)]
        targets, weights = np.zeros(length, np.int64), np.zeros(length, np.float32)
        targets[-len(answer_ids) :], weights[-len(answer_ids) :] = answer_ids, 1.0
        datum = gateway_pb2.InputDatum(
            input=whole, loss_inputs={"target_tokens": encode(targets), "weights": encode(weights)}
        )
        losses = []
        for step in range(12):
            header = gateway_pb2.SubmitForwardBackwardHeader(
                model_id=model, seq_id=2 * step + 1, loss_function="cross_entropy", backward=True
            )
            result = await client.forward_backward(header, [datum])
            assert decode(result.outputs[0].tensors["logprobs"]).shape == (length,)
            losses.append(result.metrics["loss:sum"])
            assert "grad_norm:mean" in await client.optim_step(model, 2 * step + 2, ADAM)
        assert losses[-1] < 0.1 * losses[0]
        saved = await client.save_for_sampler(model, 25)
        assert saved.snapshot.step == 12
        assert await sample(client, saved.sampling_session_id, prompt, len(answer_ids)) == answer_ids
        await client.finish_session(session)


def noise_png() -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (720, 960, 3), dtype=np.uint8)).save(buffer, "PNG")
    assert len(buffer.getvalue()) > 1.5 * 2**20
    return buffer.getvalue()


async def prompt_length(
    client: GatewayClient, session: str, base_model: str, prompt: model_input_pb2.ModelInput
) -> int:
    sampling = await client.create_sampling_session(session, 0, base_model=base_model)
    request = gateway_pb2.SampleTokensRequest(
        sampling_session_id=sampling, prompt=prompt, sample_count=1, prompt_logprobs=True,
        params=sampler_pb2.SamplingParams(max_tokens=1),
    )  # fmt: skip
    async for event in client.sample(request):
        if event.WhichOneof("event") == "prompt":
            return len(event.prompt.logprobs) // 4
    raise AssertionError("no prompt event")


async def test_errors_keep_their_class(stack: Stack) -> None:
    async with GatewayClient(stack.address("gateway"), "tml-wrong") as stranger:
        with pytest.raises(Unauthenticated, match="API key"):
            await stranger.capabilities()
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        with pytest.raises(NotFound, match="nobody"):
            await client.heartbeat("nobody")
        session = await client.create_session()
        sampling = await client.create_sampling_session(session, 0, base_model=stack.model_name)
        bad = image_input(stack.model, b"no image", "<|vision_start|>", "<|vision_end|>")
        with pytest.raises(InvalidInput, match=r"chunks\[1\]"):
            await sample(client, sampling, bad, 1)


async def test_leaving_a_stream_frees_the_engine(stack: Stack) -> None:
    async with GatewayClient(stack.address("gateway"), API_KEY) as client:
        session = await client.create_session()
        sampling = await client.create_sampling_session(session, 0, base_model=stack.model_name)
        prompt = image_input(stack.model, picture(64, 64), "<|vision_start|>", "<|vision_end|>")
        request = gateway_pb2.SampleTokensRequest(
            sampling_session_id=sampling, prompt=prompt, sample_count=1,
            params=sampler_pb2.SamplingParams(max_tokens=3000, stop=sampler_pb2.StopCondition(ignore_eos=True)),
        )  # fmt: skip
        stream = client.sample(request)
        async for event in stream:
            if event.WhichOneof("event") == "delta":
                break
        assert await running_requests(stack) == 1
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            while await running_requests(stack) > 0:  # noqa: ASYNC110  the count is in another process
                await asyncio.sleep(0.1)


async def running_requests(stack: Stack) -> float:
    import httpx

    async with httpx.AsyncClient(timeout=60) as http:
        text = (await http.get(stack.state["services"]["sampler"]["metrics"])).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.split()[-1]) for line in lines)
