"""An OTLP collector behind a real gRPC server in this process, which stores received spans."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A context manager; `spans` are in order of arrival."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def url(self) -> str:
        """The endpoint to send to."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Collector":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - gRPC names it
        """Stores spans."""
        for resource in request.resource_spans:
            names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            self.services.update(names)
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """Returns the spans with a name."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        """Returns the only span with a name."""
        (span,) = self.named(name)
        return span


def attributes(span: Span) -> dict[str, str | int | bool]:
    """Returns the attributes of a span."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in span.attributes}
