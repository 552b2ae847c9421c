"""The steps that every REST request passes through.

They are: the check that the gateway is ready, rate limiting of bulk requests, authentication, the request id,
conversion of errors to responses, metrics, and compression.
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
from datetime import UTC, datetime
from typing import Any, Protocol

import zstandard
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from fovea.runtime import tracing
from fovea.wire.conventions import is_token
from fovea.wire.errors import FoveaError, Internal, InvalidInput, Unavailable, Unimplemented, forget_frames
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.access.api_keys import CALLER, SUBJECT, Caller, Scope
from fovea_gateway.access.audit_log import EVENTS, OK, SINGLE, VALUES, Action, AuditLog, check_event, encode
from fovea_gateway.access.owners import Quota
from fovea_gateway.http.request_body import INT64_MAX, Incoming

logger = logging.getLogger(__name__)

Handler = Callable[[Request, str], Awaitable[Response]]
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
_UNTIMED = ("retrieve_future", "retrieve_futures")
_PAGE = tuple(
    f"live/{name}" for name in ("events", "curves/{run}", "samples", "datums", "system", "logs", "pictures/{digest}")
)
_UNCOUNTED = (*_UNTIMED, "session_heartbeat", "telemetry", "client/dynamic_config")
"""Requests that clients repeat automatically and never give up; no rate limit counts them."""
_CLIENT_GONE = "CLIENT_GONE"
SESSION_COOKIE, PAGE_HEADER = "fovea_session", "x-fovea-page"
_PROCESS = os.urandom(3).hex()
_NUMBERS = itertools.count(1)
_PER_TURN = 8
_BULK = ("/retrieve_future", "/retrieve_futures", "/asample")
_DIGITS = 20
_MOST_QUERY_BYTES = 4096
"""Far more than any client sends. Parsing a 64 KiB query string takes 20 ms."""
# Fast levels: token ids shrink to half, and log-probabilities hardly shrink at any level.
_ZSTD_LEVEL = 1
_GZIP_LEVEL = 1


class Json(Response):
    """A JSON response. NaN and infinity are written as the literals that Python and the SDK read."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def error_response(error: FoveaError) -> Response:
    """Returns an error as a status and a JSON body, which is never empty."""
    body: dict[str, Any] = {
        "detail": error.message,
        "reason": error.reason,
        "category": error.category,
        "request_id": REQUEST_ID.get(),
    }
    if error.field:
        body["field"] = error.field
    # The header makes the SDK exchange its credential for a new token.
    headers = {"WWW-Authenticate": 'Bearer error="invalid_token"'} if error.http_status == 401 else None
    return Json(body, status_code=error.http_status, headers=headers)


@dataclass(frozen=True)
class Api:
    """An API with its own path prefix and error format."""

    prefix: str
    answer_error: Callable[[FoveaError], Response]


TINKER = Api("/api/v1/", error_response)


def key_of(request: Request) -> str | None:
    """Returns the API key of a request: X-API-Key, the bearer token that OpenAI's clients send, or the page's cookie.

    The cookie counts only beside a header that pages of other sites cannot send.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else None)
    return given or (request.cookies.get(SESSION_COOKIE) if PAGE_HEADER in request.headers else None)


def _addresses(request: Request) -> list[str]:
    return [value for name in ("host", "origin") for value in request.headers.getlist(name)]


SHARD = "x-fovea-shard"
"""The header, or the gRPC metadata, by which a router names the shard that it expects at a gateway."""


@dataclass
class Readiness:
    """The shard that a gateway owns; None until it owns one and has restored its state."""

    shard: int | None = None

    def problem(self, named: str | None) -> FoveaError | None:
        """Returns the error, which clients retry, for a request that the gateway cannot serve now.

        Args:
            named: The shard that a router expects here. A restarted gateway may own another one, while routers still
                have the report of the earlier process.
        """
        if self.shard is None:
            words = "this gateway is waiting for the previous one to exit"
        elif named not in (None, str(self.shard)):
            words = "this gateway now owns another shard"
        else:
            return None
        return Unavailable(f"{words}: send this request again in a second")


class ReadyMiddleware:
    """Middleware that refuses requests that the gateway cannot serve now, with an error that clients retry. Health
    checks pass.

    Args:
        base_path: The path below which the API lies, without a slash at the end.
    """

    def __init__(self, app: ASGIApp, ready: Readiness, base_path: str) -> None:
        self._app, self._ready, self._alive_path = app, ready, f"{base_path}{TINKER.prefix}healthz"

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        is_refused = scope["type"] == "http" and scope["path"] != self._alive_path
        if is_refused and (error := self._ready.problem(Headers(scope=scope).get(SHARD))):
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class BurstLimiter:
    """A limiter that lets a few tasks pass per iteration of the event loop, first come, first served.

    It limits requests that clients send by the thousand, so that all other requests are answered in between. The event
    loop runs all ready callbacks before it polls the network again, and two thousand polls that arrive or end together
    would delay an unrelated request by a second.
    """

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Waits for the caller's turn; returns at once unless there are many callers."""
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
    """Middleware that sends bulk requests through the limiter before any work is done for them."""

    def __init__(self, app: ASGIApp, limiter: BurstLimiter) -> None:
        self._app, self._limiter = app, limiter

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith(_BULK):
            await self._limiter.enter()
        await self._app(scope, receive, send)


