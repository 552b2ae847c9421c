"""Answers in OpenAI's format, written by vLLM's own classes, are equal whether the writing sampler draws or another
one.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import xgrammar
from vllm.renderers.registry import renderer_from_config
from vllm.v1.engine.input_processor import InputProcessor

import fovea_tinyvlm
from fovea.api.v1 import sampler_pb2, sampler_pb2_grpc
from fovea.client.inference import SamplerClient
from fovea.runtime.server import ErrorInterceptor
from fovea.wire import tensors
from fovea_sampler.engine.openai_serving import OpenAIServing
from fovea_sampler.engine_api import Limits
from fovea_sampler.generation import Generation, ImageFetcher
from fovea_sampler.pushes import SnapshotPushes
from fovea_sampler.sampler_servicer import EngineInfo, SamplerService
from fovea_sampler.weight_store import AdapterCache, SlotQueue, WeightStore
from tests.unit.sampler.engine_configs import engine_config
from tests.unit.sampler.memory_engine import MemoryEngine

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Où est-ce? 🦊"}], "max_completion_tokens": 9, "n": 2}
_COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([chr(letter) for letter in range(128)]))
MADE = re.compile(r'"(id|created|random_tool_id)":("[^"]*"|\d+)')
"""Fields that differ between two answers to one request."""


@pytest.fixture(scope="module")
def serving() -> OpenAIServing:
    """vLLM's serving classes for the tiny model, without an engine."""
    config = engine_config(fovea_tinyvlm.ensure("qwen3_vl"))
    renderer = renderer_from_config(config)
    processor = InputProcessor(config, renderer)
    llm: Any = SimpleNamespace(
        model_config=config.model_config, vllm_config=config, renderer=renderer, input_processor=processor
    )
    return OpenAIServing(llm, "auto", [])


@pytest.fixture
async def client(serving: OpenAIServing) -> AsyncIterator[SamplerClient]:
    """A client of a sampler with these classes and an engine that repeats the prompt."""
    engine, images = MemoryEngine(), ImageFetcher(None, 1 << 20, "")
    weights = WeightStore(engine, AdapterCache(2, 1000), SlotQueue(8, 64, 512, 64))
    facts = EngineInfo("model", "instance", "float32", 64, "gloo", 1, Limits(2000, 50000, 4, 5, 2, 8), 8, 9 << 20, 64)
    generation, pushes = Generation(engine, weights, images, 8), SnapshotPushes(engine, weights)
    service = SamplerService(facts, None, generation, weights, pushes, serving)
    service.set_ready(True)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(service, server)
    await server.start()
    async with SamplerClient(address) as client:
        yield client
    await server.stop(None)


