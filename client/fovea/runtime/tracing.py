"""Distributed traces with OpenTelemetry: one trace from a REST call to the engine. Off, and free, until `configure`.

A span is current in the context that opened it. It is passed on as a W3C `traceparent`: in gRPC metadata, in queued
work and in answers. Specification: https://www.w3.org/TR/trace-context/.
"""

import atexit
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from fovea.wire.errors import FoveaError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

HEADER = "traceparent"
_LAST_S = 3.0

Attribute = str | int | float | bool
Metadata = tuple[tuple[str, str], ...]

# OpenTelemetry's own context is not used: it logs an error when a generator is closed from another task.
_CURRENT: ContextVar["Span | None"] = ContextVar("span", default=None)
_OFF: AbstractContextManager[None] = nullcontext()


class _Exporting(NamedTuple):
    """The exporter and the OpenTelemetry functions in use. They are imported only when tracing is on."""

    provider: "TracerProvider"
    tracer: Any
    propagator: Any
    in_context: Any


_exporting: _Exporting | None = None


def configure(service: str, endpoint: str, instance: str = "") -> None:
    """Sends the spans of this process to an OTLP collector.

    Args:
        service: Value of `service.name`.
        endpoint: URL of the collector's gRPC port, such as http://127.0.0.1:4317; empty leaves tracing off.
        instance: Value of `service.instance.id`.

    `OTEL_*` variables have the meaning that the SDK documents, for example `OTEL_TRACES_SAMPLER`.
    """
    global _exporting
    if not endpoint:
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    resource = Resource.create({"service.name": service, "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    atexit.register(shutdown)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    propagator = TraceContextTextMapPropagator()
    _exporting = _Exporting(provider, provider.get_tracer("fovea"), propagator, set_span_in_context)


def shutdown() -> None:
    """Sends the remaining spans, within three seconds, and turns tracing off. Also runs when the interpreter exits."""
    global _exporting
    if _exporting is not None:
        exporting, _exporting = _exporting, None
        # The SDK waits up to 30 s for a collector that is gone, longer than a pod has to stop.
        last = threading.Thread(target=exporting.provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(_LAST_S)


def span(name: str, parent: str | None = None, **attributes: Attribute) -> AbstractContextManager[None]:
    """Opens a span around a block and makes it current. An error that leaves the block sets the span's status.

    Args:
        name: Name of the operation.
        parent: The `traceparent` to continue; an empty string begins a trace, None continues the current span.
        attributes: Attributes of the span.
    """
    return _OFF if _exporting is None else _span(_exporting, name, parent, attributes)


def record(name: str, since: float, **attributes: Attribute) -> None:
    """Records a child of the current span that began at `since`, in seconds of `time.time`, and ends now."""
    if _exporting is not None:
        context = _context(_exporting, None)
        _exporting.tracer.start_span(name, context, attributes=attributes, start_time=int(since * 1e9)).end()


def note(**attributes: Attribute) -> None:
    """Adds attributes to the current span."""
    current = _CURRENT.get()
    if current is not None:
        current.set_attributes(attributes)


def traceparent() -> str:
    """Returns the `traceparent` of the current span, to be continued elsewhere; empty if there is none."""
    current = _CURRENT.get()
    if current is None or _exporting is None:
        return ""
    carrier: dict[str, str] = {}
    _exporting.propagator.inject(carrier, _exporting.in_context(current))
    return carrier.get(HEADER, "")


def trace_id() -> str:
    """Returns the trace id, 32 hexadecimal digits; empty outside spans."""
    current = _CURRENT.get()
    return "" if current is None else f"{current.get_span_context().trace_id:032x}"


def metadata(base: Metadata = ()) -> Metadata:
    """Returns metadata for a gRPC call: `base` plus the current span."""
    parent = traceparent()
    return (*base, (HEADER, parent)) if parent else base


def incoming(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """Returns the `traceparent` in the metadata of a call; empty if there is none."""
    return next((str(value) for key, value in metadata or () if key == HEADER), "")


@contextmanager
def _span(exporting: _Exporting, name: str, parent: str | None, attributes: Mapping[str, Attribute]) -> Iterator[None]:
    before = _CURRENT.get()
    opened = exporting.tracer.start_span(name, _context(exporting, parent), attributes=attributes)
    _CURRENT.set(opened)
    try:
        yield
    except FoveaError as error:
        _fail(opened, error.reason)
        raise
    except Exception as error:
        _fail(opened, type(error).__name__)
        raise
    except BaseException:
        opened.set_attribute("cancelled", True)
        raise
    finally:
        opened.end(time.time_ns())
        _CURRENT.set(before)


def _context(exporting: _Exporting, parent: str | None) -> "Context":
    """Returns the parent context of a new span. It is never None: OpenTelemetry would then use its own context."""
    if parent is not None:
        carrier = {HEADER: parent} if parent else {}
        extracted: Context = exporting.propagator.extract(carrier, _empty())
        return extracted
    current = _CURRENT.get()
    context: Context = _empty() if current is None else exporting.in_context(current, _empty())
    return context


def _empty() -> "Context":
    from opentelemetry.context import Context

    return Context()


def _fail(opened: "Span", reason: str) -> None:
    from opentelemetry.trace import StatusCode

    opened.set_attribute("reason", reason)
    opened.set_status(StatusCode.ERROR, reason)
