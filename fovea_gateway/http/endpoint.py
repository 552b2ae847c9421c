"""What every REST request passes on its way to its handler and back: whether the gateway is ready, its turn among many
alike, who calls, a request id, errors as answers, a count, compression.
"""

import asyncio
import gzip
import itertools
import json
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, Internal, InvalidInput, Unavailable, Unimplemented
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.http.request_body import INT64_MAX, Incoming
from fovea_gateway.quotas import Quota
from fovea_gateway.scopes import CALLER, Caller, Scope

logger = logging.getLogger(__name__)

Handler = Callable[[Request, str], Awaitable[Response]]
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
_UNTIMED = ("retrieve_future", "retrieve_futures")
_PAGE = ("live/events", "live/curves/{run}", "live/samples", "live/pictures/{digest}")
_UNCOUNTED = (*_UNTIMED, "session_heartbeat", "telemetry", "client/dynamic_config")
"""What clients repeat by themselves, and never give up: it counts for no limit of requests."""
_PROCESS = os.urandom(3).hex()
_NUMBERS = itertools.count(1)
_ALIVE = "/healthz"
_PER_TURN = 8
_BULK = ("/retrieve_future", "/retrieve_futures", "/asample")
_DIGITS = 20
_MOST_QUERY_BYTES = 4096
"""Far above any that a client sends. To read 64 KiB of a stranger's takes 20 ms."""
# Fast levels: token ids halve, log-probabilities hardly shrink at any level.
_ZSTD_LEVEL = 1
_GZIP_LEVEL = 1


class Json(Response):
    """A JSON answer. NaN and infinity are written as Python reads them, which the SDK does."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
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


@dataclass(frozen=True)
class Api:
    """An API with paths of its own, and its own words for errors."""

    prefix: str
    answer_error: Callable[[FoveaError], Response]


TINKER = Api("/api/v1/", error_response)


def key_of(request: Request) -> str | None:
    """The API key that a request shows: X-API-Key, or the bearer token that OpenAI's clients send."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else None)


def _addresses(request: Request) -> list[str]:
    return [value for name in ("host", "origin") for value in request.headers.getlist(name)]


class ReadyMiddleware:
    """Refuses requests with what clients repeat until the gateway is ready. Health checks pass."""

    def __init__(self, app: ASGIApp, ready: asyncio.Event) -> None:
        self._app, self._ready = app, ready

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if self._ready.is_set() or scope["type"] != "http" or scope["path"].endswith(_ALIVE):
            await self._app(scope, receive, send)
        else:
            await error_response(not_ready())(scope, receive, send)


def not_ready() -> FoveaError:
    """What clients are told that come too early."""
    return Unavailable("this gateway takes over once the one before it has ended: send this again in a second")


class BurstLimiter:
    """Lets a few tasks pass in each turn of the event loop, first come first served.

    For what clients send by the thousand, so that everything else is answered in between: the event loop runs all that
    is ready before it looks at the network again, and two thousand polls that come or end together would keep an
    unrelated request waiting for a second.
    """

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns when it is the caller's turn: at once unless others are many."""
        loop = asyncio.get_running_loop()
        if self._waiting or self._passed >= self._per_turn:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        elif not self._passed:
            loop.call_soon(self._next_turn)
            self._passed = 1
        else:
            self._passed += 1

    def _next_turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._per_turn:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._next_turn)


class BurstMiddleware:
    """Sends bulk requests through the limiter, before anything is done for them."""

    def __init__(self, app: ASGIApp, limiter: BurstLimiter) -> None:
        self._app, self._limiter = app, limiter

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith(_BULK):
            await self._limiter.enter()
        await self._app(scope, receive, send)


class Routes(Protocol):
    """Handlers that belong together."""

    def routes(self, endpoints: "Endpoints") -> list[Route]: ...


