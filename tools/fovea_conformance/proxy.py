"""A real HTTP proxy between SDK and server. It records requests, changes configuration flags and causes errors."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "upgrade"}
_UNREACHABLE_S = 0.5


@dataclass
class Exchange:
    """One request and its response. Times are from `time.monotonic`. Rules may change headers, body and query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    started_s: float
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    ended_s: float = 0.0
    query: str = ""

    @property
    def route(self) -> str:
        """The path after `/api/v1/`."""
        return self.path.partition("/api/v1/")[2]

    @property
    def held_s(self) -> float:
        """Seconds from request to response."""
        return self.ended_s - self.started_s

    def json(self) -> Any:
        """Returns the parsed body of the request."""
        return json.loads(self.body)

    def answer_json(self) -> Any:
        """Returns the parsed body of the response."""
        return json.loads(self.unpacked)

    @property
    def unpacked(self) -> bytes:
        """The body of the response, decompressed."""
        return httpx.Response(200, headers=self.answer_headers, content=self.answer).content


Rule = Callable[[Exchange], Response | None]


class Proxy:
    """Serves `url` inside its `with` block.

    Args:
        upstream: Base URL of the server.
        flags: Flags to override in the response of client/config; see `replace_config`.
        prefix: Base path of the proxy, such as `/x/y`.
        before: Called with each request. If it returns a Response, the proxy sends that instead of the request.
        after: Called with each finished exchange. If it returns a Response, that replaces the server's.
        replace_config: Whether to respond to both config endpoints with exactly `flags`, without the server.
    """

    def __init__(
        self,
        upstream: str,
        flags: dict[str, Any] | None = None,
        prefix: str = "",
        before: Rule | None = None,
        after: Rule | None = None,
        replace_config: bool = False,
    ) -> None:
        self._upstream, self._flags, self._prefix = upstream.rstrip("/"), flags or {}, prefix
        self._before, self._after, self._replace_config = before, after, replace_config
        self.exchanges: list[Exchange] = []
        self.url = ""
        self._client: httpx.AsyncClient | None = None
        routes = [Route("/{path:path}", self._serve, methods=["GET", "POST", "PUT", "DELETE"])]
        config = uvicorn.Config(
            Starlette(routes=routes), host="127.0.0.1", port=0, lifespan="off", ws="none",
            timeout_graceful_shutdown=1, backlog=4096, log_level="error", log_config=None,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True, name="conformance proxy")

    def __enter__(self) -> "Proxy":
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the proxy did not start")
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}{self._prefix}"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = self._server.force_exit = True  # do not wait for long polls
        self._thread.join(10)

    def of(self, route: str) -> Iterator[Exchange]:
        """Yields the exchanges of one route, such as `asample`, in order of arrival."""
        return (exchange for exchange in list(self.exchanges) if exchange.route == route)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            asyncio.run(self._server.serve())

    async def _serve(self, request: Request) -> Response:
        if not request.url.path.startswith(self._prefix):
            return Response(f"nothing is served outside {self._prefix}", status_code=404)
        path = request.url.path.removeprefix(self._prefix)
        headers = {name.lower(): value for name, value in request.headers.items()}
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response("the client left", status_code=499)
        exchange = Exchange(request.method, path, headers, body, time.monotonic(), query=request.url.query)
        self.exchanges.append(exchange)
        try:
            response = await self._answer(request, exchange)
        except asyncio.CancelledError:  # the proxy ends during a long poll, of which no client awaits the response
            return Response("the proxy has ended", status_code=503)
        exchange.status, exchange.ended_s = response.status_code, time.monotonic()
        exchange.answer, exchange.answer_headers = bytes(response.body), dict(response.headers)
        return response

    async def _answer(self, request: Request, exchange: Exchange) -> Response:
        is_config = exchange.route in ("client/config", "client/dynamic_config")
        if is_config and self._replace_config:
            return Response(json.dumps(self._flags), media_type="application/json")
        if self._before and (given := await asyncio.to_thread(self._before, exchange)) is not None:
            return given
        response = await self._forward(request, exchange)
        if exchange.route == "client/config" and response.status_code == 200:
            merged = json.loads(bytes(response.body)) | self._flags
            response = Response(json.dumps(merged), media_type="application/json")
        exchange.status, exchange.answer = response.status_code, bytes(response.body)
        exchange.answer_headers = dict(response.headers)
        if self._after and (given := await asyncio.to_thread(self._after, exchange)) is not None:
            return given
        return response

    async def _forward(self, request: Request, exchange: Exchange) -> Response:
        if self._client is None:
            limits = httpx.Limits(max_connections=None)
            self._client = httpx.AsyncClient(timeout=120, limits=limits)
        headers = {name: value for name, value in exchange.headers.items() if name not in _HOP_BY_HOP}
        url = self._upstream + exchange.path + (f"?{exchange.query}" if exchange.query else "")
        sent = self._client.build_request(exchange.method, url, headers=headers, content=exchange.body)
        try:
            answer = await self._client.send(sent, stream=True)
            # Raw bytes, so that a compressed response stays compressed.
            raw = b"".join([piece async for piece in answer.aiter_raw()])
        except httpx.TransportError as error:
            # Clients repeat a request at once after a 502. The pause spares a server that restarts.
            await asyncio.sleep(_UNREACHABLE_S)
            return Response(f"the server cannot be reached: {error!r}", status_code=502)
        await answer.aclose()
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
        return Response(raw, status_code=answer.status_code, headers=kept)