class Routes(Protocol):
    """A group of related handlers."""

    def routes(self, endpoints: "Endpoints") -> list[Route]: ...


class Endpoints:
    """A factory of routes from handlers.

    Args:
        identify: Returns the caller for an API key and the Host and Origin headers. Raises Unauthenticated,
            PermissionDenied.
        check_rate: Counts a request of an owner in a named bucket. Raises ResourceExhausted.
        prefix: The prefix of every path.
        memory: The memory quota, in bytes, for request bodies while their requests are answered.
        patience_s: Seconds to wait for a body to begin.
        on_refusal: Called for each request that ends with an error: with the owner (empty if unknown), the route and
            the error.
        translate: Converts an error into the one to send to the caller.
        audit: The log of the requests that change something.
        identify_exchange: Like `identify`, for routes that also accept the tokens of an OpenID Connect provider.
    """

    def __init__(
        self,
        identify: Callable[[str | None, list[str]], Caller],
        check_rate: Callable[[str, str], None],
        prefix: str,
        memory: Quota,
        patience_s: float,
        on_refusal: Callable[[str, str, FoveaError], None],
        translate: Callable[[FoveaError], FoveaError],
        audit: AuditLog,
        identify_exchange: Callable[[str], Awaitable[Caller]],
    ) -> None:
        self._identify, self._check_rate, self._prefix = identify, check_rate, prefix
        self._memory, self._patience_s, self._on_refusal = memory, patience_s, on_refusal
        self._translate, self._audit, self._identify_exchange = translate, audit, identify_exchange

    def route(
        self, method: str, path: str, handler: Handler, scope: Scope, api: Api = TINKER, exchanges: bool = False
    ) -> Route:
        """Returns a route that needs an API key with this scope; with `exchanges`, it also accepts ID tokens."""

        async def handle(request: Request) -> Response:
            # Authenticate before the first byte of the body is read.
            key = key_of(request)
            is_exchange = exchanges and key is not None and is_token(key)
            caller = (
                await self._identify_exchange(key or "") if is_exchange else self._identify(key, _addresses(request))
            )
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
        """Returns a route without API key: its handler authorizes the request.

        Raises Internal if the route changes something and the audit log has no event for it.
        """
        if method != "GET":
            check_event(f"{method} {path}")

        async def endpoint(request: Request) -> Response:
            return await self._answer(request, path, handle, api)

        return Route(f"{self._prefix}{api.prefix}{path}", endpoint, methods=[method])

    def open_route(self, path: str, answer: dict[str, Any]) -> Route:
        """Returns a public GET route with a fixed answer."""

        async def endpoint(request: Request) -> Response:
            return Json(answer)

        return Route(f"{self._prefix}/api/v1/{path}", endpoint, methods=["GET"])

    async def _answer(
        self, request: Request, route: str, handle: Callable[[Request], Awaitable[Response]], api: Api
    ) -> Response:
        REQUEST_ID.set(f"{_PROCESS}-{next(_NUMBERS)}")
        started = time.perf_counter()
        with tracing.span(f"{request.method} {route}", request.headers.get(tracing.HEADER, "")):
            response, outcome = await self._respond(request, route, handle, api)
            await self._note(f"{request.method} {route}", request, outcome)
            tracing.note(request_id=REQUEST_ID.get(), status=response.status_code)
            if traceparent := tracing.traceparent():
                response.headers[tracing.HEADER] = traceparent
        metrics.REQUESTS.labels(route, str(response.status_code)).inc()
        if route not in _UNTIMED:
            metrics.REQUEST_SECONDS.labels(route).observe(time.perf_counter() - started)
        return response

    async def _respond(
        self, request: Request, route: str, handle: Callable[[Request], Awaitable[Response]], api: Api
    ) -> tuple[Response, str]:
        """Returns the handler's response, or its error as a response; and the outcome for the audit log."""
        try:
            if (size := len(request.scope["query_string"])) > _MOST_QUERY_BYTES:
                raise InvalidInput(f"the query has {size} bytes; the limit is {_MOST_QUERY_BYTES}")
            return await handle(request), OK
        except FoveaError as error:
            words = (REQUEST_ID.get(), request.method, request.url.path, error.http_status, error.reason, error)
            logger.info("request %s, %s %s: %d %s: %s", *words)
            metrics.REQUEST_ERRORS.labels(route, error.reason).inc()
            told = self._translate(error)
            forget_frames(told)
            forget_frames(error)
            self._on_refusal(CALLER.get().owner, route, told)
            return api.answer_error(told), told.reason
        except ClientDisconnect:
            metrics.REQUEST_ERRORS.labels(route, _CLIENT_GONE).inc()
            return Response(status_code=499), _CLIENT_GONE
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            log_id = REQUEST_ID.get()
            metrics.REQUEST_ERRORS.labels(route, Internal.reason).inc()
            told = Internal(f"internal error; the details are in the gateway's log, under request {log_id}")
            return api.answer_error(told), told.reason

    async def _note(self, name: str, request: Request, outcome: str) -> None:
        """Enters a request in the audit log if it has an event and its key is known."""
        caller, event = CALLER.get(), EVENTS.get(name)
        if event is None or not caller.owner:
            return
        subject = SUBJECT.get() or "/".join(map(str, request.path_params.values()))
        await log_action(self._audit, Action(caller.owner, caller.key_id, event, name, subject, outcome))