class Endpoints:
    """Makes routes out of handlers.

    Args:
        identify: Finds the caller by its API key, the Host and the Origin. Raises Unauthenticated, PermissionDenied.
        check_rate: Counts a request of an owner for a use. Raises ResourceExhausted.
        prefix: In front of every path.
        memory: Bytes for what bodies bring, while their requests are answered.
        patience_s: Seconds that a body may take to begin.
        as_told: Makes of each error what the caller is told.
        on_refusal: Told of each request that ends with an error: the owner, empty if unknown, the route, the error.
    """

    def __init__(
        self,
        identify: Callable[[str | None, list[str]], Caller],
        check_rate: Callable[[str, str], None],
        prefix: str,
        memory: Quota,
        patience_s: float,
        on_refusal: Callable[[str, str, FoveaError], None],
        as_told: Callable[[FoveaError], FoveaError],
    ) -> None:
        self._identify, self._check_rate, self._prefix = identify, check_rate, prefix
        self._memory, self._patience_s, self._on_refusal = memory, patience_s, on_refusal
        self._as_told = as_told

    def route(self, method: str, path: str, handler: Handler, scope: Scope, api: Api = TINKER) -> Route:
        """A route whose caller must have a key of this scope."""

        async def handle(request: Request) -> Response:
            # Before the first byte of the body is read.
            caller = self._identify(key_of(request), _addresses(request))
            caller.require(scope, f"{method} {path}")
            if path not in _UNCOUNTED:
                self._check_rate(caller.owner, "page" if path in _PAGE else "")
            with self._memory.holding(caller.owner) as memory:
                request.state.incoming = Incoming(memory, self._patience_s)
                return await handler(request, caller.owner)

        return self.keyless_route(method, path, handle, api)

    def keyless_route(
        self, method: str, path: str, handle: Callable[[Request], Awaitable[Response]], api: Api = TINKER
    ) -> Route:
        """A route without a key: the handler itself decides whom it lets in."""

        async def endpoint(request: Request) -> Response:
            return await self._answer(request, path, handle, api)

        return Route(f"{self._prefix}{api.prefix}{path}", endpoint, methods=[method])

    def open_route(self, path: str, answer: dict[str, Any]) -> Route:
        """A GET route for anybody, with a fixed answer."""

        async def endpoint(request: Request) -> Response:
            return Json(answer)

        return Route(f"{self._prefix}/api/v1/{path}", endpoint, methods=["GET"])

    async def _answer(
        self, request: Request, route: str, handle: Callable[[Request], Awaitable[Response]], api: Api
    ) -> Response:
        REQUEST_ID.set(f"{_PROCESS}-{next(_NUMBERS)}")
        started = time.perf_counter()
        with tracing.span(f"{request.method} {route}", request.headers.get(tracing.HEADER, "")):
            response = await self._respond(request, route, handle, api)
            tracing.note(request_id=REQUEST_ID.get(), status=response.status_code)
            if traceparent := tracing.traceparent():
                response.headers[tracing.HEADER] = traceparent
        metrics.REQUESTS.labels(route, str(response.status_code)).inc()
        if route not in _UNTIMED:
            metrics.REQUEST_SECONDS.labels(route).observe(time.perf_counter() - started)
        return response

    async def _respond(
        self, request: Request, route: str, handle: Callable[[Request], Awaitable[Response]], api: Api
    ) -> Response:
        """What the handler answers, or what became of its error."""
        try:
            if (size := len(request.scope["query_string"])) > _MOST_QUERY_BYTES:
                raise InvalidInput(f"the query has {size} bytes; the limit is {_MOST_QUERY_BYTES}")
            return await handle(request)
        except FoveaError as error:
            words = (REQUEST_ID.get(), request.method, request.url.path, error.http_status, error.reason, error)
            logger.info("request %s, %s %s: %d %s: %s", *words)
            metrics.REQUEST_ERRORS.labels(route, error.reason).inc()
            told = self._as_told(error)
            self._on_refusal(CALLER.get().owner, route, told)
            return api.answer_error(told)
        except ClientDisconnect:
            metrics.REQUEST_ERRORS.labels(route, "CLIENT_GONE").inc()
            return Response(status_code=499)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            log_id = REQUEST_ID.get()
            metrics.REQUEST_ERRORS.labels(route, Internal.reason).inc()
            return api.answer_error(Internal(f"internal error; the gateway's log has it as request {log_id}"))


def paging(request: Request, limit: int, most: int) -> tuple[int, int]:
    """limit and offset of a query. Raises InvalidInput if they are no counts."""
    return min(count_of(request, "limit", limit), most), count_of(request, "offset", 0)


def count_of(request: Request, name: str, default: int) -> int:
    """A whole number of a query. Raises InvalidInput if it is none."""
    text = request.query_params.get(name)
    if text is None:
        return default
    # No longer than INT64_MAX is: Python refuses to read a number of thousands of digits, and the database one of 20.
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS and int(text) <= INT64_MAX):
        raise InvalidInput(f"{name} is {text[:40]!r}; it must be a whole number, 0 .. {INT64_MAX}", field=name)
    return int(text)


def check_query(request: Request, *known: str) -> None:
    """Raises Unimplemented that names a query parameter which would be ignored."""
    for name in request.query_params:
        if name not in known:
            raise Unimplemented(f"{request.url.path} does not take the parameter {name}", field=name)


def accepted_encoding(accept_encoding: str) -> str | None:
    """`zstd` or `gzip`, the first of them that a client reads; None if it reads neither."""
    accepted = {}
    for part in accept_encoding.split(","):
        name, _, quality = part.partition(";")
        accepted[name.strip().lower()] = quality.strip().lower()
    refused = {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return next((name for name in ("zstd", "gzip") if name in accepted and accepted[name] not in refused), None)


async def compress(response: Response, accept_encoding: str) -> Response:
    """The same answer, compressed if the client reads that."""
    encoding = accepted_encoding(accept_encoding)
    if encoding is None:
        return response
    body = await asyncio.to_thread(_compressed, bytes(response.body), encoding)
    headers = {"Content-Encoding": encoding, "Vary": "Accept-Encoding"}
    return Response(body, media_type=response.media_type, headers=headers)


def _compressed(body: bytes, encoding: str) -> bytes:
    if encoding == "zstd":
        return zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(body)
    return gzip.compress(body, _GZIP_LEVEL)
