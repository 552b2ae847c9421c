"""The gRPC server of a service: health, reflection, metrics, graceful shutdown, and interceptors.

The interceptors check the secret, map errors to statuses, count and time calls, and continue traces.
"""

import asyncio
import hmac
import logging
import resource
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from prometheus_client import Counter, Histogram, start_http_server

from fovea.api.v1 import logs_pb2, logs_pb2_grpc
from fovea.runtime import credentials, tracing
from fovea.runtime.credentials import Redactor, redactor_of
from fovea.runtime.processes import MOST_LINES, RECENT, LogRing
from fovea.runtime.settings import ServiceSettings
from fovea.wire.conventions import LOG_SERVICE, MESSAGE_BYTES
from fovea.wire.errors import FoveaError, Internal, Unauthenticated, to_status

logger = logging.getLogger(__name__)

CALLS = Counter("fovea_grpc_calls_total", "gRPC calls by outcome.", ["method", "code"])
ERRORS = Counter("fovea_grpc_errors_total", "gRPC calls that failed, by the reason of the error.", ["method", "reason"])
CALL_SECONDS = Histogram(
    "fovea_grpc_call_seconds",
    "Seconds from the start of a gRPC call to its end.",
    ["method"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)

Context = grpc.aio.ServicerContext
_Translate = Callable[[FoveaError], FoveaError]
_UNTOUCHED = ("/grpc.",)  # health and reflection set their own statuses
_KINDS = {
    (request, response): f"{'stream' if request else 'unary'}_{'stream' if response else 'unary'}"
    for request in (False, True)
    for response in (False, True)
}
_OPEN = "/grpc.health."  # a kubelet's probes send no secret


def open_files() -> int:
    """Returns how many files, including connections, this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Limit per connection. A gRPC client holds further calls back until earlier ones have ended.
    ("grpc.max_concurrent_streams", 4096),
    ("grpc.max_allowed_incoming_connections", open_files() // 4),
    ("grpc.server_handshake_timeout_ms", 30_000),
]


class ServiceServer:
    """A gRPC server that runs servicers until SIGTERM or SIGINT.

    Add servicers to `grpc` before `start`. Health is NOT_SERVING until `set_serving(True)`.

    Args:
        settings: Address, ports and drain time.
        service_names: Full names, such as `fovea.api.v1.SamplerService`; health and reflection answer for each.
        begins_traces: Whether calls without a trace begin one. True only at the entry of the platform.
        translate: Returns the error that a caller receives for a given error.
        options: gRPC core options that override `SERVER_OPTIONS`.
        bounds: Interceptors between the error interceptor and the servicers. FoveaErrors from them become statuses.

    Attributes:
        is_serving: Whether health checks report SERVING, except while it stops.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        service_names: Sequence[str],
        begins_traces: bool = False,
        translate: Callable[[FoveaError], FoveaError] = lambda error: error,
        options: Mapping[str, int] = MappingProxyType({}),
        bounds: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._settings = settings
        self._names = ["", *service_names]
        self._stop = asyncio.Event()
        self.is_serving = False
        self._metrics_port: int | None = None
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor(begins_traces, translate), *bounds]
        if settings.internal and (known := credentials.service_secret()):
            interceptors.insert(0, SecretInterceptor(known))
        self.grpc = grpc.aio.server(
            interceptors=interceptors, options=list({**dict(SERVER_OPTIONS), **options}.items())
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if settings.internal:
            log = LogServicer(redactor_of(settings.model_dump(mode="json")))
            logs_pb2_grpc.add_LogServiceServicer_to_server(log, self.grpc)
        if settings.reflection:
            names = [
                *service_names,
                *([LOG_SERVICE] if settings.internal else []),
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            ]
            reflection.enable_server_reflection(names, self.grpc)
        self._probes: grpc.aio.Server | None = None
        self.port = self.health_port = 0

    @property
    def address(self) -> str:
        """host:port that clients connect to; known after `start`."""
        return f"{self._settings.host}:{self.port}"

    async def start(self) -> None:
        """Binds the port and starts to listen. Raises RuntimeError if the port is in use."""
        address = f"{self._settings.host}:{self._settings.port}"
        certificates = credentials.certificates() if self._settings.internal else None
        if certificates:
            self.port = self.grpc.add_secure_port(address, certificates.for_server())
        else:
            self.port = self.grpc.add_insecure_port(address)
        await self._publish(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.start()
        await self._answer_probes()
        # Start tracing only now: vLLM forks earlier, and the exporter has threads.
        tracing.configure(_trace_name(self._names), self._settings.trace_endpoint, self.address)
        if self._settings.metrics_port is not None:
            try:
                shown, _ = start_http_server(self._settings.metrics_port, self._settings.host)
            except OSError as error:
                raise OSError(error.errno, f"metrics port {self._settings.metrics_port}: {error.strerror}") from error
            self._metrics_port = shown.server_port
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        metrics = f", metrics on {self._settings.host}:{self._metrics_port}" if self._metrics_port else ""
        logger.info("listening on %s%s%s", self.address, " with mutual TLS" if certificates else "", metrics)

    async def _answer_probes(self) -> None:
        """Serves health checks in plain text on a port of their own, because a kubelet has no certificate."""
        if self._settings.health_port is not None:
            self._probes = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
            self.health_port = self._probes.add_insecure_port(f"{self._settings.host}:{self._settings.health_port}")
            await self._probes.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets the result of health checks: whether this service accepts requests."""
        if serving != self.is_serving:
            logger.info("serving" if serving else "not serving")
        self.is_serving = serving
        status = health_pb2.HealthCheckResponse
        await self._publish(status.SERVING if serving else status.NOT_SERVING)

    def request_stop(self) -> None:
        """Makes `run_until_stopped` drain and return, as SIGTERM does."""
        self._stop.set()

    async def run_until_stopped(self) -> None:
        """Waits for a stop, then rejects new calls and gives calls in flight `drain_s` seconds to finish."""
        await self._stop.wait()
        logger.info("stopping; calls in flight have up to %.0f s to finish", self._settings.drain_s)
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(self._settings.drain_s)
        if self._probes is not None:
            await self._probes.stop(None)
        logger.info("stopped")

    async def _publish(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for name in self._names:
            await self._health.set(name, status)


def _trace_name(service_names: Sequence[str]) -> str:
    """Returns `fovea-sampler` for `fovea.api.v1.SamplerService`."""
    return f"fovea-{service_names[-1].rpartition('.')[2].removesuffix('Service').lower()}"


class LogServicer(logs_pb2_grpc.LogServiceServicer):
    """Shows the newest log lines of this process.

    Args:
        redactor: Removes secrets.
        ring: The lines.
    """

    def __init__(self, redactor: Redactor, ring: LogRing = RECENT) -> None:
        self._redactor, self._ring = redactor, ring

    async def ReadLog(  # noqa: N802 - gRPC names the methods
        self, request: logs_pb2.ReadLogRequest, context: Context
    ) -> logs_pb2.ReadLogResponse:
        """Implements `ReadLog` of logs.proto."""
        most = min(max(request.most, 1), MOST_LINES)
        asked = self._redactor.text, request.least_level, request.text, most
        found = await asyncio.to_thread(self._ring.newest, *asked)
        return logs_pb2.ReadLogResponse(
            lines=[logs_pb2.LogLine(at=line.at, level=line.level, text=line.text) for line in found]
        )


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that turns FoveaErrors into gRPC statuses, and other exceptions into INTERNAL with a request id.

    The text of other exceptions never reaches the caller, because it may contain paths or secrets. The log has it under
    the request id.

    Args:
        begins_traces: Whether a call without a `traceparent` begins a trace. A call with one continues the caller's
            trace.
        translate: Returns the error that the caller receives for a given error.
    """

    def __init__(self, begins_traces: bool = False, translate: _Translate = lambda error: error) -> None:
        self._begins_traces, self._translate = begins_traces, translate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method.startswith(_UNTOUCHED):
            return handler
        # grpc's type stubs describe the threaded server; the asyncio server passes the same object with coroutines in
        # it.
        untyped: Any = handler
        kind = _KINDS[handler.request_streaming, handler.response_streaming]
        guard = _guard_stream if handler.response_streaming else _guard_unary
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded: grpc.RpcMethodHandler = make(
            guard(method, getattr(untyped, kind), self._begins_traces, self._translate),
            untyped.request_deserializer,
            untyped.response_serializer,
        )
        return guarded


def _guard_unary(
    method: str, inner: Callable[[Any, Context], Awaitable[Any]], begins_traces: bool, translate: _Translate
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def behavior(request: Any, context: Context) -> Any:
        async with _Call(method, context, translate):
            with _span(method, context, begins_traces):
                return await inner(request, context)

    return behavior


def _guard_stream(
    method: str, inner: Callable[[Any, Context], AsyncIterator[Any]], begins_traces: bool, translate: _Translate
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def behavior(request: Any, context: Context) -> AsyncIterator[Any]:
        async with _Call(method, context, translate):
            with _span(method, context, begins_traces):
                async for response in inner(request, context):
                    yield response

    return behavior


def _span(method: str, context: Context, begins_traces: bool) -> AbstractContextManager[None]:
    """Returns the span of a call. Health checks, which are frequent, have none."""
    metadata: Any = context.invocation_metadata()
    parent = tracing.incoming(metadata)
    return tracing.span(method.lstrip("/"), parent) if parent or begins_traces else nullcontext()


class _Call:
    """One call: measures and counts it, and sets its status."""

    def __init__(self, method: str, context: Context, translate: _Translate) -> None:
        self._method = method.rsplit("/", 1)[-1]
        self._context, self._translate = context, translate

    async def __aenter__(self) -> None:
        self._start = time.perf_counter()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        code, reason = grpc.StatusCode.OK, ""
        try:
            if error is None:
                return
            if isinstance(error, asyncio.CancelledError | GeneratorExit):
                code, reason = grpc.StatusCode.CANCELLED, "CANCELLED"
                return
            if isinstance(error, grpc.aio.AbortError):
                code, reason = grpc.StatusCode.UNKNOWN, "UNKNOWN"
                return
            known = error if isinstance(error, FoveaError) else self._unmapped(error)
            code, reason = known.code, known.reason
            context: Any = self._context
            await context.abort_with_status(rpc_status.to_status(to_status(self._translate(known))))
        finally:
            CALLS.labels(self._method, code.name).inc()
            if reason:
                ERRORS.labels(self._method, reason).inc()
            CALL_SECONDS.labels(self._method).observe(time.perf_counter() - self._start)

    def _unmapped(self, error: BaseException) -> FoveaError:
        request_id = uuid.uuid4().hex[:12]
        logger.error("%s failed, request %s", self._method, request_id, exc_info=error)
        return Internal(f"internal error in {self._method}; see request {request_id} in the service's log")


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that rejects calls without the secret, with UNAUTHENTICATED, before it reads their data.

    Health checks need no secret.

    Args:
        secret: The secret; not empty.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method: str = handler_call_details.method
        given = dict(handler_call_details.invocation_metadata or ()).get(credentials.SECRET_KEY, "")
        if method.startswith(_OPEN) or hmac.compare_digest(str(given).encode(), self._secret):
            return await continuation(handler_call_details)
        ERRORS.labels("refused", Unauthenticated.reason).inc()
        return self._refusal


async def _refuse(_: object, context: Any) -> None:
    error = Unauthenticated(
        "this service accepts only calls with its Fovea's secret; start the caller with the same "
        f"{credentials.SECRET_VARIABLE}"
    )
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