async def answer(
    client: SamplerClient, route: "sampler_pb2.OpenAIRoute", body: dict[str, Any], *, here: bool, broken: int = 0
) -> tuple[str, int]:
    """Answers a request as the gateway does.

    Args:
        here: Whether the sampler that writes the answer also draws its tokens.
        broken: Number of events after which the first attempt of each prompt breaks.

    Returns:
        The answer without fields that differ each time, and the number of tokens that reached the caller.
    """
    told: asyncio.Queue[sampler_pb2.AnswerOpenAIRequest] = asyncio.Queue()
    asked = sampler_pb2.OpenAIRequest(route=route, body=json.dumps(body).encode())
    told.put_nowait(sampler_pb2.AnswerOpenAIRequest(request=asked))

    async def say() -> AsyncIterator[sampler_pb2.AnswerOpenAIRequest]:
        while True:
            yield await told.get()

    crossed = 0
    async with aclosing(client.answer_openai(say())) as steps:  # type: ignore[type-var]
        plan = (await anext(steps)).plan
        for index, prompt in enumerate(plan.prompts):
            request = sampler_pb2.SampleRequest(request_id="r", sample_count=plan.sample_count, params=plan.params)
            request.prompt.tokens = b"".join(chunk.tokens.tokens for chunk in prompt.chunks)
            if here:
                request.answer.answer_id, request.answer.prompt_index = plan.answer_id, index
            if broken:
                async with aclosing(client.sample(request, 20)) as events:  # type: ignore[type-var]
                    _ = [await anext(events) for _ in range(broken)]
            is_first = True
            async for event in client.sample(request, 20):
                if event.WhichOneof("event") != "delta":
                    continue
                crossed += len(tensors.decode_tokens(event.delta.tokens))
                ids = request.prompt.tokens if is_first else b""
                sampled = sampler_pb2.SampledEvent(prompt_index=index, prompt_tokens=ids, event=event)
                is_first = False
                told.put_nowait(sampler_pb2.AnswerOpenAIRequest(sampled=sampled))
        text = b"".join([step.answer async for step in steps]).decode()
    return MADE.sub("", text), crossed


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_equal_whether_its_own_sampler_draws_or_another(client: SamplerClient, stream: bool) -> None:
    chat = {**CHAT, "stream": stream}
    prompts = {"model": "m", "prompt": ["one café", "two"], "max_tokens": 5, "stream": stream}
    chats, completions = sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS, sampler_pb2.OPEN_AI_ROUTE_COMPLETIONS
    for route, body, count in ((chats, chat, 18), (completions, prompts, 10)):
        relayed, crossed = await answer(client, route, body, here=False)
        assert crossed == count
        if stream:  # choices of a stream arrive in any order
            relayed = "\n".join(sorted(relayed.split("\n\n")))
        written, crossed = await answer(client, route, body, here=True)
        if stream:
            written = "\n".join(sorted(written.split("\n\n")))
        assert written == relayed
        assert crossed == 0


@pytest.mark.slow
async def test_a_try_that_was_broken_off_leaves_nothing_in_the_answer(client: SamplerClient) -> None:
    route = sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS
    whole = await answer(client, route, CHAT, here=True)
    assert await answer(client, route, CHAT, here=True, broken=6) == whole


@pytest.mark.slow
async def test_a_streamed_response_begins_with_its_first_event(client: SamplerClient) -> None:
    """vLLM writes two events before it asks the engine for tokens; the plan precedes both."""
    body = {"model": "m", "input": "Où est-ce? 🦊", "max_output_tokens": 5, "stream": True}
    text, crossed = await answer(client, sampler_pb2.OPEN_AI_ROUTE_RESPONSES, body, here=False)
    kinds = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert crossed == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "response"])
async def test_a_required_tool_ends_although_the_model_prefers_spaces(serving: OpenAIServing, name: str) -> None:
    """xgrammar allows at most 16 spaces between two parts of a call."""
    function = {"name": "move", "parameters": {"type": "object", "properties": {"way": {"enum": ["left"]}}}}
    chat = {**CHAT, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    response = {"model": "m", "input": "Go.", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    route, body = {
        "chat": (sampler_pb2.OPEN_AI_ROUTE_CHAT_COMPLETIONS, chat),
        "response": (sampler_pb2.OPEN_AI_ROUTE_RESPONSES, response),
    }[name]

    async def nothing() -> AsyncIterator[sampler_pb2.SampledEvent]:
        await asyncio.Event().wait()
        yield sampler_pb2.SampledEvent()

    asked = sampler_pb2.OpenAIRequest(route=route, body=json.dumps(body).encode())
    async with aclosing(serving.answer(asked, nothing(), 8)) as steps:
        plan = await anext(steps)
    assert isinstance(plan, sampler_pb2.OpenAIPlan)
    tag = json.loads(plan.params.structured_outputs)["structural_tag"]
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    for spaces, accepted in ((16, True), (17, False)):
        matcher = xgrammar.GrammarMatcher(_COMPILER.compile_grammar(grammar))
        call = '<tool_call>\n{"name": "move", "arguments": {' + " " * spaces + '"way": "left"}}\n</tool_call>'
        assert matcher.accept_string(call) is accepted
