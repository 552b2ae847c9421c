"""The gateway's own part of OpenAI's API. `tests/e2e/test_openai.py` covers the part with vLLM."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from fovea.api.v1 import sampler_pb2
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput, Unavailable
from tests.contract.gateway.conftest import KEY, Stand
from tests.contract.gateway.fakes import IMAGE_TOKENS, MODEL
from tests.contract.gateway.requests import Rest
from tests.waiting import eventually

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n and so on").decode()
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def http(stand: Stand) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a bearer token, as OpenAI's SDK sends it."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"{stand.url}/v1/", headers=headers, timeout=30) as http:
        yield http


def asking(url: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": url}, {"type": "text", "text": "b"}]
    return {**CHAT, "messages": [{"role": "user", "content": parts}]}


async def test_an_image_goes_to_the_renderer_and_its_text_to_the_sampler(stand: Stand, http: httpx.AsyncClient) -> None:
    response = await http.post("chat/completions", json=asking({"url": f"data:image/png;base64,{PNG}"}))
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"]
    (rendered,) = stand.renderer.of("Render")
    assert [chunk.WhichOneof("kind") for chunk in rendered.input.chunks] == ["tokens", "image", "tokens"]
    assert rendered.input.chunks[1].image.data == base64.b64decode(PNG)
    (asked,) = stand.samplers[0].of("AnswerOpenAI")
    assert asked.image_count == 1
    assert PNG not in asked.body.decode()
    (sample,) = stand.samplers[0].of("Sample")
    assert len(tensors.decode_tokens(sample.prompt.tokens)) == 2 + IMAGE_TOKENS


async def test_a_stream_comes_as_it_is_sampled(stand: Stand, http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "chat/completions", json={**CHAT, "stream": True, "n": 2}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert {json.loads(line[6:])["choices"][0]["index"] for line in lines[:-1]} == {0, 1}
    (sample,) = stand.samplers[0].of("Sample")
    assert not sample.at_once


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_crosses_once_where_one_sampler_draws_and_writes(
    stand: Stand, http: httpx.AsyncClient, stream: bool
) -> None:
    """One sampler draws and formats the tokens, so they cross the wire once. Otherwise they are forwarded, with the
    same answer and usage.
    """
    sampler, found = stand.samplers[0], []
    for sampler.writes_own_samples in (True, False):
        answer = await http.post("chat/completions", json={**CHAT, "n": 2, "stream": stream})
        assert answer.status_code == 200, answer.text
        usage = (await http.get(f"{stand.url}/api/v1/usage")).json()["usage"]
        found.append((answer.text, sum(row["sampled_tokens"] for row in usage), len(sampler.of("sampled"))))
    assert found == [(found[0][0], 16, 0), (found[0][0], 32, 4 if stream else 2)]


@pytest.mark.parametrize(
    ("url", "field", "said"),
    [
        ({"url": "data:image/png,abc"}, "url", "not base64"),
        ({"url": "data:image/png;base64,!!"}, "url", "not base64"),
        ({"url": "data:image/webp;base64,AAAA"}, "url", "neither PNG nor JPEG"),
        ({"url": "file:///etc/passwd"}, "url", "file:///etc/passwd"),
        ({"url": "https://a.test/picture"}, "url", "its format is unknown"),
        ({"url": "https://a.test/picture.png"}, "", "is not allowed"),
        ({"url": f"data:image/png;base64,{PNG}", "detail": "low"}, "detail", "send a smaller image"),
        ({}, "url", "is missing"),
        (7, "url", "is missing"),
    ],
)
async def test_what_is_no_image_is_refused_by_its_field(
    http: httpx.AsyncClient, url: Any, field: str, said: str
) -> None:
    response = await http.post("chat/completions", json=asking(url))
    assert response.status_code == 400
    error = response.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    where = "messages.0.content.1.image_url"
    assert error["param"] == (f"{where}.{field}" if field else where)
    assert error["message"].startswith(error["param"])
    assert (await http.post("chat/completions", json=CHAT)).status_code == 200


async def test_images_of_responses_and_messages_go_to_the_renderer(stand: Stand, http: httpx.AsyncClient) -> None:
    text, url = {"type": "text", "text": "a"}, f"data:image/png;base64,{PNG}"
    spoken = [{"role": "user", "content": [text, {"type": "input_image", "image_url": url, "detail": "auto"}]}]
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [shown]}
    for route, body in (
        ("responses", {"model": MODEL, "input": spoken}),
        ("messages", {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": [text, shown]}]}),
        ("messages", {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": [result]}]}),
    ):
        await http.post(route, json=body)
        asked = stand.samplers[0].of("AnswerOpenAI")[-1]
        assert asked.image_count == 1
        assert PNG not in asked.body.decode()
        assert '{"type": "image_url", "image_url": null, "uuid": "0"}' in asked.body.decode()
    routes = [asked.route for asked in stand.samplers[0].of("AnswerOpenAI")]
    assert routes == [sampler_pb2.OPEN_AI_ROUTE_RESPONSES, *2 * [sampler_pb2.OPEN_AI_ROUTE_MESSAGES]]


@pytest.mark.parametrize(
    ("change", "status", "kind", "said"),
    [
        ({"model": "none"}, 404, "not_found_error", "or a checkpoint's path (tinker://RUN/sampler_weights/NAME)"),
        ({"unknown": 1}, 400, "invalid_request_error", "field unknown"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, 400,
         "invalid_request_error", "messages.0.content.0.source.url is missing"),
    ],
)  # fmt: skip
async def test_errors_of_messages_have_anthropics_shape(
    stand: Stand, change: dict[str, Any], status: int, kind: str, said: str
) -> None:
    async with httpx.AsyncClient(base_url=f"{stand.url}/v1/", headers={"x-api-key": KEY}, timeout=30) as http:
        answer = await http.post("messages", json={**CHAT, "max_tokens": 4, **change})
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"]["type"] == kind
        assert said in answer.json()["error"]["message"]
        assert answer.json()["request_id"] == answer.headers["request-id"]
        stand.samplers[0].failures["Sample"] = [InvalidInput("params.seed is odd", field="params.seed")]
        refused = await http.post("messages", json={**CHAT, "max_tokens": 4})
        assert refused.json()["error"]["message"] == "params.seed is odd (field seed)"


async def test_errors_have_openais_shape(stand: Stand, http: httpx.AsyncClient) -> None:
    told: dict[str, tuple[int, str, str | None]] = {}
    wrong = [{"unknown": 1}, {"model": "none"}, {"model": 3}, {"max_tokens": 10**6}]
    for change in wrong:
        response = await http.post("chat/completions", json={**CHAT, **change})
        error = response.json()["error"]
        told[str(change)] = response.status_code, error["code"], error["param"]
    assert list(told.values()) == [
        (400, "invalid_input", "unknown"),
        (404, "model_not_found", "model"),
        (400, "invalid_input", "model"),
        (400, "context_length_exceeded", "max_tokens"),
    ]
    stand.samplers[0].failures["Sample"] = [InvalidInput("params.seed is odd", field="params.seed")]
    error = (await http.post("chat/completions", json={**CHAT, "stream": True})).json()["error"]
    assert error["param"] == "seed"
    nothing = await http.post("embeddings", json={})
    assert (nothing.status_code, nothing.json()["error"]["type"]) == (404, "not_found_error")
    assert (await http.post("chat/completions", content=b"[")).json()["error"]["type"] == "invalid_request_error"


async def test_a_sampler_that_breaks_off_is_no_concern_of_a_whole_answer(stand: Stand, http: httpx.AsyncClient) -> None:
    stand.samplers[0].failures["Sample"] = [Unavailable("gone")]
    assert (await http.post("chat/completions", json=CHAT)).status_code == 200
    assert stand.samplers[0].names().count("Sample") == 2


async def test_leaving_frees_the_engine(stand: Stand, http: httpx.AsyncClient) -> None:
    sampler = stand.samplers[0]
    for stream in (False, True):
        sampler.sample_delay_s = 600.0
        asking = asyncio.create_task(http.post("chat/completions", json={**CHAT, "stream": stream}))
        while not sampler.running:  # noqa: ASYNC110 - the fake says no more
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while sampler.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sampler.cancelled == 2


async def test_sampled_tokens_count_as_usage(stand: Stand, http: httpx.AsyncClient, rest: Rest) -> None:
    before = await _sampled_tokens(rest)
    await http.post("chat/completions", json={**CHAT, "n": 2, "max_tokens": 5})

    async def is_counted() -> bool:  # stored with the outcome once the answer is on its way
        return await _sampled_tokens(rest) == before + 10

    await eventually(is_counted)


async def _sampled_tokens(rest: Rest) -> int:
    usage = (await rest.http.get("usage")).json()["usage"]
    return sum(day["sampled_tokens"] for day in usage)


async def test_an_image_alone_is_asked_the_question_of_the_checkpoints_training(
    stand: Stand, http: httpx.AsyncClient, rest: Rest
) -> None:
    asking_for = {"fovea_question": "Which shape?", "fovea_system_prompt": "Be short."}
    saving = await rest.ok(
        "save_weights_for_sampler", model_id=await rest.create_model(), seq_id=1, path="w", user_metadata=asking_for
    )
    path = (await rest.result(saving["request_id"]))["path"]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    alone = {"messages": [{"role": "user", "content": [image]}]}
    beside = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "Which?"}]}]}
    for model, chat in ((path, alone), (path, beside), (CHAT["model"], alone)):
        await http.post("chat/completions", json={**CHAT, **chat, "model": model})
    trained, given, base = [json.loads(one.body)["messages"] for one in stand.samplers[0].of("AnswerOpenAI")]
    assert trained[0] == {"role": "system", "content": "Be short."}
    assert [part.get("text") for part in trained[1]["content"]] == [None, "Which shape?"]
    assert [part.get("text") for part in given[0]["content"]] == [None, "Which?"]
    assert [part.get("text") for part in base[0]["content"]] == [None]


@pytest.mark.parametrize(
    ("said", "side"),
    [("512", 512), ("0", 0), (None, 0), ("many", 0), ("-3", 0), ("9" * 5000, 0)],
    ids=["512", "every size", "nothing", "no number", "negative", "too long"],
)
async def test_images_are_shrunk_to_the_side_that_the_checkpoint_names(
    stand: Stand, http: httpx.AsyncClient, rest: Rest, said: str | None, side: int
) -> None:
    metadata = {"max_picture_side": said} if said else None
    saving = await rest.ok(
        "save_weights_for_sampler", model_id=await rest.create_model(), seq_id=1, path="w", user_metadata=metadata
    )
    path = (await rest.result(saving["request_id"]))["path"]
    by_data = asking({"url": f"data:image/png;base64,{PNG}"})
    assert (await http.post("chat/completions", json=by_data | {"model": path})).status_code == 200
    by_address = asking({"url": "https://a.test/picture.png"})
    refused = await http.post("chat/completions", json=by_address | {"model": path})
    assert refused.json()["error"]["param"] == "messages.0.content.1.image_url"
    assert (await http.post("chat/completions", json=by_data)).status_code == 200
    tuned, fetched, base = [request.input.chunks[1] for request in stand.renderer.of("Render")]
    assert (tuned.image.max_side, fetched.image_reference.max_side, base.image.max_side) == (side, side, 0)
