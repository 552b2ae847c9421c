"""Traces: spans and their parents arrive at a collector; without one nothing is imported or sent."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from fovea.api.v1 import renderer_pb2, renderer_pb2_grpc
from fovea.client import RendererClient
from fovea.runtime import tracing
from fovea.runtime.processes import configure_logging
from fovea.runtime.server import ServiceServer
from fovea.runtime.settings import ServiceSettings
from fovea.wire.conventions import RENDERER_SERVICE
from fovea.wire.errors import NotFound
from tests.otlp_collector import Collector, attributes


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        tracing.configure("fovea-test", running.url)
        yield running
        tracing.shutdown()


def test_without_an_endpoint_nothing_is_loaded_and_spans_are_nothing() -> None:
    program = """
import sys
from fovea.runtime import tracing
tracing.configure("service", "")
with tracing.span("a", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"):
    tracing.note(fact=1)
    tracing.record("b", 0.0)
    assert (tracing.traceparent(), tracing.trace_id(), tracing.metadata()) == ("", "", ())
print(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_spans_nest_and_go_on_from_a_traceparent(collector: Collector) -> None:
    with tracing.span("outer", kind="x"):
        outer = tracing.traceparent()
        with tracing.span("inner"):
            tracing.note(count=2)
        tracing.record("waited", 1.0)
        with tracing.span("fresh", ""):
            pass
    with tracing.span("later", outer):
        pass
    with tracing.span("broken", "no traceparent at all"):
        pass
    tracing.shutdown()
    by_name = {span.name: span for span in collector.spans}
    parent = by_name["outer"]
    assert outer.startswith(f"00-{parent.trace_id.hex()}-{parent.span_id.hex()}-")
    assert (attributes(parent), attributes(by_name["inner"])) == ({"kind": "x"}, {"count": 2})
    for name in ("inner", "waited", "later"):
        assert (by_name[name].trace_id, by_name[name].parent_span_id) == (parent.trace_id, parent.span_id)
    assert by_name["waited"].start_time_unix_nano == 10**9
    for name in ("fresh", "broken"):
        assert by_name[name].parent_span_id == b""
        assert by_name[name].trace_id != parent.trace_id
    assert tracing.traceparent() == ""


def test_errors_are_noted_by_reason_and_cancelling_is_none(collector: Collector) -> None:
    with pytest.raises(NotFound), tracing.span("known"):
        raise NotFound("secret")
    with pytest.raises(ValueError, match="secret"), tracing.span("unknown"):
        raise ValueError("secret")
    with pytest.raises(asyncio.CancelledError), tracing.span("cancelled"):
        raise asyncio.CancelledError
    tracing.shutdown()
    error = collector.one("known").status.STATUS_CODE_ERROR
    assert (collector.one("known").status.code, attributes(collector.one("known"))) == (error, {"reason": "NOT_FOUND"})
    assert attributes(collector.one("unknown")) == {"reason": "ValueError"}
    assert collector.one("cancelled").status.code != error
    assert not any(b"secret" in span.SerializeToString() for span in collector.spans)


async def test_a_generator_that_is_closed_elsewhere_leaves_no_span_behind(collector: Collector) -> None:
    async def numbers() -> object:
        with tracing.span("generating"):
            yield 1
            yield 2

    generator = numbers()
    await anext(generator)  # type: ignore[call-overload]
    await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
    tracing.shutdown()
    assert attributes(collector.one("generating")) == {"cancelled": True}


def test_the_trace_is_in_the_log(collector: Collector, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("test")
        logger = logging.getLogger("somewhere")
        logger.info("before")
        with tracing.span("work"):
            trace_id = tracing.trace_id()
            logger.info("within")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    before, within = capsys.readouterr().err.splitlines()
    assert before.endswith("somewhere: before")
    assert within.endswith(f"somewhere: trace={trace_id} within")


class AnsweringRenderer(renderer_pb2_grpc.RendererServiceServicer):
    """Answers two calls."""

    async def GetRendererInfo(  # noqa: N802
        self, request: renderer_pb2.GetRendererInfoRequest, context: grpc.aio.ServicerContext
    ) -> renderer_pb2.GetRendererInfoResponse:
        return renderer_pb2.GetRendererInfoResponse(model=tracing.traceparent())

    async def FetchFeatures(  # noqa: N802
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> object:
        raise NotFound("gone")
        yield


@pytest.mark.parametrize("begins_traces", [False, True])
async def test_a_call_is_part_of_its_callers_trace(begins_traces: bool) -> None:
    with Collector() as collector:
        settings = ServiceSettings(trace_endpoint=collector.url)
        server = ServiceServer(settings, [RENDERER_SERVICE], begins_traces)
        renderer_pb2_grpc.add_RendererServiceServicer_to_server(AnsweringRenderer(), server.grpc)
        await server.start()
        try:
            async with RendererClient(server.address) as client:
                alone = (await client.info()).model
                with tracing.span("caller"):
                    within = (await client.info()).model
                    with pytest.raises(NotFound):
                        await client.fetch_features(["a"])
        finally:
            await server.grpc.stop(0)
            await asyncio.to_thread(tracing.shutdown)
        caller = collector.one("caller")
        assert bool(alone) == begins_traces
        assert within.split("-")[1] == caller.trace_id.hex()
        fetch = collector.one(f"{RENDERER_SERVICE}/FetchFeatures")
        assert (fetch.trace_id, fetch.parent_span_id) == (caller.trace_id, caller.span_id)
        assert attributes(fetch)["reason"] == "NOT_FOUND"
        assert collector.services == {"fovea-renderer"}


def test_the_endpoint_has_one_name_for_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_TRACE_ENDPOINT", "http://collector:4317")
    assert ServiceSettings().trace_endpoint == "http://collector:4317"
    assert ServiceSettings.from_command_line("x", ["--trace-endpoint", "http://b:1"]).trace_endpoint == "http://b:1"
    monkeypatch.setenv("FOVEA_TRACE_ENDPOINT", "collector:4317")
    with pytest.raises(ValueError, match="'collector:4317' is not a URL of an OTLP collector; use a form such as"):
        ServiceSettings()