async def log_action(audit: AuditLog, action: Action) -> None:
    """Writes an action of `SINGLE` to the audit log at once, and counts any other for the next flush."""
    if (action.event, action.outcome) in SINGLE:
        await audit.write(action._replace(new_values=encode(VALUES.get())))
    else:
        audit.pending[action] += 1


def paging(request: Request, limit: int, most: int) -> tuple[int, int]:
    """Returns limit (at most `most`) and offset of a query. Raises InvalidInput if they are not whole numbers."""
    return min(count_of(request, "limit", limit), most), count_of(request, "offset", 0)


def count_of(request: Request, name: str, default: int) -> int:
    """Returns a whole number from a query. Raises InvalidInput if it is not one."""
    text = request.query_params.get(name)
    if text is None:
        return default
    # At most 19 digits, as INT64_MAX has: Python refuses to parse thousands, and the database refuses a number of 20.
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS and int(text) <= INT64_MAX):
        raise InvalidInput(f"{name} is {text[:40]!r}; it must be a whole number, 0 .. {INT64_MAX}", field=name)
    return int(text)


def check_query(request: Request, *known: str) -> None:
    """Raises Unimplemented, which names the first query parameter that would be ignored."""
    for name in request.query_params:
        if name not in known:
            raise Unimplemented(f"{request.url.path} does not support the parameter {name}", field=name)


def iso_time(seconds: float) -> str:
    """Returns ISO 8601 with a UTC offset, because the CLI compares it with timezone-aware times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def accepted_encoding(accept_encoding: str) -> str | None:
    """Returns `zstd` or `gzip`, the first of them that the client accepts; None if it accepts neither."""
    accepted = {}
    for part in accept_encoding.split(","):
        name, _, quality = part.partition(";")
        accepted[name.strip().lower()] = quality.strip().lower()
    refused = {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return next((name for name in ("zstd", "gzip") if name in accepted and accepted[name] not in refused), None)


async def compress(response: Response, accept_encoding: str) -> Response:
    """Returns the response, compressed if the client accepts that."""
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
