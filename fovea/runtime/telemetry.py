"""Prometheus metrics that every gRPC service has, and the port that shows all metrics of the process."""

from http.server import ThreadingHTTPServer

from prometheus_client import Counter, Histogram, start_http_server

CALLS = Counter("fovea_grpc_calls_total", "gRPC calls by outcome.", ["method", "code"])
ERRORS = Counter("fovea_grpc_errors_total", "gRPC calls that failed, by the reason of the error.", ["method", "reason"])
CALL_SECONDS = Histogram(
    "fovea_grpc_call_seconds",
    "Seconds from the start of a gRPC call to its end.",
    ["method"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)


def serve_metrics(host: str, port: int) -> tuple[ThreadingHTTPServer, int]:
    """Shows the metrics of this process at http://host:port/metrics; returns the server and its real port."""
    server, _ = start_http_server(port, addr=host)
    return server, server.server_port  # type: ignore[return-value]
