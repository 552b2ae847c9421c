"""gRPC interceptor of all services: maps errors to statuses, counts and times calls, and continues traces."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc
from grpc_status import rpc_status
from prometheus_client import Counter, Histogram

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, Internal, to_status

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
