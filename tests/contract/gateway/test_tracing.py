"""One trace id from a REST call, across the queue of futures, to renderer, trainer and sampler."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fovea.runtime import tracing
from tests.contract.gateway.conftest import Stand, running
from tests.contract.gateway.requests import Rest
from tests.otlp_collector import Collector, attributes

RENDER, SAMPLE = "fovea.api.v1.RendererService/Render", "fovea.api.v1.SamplerService/Sample"
TRAIN, PUSH = "fovea.api.v1.TrainerService/ForwardBackward", "fovea.api.v1.TrainerService/PushSnapshot"
PICTURE = {"type": "image", "format": "png", "data": base64.b64encode(b"\x89PNG picture").decode()}


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[tuple[Rest, Collector]]:
    """A client with a session, and the collector of its gateway's spans."""
    with Collector() as collector:
        async with running(Stand(tmp_path), trace_endpoint=collector.url) as stand, stand.http() as http:
            rest = Rest(http)
            await rest.open_session()
            yield rest, collector
        tracing.shutdown()


async def test_a_sample_is_one_trace(traced: tuple[Rest, Collector]) -> None:
    rest, collector = traced
    model_id = await rest.create_model()
    sampling_session_id = await rest.snapshot(model_id, 1)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}, PICTURE]}
    caller = f"00-{'a' * 32}-{'b' * 16}-01"
    rest.http.headers[tracing.HEADER] = caller
    response = await rest.sample(sampling_session_id, 1, prompt=prompt)
    del rest.http.headers[tracing.HEADER]
    await rest.result(response.json()["request_id"])
    await asyncio.to_thread(tracing.shutdown)

    call = collector.one("POST asample")
    assert response.headers[tracing.HEADER] == f"00-{'a' * 32}-{call.span_id.hex()}-01"
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == ("a" * 32, "b" * 16)
    spans = {span.span_id: span for span in collector.spans if span.trace_id == call.trace_id}

    def ancestry(name: str) -> list[str]:
        (span,) = [span for span in spans.values() if span.name == name]
        names = []
        while span.parent_span_id in spans:
            span = spans[span.parent_span_id]
            names.append(span.name)
        return names

    future = ["future sample", "POST asample"]
    assert ancestry(RENDER) == ["render", *future]
    assert ancestry(SAMPLE) == ["sample", *future]
    assert ancestry("queue") == ancestry("weights") == future
    (future_span,) = [span for span in spans.values() if span.name == "future sample"]
    assert attributes(future_span)["future_id"] == response.json()["request_id"]


async def test_training_commands_belong_to_the_call_that_submitted_them(traced: tuple[Rest, Collector]) -> None:
    """The second command runs in a task that the first one started; its span must not join the first one's trace."""
    rest, collector = traced
    model_id = await rest.create_model()
    calls = []
    for seq_id in (1, 2):
        answer = await rest.forward_backward(model_id, seq_id)
        calls.append(answer.headers[tracing.HEADER].split("-")[1])
        await rest.result(answer.json()["request_id"])
    sampling_session_id = await rest.snapshot(model_id, 3)
    await rest.result((await rest.sample(sampling_session_id, 1)).json()["request_id"])
    await asyncio.to_thread(tracing.shutdown)
    assert calls[0] != calls[1]
    assert [span.trace_id.hex() for span in collector.named(TRAIN)] == calls
    trained = [span.trace_id.hex() for span in collector.named("train")]
    assert [trace for trace in trained if trace in calls] == calls
    assert len(trained) == 4, "model creation and its snapshot need turns of the trainer, too"
    assert len(collector.named(PUSH)) == 1
    assert collector.one(PUSH).parent_span_id == collector.one("push").span_id


async def test_without_tracing_answers_carry_no_traceparent(stand: Stand) -> None:
    async with stand.http() as http:
        response = await http.get("healthz", headers={tracing.HEADER: f"00-{'a' * 32}-{'b' * 16}-01"})
    assert response.status_code == 200
    assert tracing.HEADER not in response.headers
