"""What every REST handler gets around it: who calls, a request id, errors as answers, a count."""

import itertools
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, Internal
from gateway import instruments as metrics
from gateway.access.keyring import KeyRing
from gateway.access.quotas import Shares
from gateway.http.request_body import Incoming
from gateway.identity import Caller

logger = logging.getLogger(__name__)

Handler = Callable[[Request, Caller], Awaitable[Response]]
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
_UNTIMED = ("retrieve_future", "retrieve_futures")
_PROCESS = os.urandom(3).hex()
_NUMBERS = itertools.count(1)


class Json(Response):
    """A JSON answer. NaN and infinity are written as Python reads them, which the SDK does."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encodes."""
        return json.dumps(content, separators=(",", ":")).encode()


def error_response(error: FoveaError) -> Response:
    """An error as a status and a body; never an empty one."""
    body: dict[str, Any] = {
        "detail": error.message,
        "reason": error.reason,
        "category": error.category,
        "request_id": REQUEST_ID.get(),
    }
    if error.field:
        body["field"] = error.field
    return Json(body, status_code=error.http_status)


class Endpoints:
    """Makes routes out of handlers.

    Args:
        keys: Who is let in.
        prefix: In front of every path.
        memory: Bytes for what bodies bring, while their requests are answered.
        patience_s: Seconds that a body may take to begin.
    """

    def __init__(self, keys: KeyRing, prefix: str, memory: Shares, patience_s: float) -> None:
        self._keys = keys
        self._prefix = prefix
        self._memory, self._patience_s = memory, patience_s

    def route(self, method: str, path: str, handler: Handler) -> Route:
        """A route whose caller must have a key."""

        async def handle(request: Request) -> Response:
            # Before the first byte of the body is read.
            caller = self._keys.identify(request.headers.get("x-api-key"))
            with self._memory.holding(caller.owner) as memory:
                request.state.incoming = Incoming(memory, self._patience_s)
                return await handler(request, caller)

        return self.keyless_route(method, path, handle)

    def keyless_route(self, method: str, path: str, handle: Callable[[Request], Awaitable[Response]]) -> Route:
        """A route without a key: the handler itself decides whom it lets in."""

        async def endpoint(request: Request) -> Response:
            return await self._answer(request, path, handle)

        return Route(f"{self._prefix}/api/v1/{path}", endpoint, methods=[method])

    def open_route(self, path: str, answer: dict[str, Any]) -> Route:
        """A GET route for anybody, with a fixed answer."""

        async def endpoint(request: Request) -> Response:
            return Json(answer)

        return Route(f"{self._prefix}/api/v1/{path}", endpoint, methods=["GET"])

    async def _answer(self, request: Request, route: str, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        REQUEST_ID.set(f"{_PROCESS}-{next(_NUMBERS)}")
        started = time.perf_counter()
        with tracing.span(f"{request.method} {route}", request.headers.get(tracing.HEADER, "")):
            response = await self._respond(request, route, handle)
            tracing.note(request_id=REQUEST_ID.get(), status=response.status_code)
            if traceparent := tracing.traceparent():
                response.headers[tracing.HEADER] = traceparent
        metrics.REQUESTS.labels(route, str(response.status_code)).inc()
        if route not in _UNTIMED:
            metrics.REQUEST_SECONDS.labels(route).observe(time.perf_counter() - started)
        return response

    async def _respond(
        self, request: Request, route: str, handle: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """What the handler answers, or what became of its error."""
        try:
            return await handle(request)
        except FoveaError as error:
            words = (REQUEST_ID.get(), request.method, request.url.path, error.http_status, error.reason, error)
            logger.info("request %s, %s %s: %d %s: %s", *words)
            metrics.REQUEST_ERRORS.labels(route, error.reason).inc()
            return error_response(error)
        except ClientDisconnect:
            metrics.REQUEST_ERRORS.labels(route, "CLIENT_GONE").inc()
            return Response(status_code=499)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            log_id = REQUEST_ID.get()
            metrics.REQUEST_ERRORS.labels(route, Internal.reason).inc()
            return error_response(Internal(f"internal error; the gateway's log has it as request {log_id}"))
