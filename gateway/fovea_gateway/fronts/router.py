"""`python -m fovea_gateway.fronts.router --database-url postgresql://...`: the front of gateways with shards.

A router keeps no state, and several may run. Every id begins with its session, and the session names its shard. A
request goes to the gateway that owns the shard; a request without an id to any gateway; a new session to the gateway
with the fewest. The requests of a shard without a gateway wait until another gateway owns it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ClassVar, cast

import aiohttp
import grpc
import uvicorn
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from multidict import CIMultiDict
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

from fovea.api.v1 import admin_pb2, gateway_pb2
from fovea.client.channel import OPTIONS
from fovea.runtime.processes import configure_logging
from fovea.runtime.server import ServiceServer, open_files
from fovea.runtime.settings import ServiceSettings
from fovea.runtime.tasks import BackgroundTasks, repeat
from fovea.wire.conventions import ADMIN_SERVICE, GATEWAY_SERVICE
from fovea.wire.errors import STATUS_DETAILS, FoveaError, Unavailable
from fovea_gateway.database.ownership import Directory, ShardOwner, shard_of
from fovea_gateway.fronts.routed_streams import (
    JsonSearch,
    ProtobufSearch,
    Room,
    RoutedBody,
    arriving,
    chained,
    merge,
    merged_events,
    until_gone,
)
from fovea_gateway.http.connections import Connection, Connections, RestServer, listen
from fovea_gateway.http.endpoint import SHARD, TINKER, Json, error_response

logger = logging.getLogger(__name__)

LOOK_S, _AGAIN_S, _PATIENCE_S, _CONNECT_S = 0.25, 0.1, 30.0, 2.0
"""Seconds between two reads of the owners, between two attempts, until a request is refused, and for a connection."""
_ROOM_BYTES, _EVENT_BYTES, _WHOLE_BYTES = 4 * 2**30, 2**24, 2**16
_HOPS = set(b"connection keep-alive transfer-encoding te trailer upgrade proxy-connection expect".split())
_METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (gateway_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class RouterSettings(ServiceSettings):
    """The router of gateways that share the sessions."""

    model_config = SettingsConfigDict(
        env_prefix="FOVEA_GATEWAY_", cli_prog_name="python -m fovea_gateway.fronts.router"
    )
    internal: ClassVar[bool] = False  # clients bring keys

    port: int = Field(8000, ge=0, le=65535, description="REST port; 0 selects a free one.")
    grpc_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 selects a free one.")
    base_path: str = Field("", description="Prefix of all REST paths, the same as the gateways'.")
    database_url: str = Field(description="The gateways' PostgreSQL.")
    max_body_bytes: int = Field(128 * 2**20, gt=0, description="The largest body, as in the gateways.")
    max_connections: int = Field(16_384, gt=0, description="Limit of concurrent REST connections.")
    request_timeout_s: float = Field(30.0, gt=0, description="Seconds in which the head of a request must arrive.")


class RestRouter:
    """The ASGI application that passes REST requests on."""

    def __init__(self, directory: Directory, settings: RouterSettings, http: aiohttp.ClientSession) -> None:
        self._directory, self._settings, self._http = directory, settings, http
        self._prefix = f"{settings.base_path.rstrip('/')}{TINKER.prefix}"
        self._room = Room(_ROOM_BYTES)
        self.closing = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, receive)
        response: Response | None = None
        try:
            if scope["path"] == f"{self._prefix}healthz":
                response = Json({"status": "ok"})
            elif self._is_of_all(request):
                async with AsyncExitStack() as stack:
                    response = await self._ask_all(request, stack)
            else:
                await self._route(request, send)
        except FoveaError as error:
            response = error_response(error)
        except ClientDisconnect:
            return
        if response is not None:
            await response(scope, receive, send)

    def _is_of_all(self, request: Request) -> bool:
        """Returns whether each gateway knows a part of the answer."""
        path, source = request.scope["path"].removeprefix(self._prefix), request.query_params.get("source", "")
        return path == "live/events" or (path == "live/samples" and shard_of(source) is None)

    async def _route(self, request: Request, send: Send) -> None:
        is_read = asyncio.Event()
        is_packed = request.headers.get("content-encoding") == "zstd"
        with RoutedBody(arriving(request, is_read), is_packed, self._settings.max_body_bytes, self._room) as body:
            work = asyncio.create_task(self._pass_on(request, body, send), name="route")
            watch = asyncio.create_task(until_gone(request, is_read), name="client")
            try:
                await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    await work
            finally:
                for task in (work, watch):
                    task.cancel()
                await asyncio.gather(work, watch, return_exceptions=True)

    async def _pass_on(self, request: Request, body: RoutedBody, send: Send) -> None:
        path = request.scope["path"].removeprefix(self._prefix)
        is_sought = path.startswith("live/pictures/")
        shards = self._directory.shards if is_sought else [await self._shard(request, path, body)]
        for number, shard in enumerate(shards, 1):
            async with AsyncExitStack() as stack:
                answer = await self._ask(stack, request, body, shard)
                if answer.status != 404 or number == len(shards):
                    await _send_answer(answer, send)
                    return

    async def _shard(self, request: Request, path: str, body: RoutedBody) -> int | None:
        """Returns the shard that a request belongs to; None if any gateway can answer it."""
        if (named := shard_of(path) if path != request.scope["path"] else None) is not None:
            return named
        if path.startswith(("uploads/", "external_weights_upload")):
            return 0
        if path == "live/samples":
            return shard_of(request.query_params.get("source", ""))
        if path == request.scope["path"] or request.method not in ("POST", "PUT"):
            return None
        if path == "create_session":
            return self._directory.place()
        return await body.find(ProtobufSearch() if path == "forward_backward" else JsonSearch())

    async def _ask(
        self, stack: AsyncExitStack, request: Request, body: RoutedBody, shard: int | None
    ) -> aiohttp.ClientResponse:
        """Sends a request to the owner of a shard. Waits while nothing listens there. Raises Unavailable."""
        give_up_at = time.monotonic() + _PATIENCE_S
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        headers = _headers(request)
        path = f"{request.scope['raw_path'].decode()}?{request.scope['query_string'].decode()}".rstrip("?")
        while True:
            owner = await self._directory.owner(shard)
            headers[SHARD] = str(owner.shard)
            sent = self._http.request(
                request.method, URL(f"http://{owner.rest}{path}", encoded=True), headers=headers,
                data=body.pieces() if has_body else None, allow_redirects=False,
            )  # fmt: skip
            try:
                return await stack.enter_async_context(sent)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                if time.monotonic() > give_up_at:
                    raise Unavailable(f"no gateway owns shard {owner.shard} now: send this request again") from None
                await asyncio.sleep(_AGAIN_S)
            except aiohttp.ClientError:
                raise Unavailable("the gateway closed the connection: send this request again") from None

    async def _ask_all(self, request: Request, stack: AsyncExitStack) -> Response:
        """Merges the answers of all gateways: events of the page, or samples of a base model."""
        headers = _headers(request)
        headers.popall("accept-encoding", None)
        path, answers = f"{request.scope['path']}?{request.url.query}".rstrip("?"), []
        try:
            for owner in await self._directory.all():
                url = URL(f"http://{owner.rest}{path}", encoded=True)
                asked = self._http.get(url, headers=headers, read_bufsize=_EVENT_BYTES)
                answers.append(await stack.enter_async_context(asked))
            for answer in answers:
                if answer.status != 200:
                    return Response(await answer.read(), answer.status, media_type=answer.content_type)
            if not path.startswith(f"{self._prefix}live/events"):
                return Json(merge([await answer.json() for answer in answers]))
        except aiohttp.ClientError:
            raise Unavailable("a gateway does not answer: open the page again in a second") from None
        kept = {name: answers[0].headers[name] for name in ("cache-control", "x-accel-buffering")}
        return StreamingResponse(self._until_over(stack.pop_all(), answers), 200, kept, "text/event-stream")

    async def _until_over(self, stack: AsyncExitStack, answers: list[aiohttp.ClientResponse]) -> AsyncIterator[str]:
        async with stack:
            async for text in merged_events([answer.content for answer in answers], self.closing):
                yield text


def _kept(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in _HOPS]


def _headers(request: Request) -> CIMultiDict[str]:
    return CIMultiDict((name.decode(), value.decode("latin-1")) for name, value in _kept(request.headers.raw))


async def _send_answer(answer: aiohttp.ClientResponse, send: Send) -> None:
    """Passes an answer on: a small one whole, others as they arrive."""
    headers = _kept(list(answer.raw_headers))
    start = {"type": "http.response.start", "status": answer.status, "headers": headers}
    if 0 <= (answer.content_length if answer.content_length is not None else -1) <= _WHOLE_BYTES:
        try:
            whole = await answer.read()
        except aiohttp.ClientError:
            raise Unavailable("the gateway closed the connection: send this request again") from None
        await send(start)
        await send({"type": "http.response.body", "body": whole})
        return
    await send(start)
    async for piece in answer.content.iter_any():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class GrpcRouter(grpc.GenericRpcHandler):
    """A handler that passes gRPC calls on as bytes."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._channels: dict[str, grpc.aio.Channel] = {}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Returns the handler of a method of the gateways."""
        if details.method not in _METHODS:
            return None
        behavior: Any = partial(self._upload if details.method.endswith("/UploadImage") else self._call, details.method)
        return grpc.stream_stream_rpc_method_handler(behavior)

    async def close(self) -> None:
        """Closes the connections to the gateways."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def _call(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        first = await anext(requests, None)
        shard = self._shard(method, context, first or b"")
        give_up_at = time.monotonic() + _PATIENCE_S
        has_answered, may_repeat = False, not _METHODS[method].client_streaming
        rest = None if may_repeat else requests
        while True:
            owner = await self._directory.owner(shard)
            call = self._channel(owner).stream_stream(method)(
                chained(first, rest), timeout=context.time_remaining(), metadata=_metadata(context, owner)
            )
            try:
                async for answer in call:
                    has_answered = True
                    yield answer
                return
            except grpc.aio.AioRpcError as error:
                is_gone = error.code() is grpc.StatusCode.UNAVAILABLE and not _is_from_gateway(error)
                if not is_gone or has_answered or not may_repeat or time.monotonic() > give_up_at:
                    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()
            await asyncio.sleep(_AGAIN_S)

    async def _upload(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Sends an image to all gateways, since a session of any of them may use it."""
        owners = await self._directory.all()
        calls = [self._channel(one).stream_unary(method)(metadata=_metadata(context, one)) for one in owners]
        try:
            async for piece in requests:
                for call in calls:
                    await call.write(piece)
            for call in calls:
                await call.done_writing()
            answers = [await call for call in calls]
            yield answers[0]
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for call in calls:
                if call.done() and await call.code() is not grpc.StatusCode.OK:
                    await context.abort(await call.code(), await call.details(), await call.trailing_metadata())
            raise
        finally:
            for call in calls:
                call.cancel()

    def _shard(self, method: str, context: Any, first: bytes) -> int | None:
        try:
            message: Any = GetMessageClass(_METHODS[method].input_type).FromString(first)
        except DecodeError:
            return None
        if method.endswith("/CreateSession"):
            return self._directory.place()
        message = getattr(message, "header", message)
        names = ("session_id", "model_id", "sampling_session_id", "future_id")
        return next((shard_of(getattr(message, name)) for name in names if getattr(message, name, "")), None)

    def _channel(self, owner: ShardOwner) -> Any:  # grpc's type stubs want serializers; without them, bytes pass
        if owner.grpc not in self._channels:
            self._channels[owner.grpc] = grpc.aio.insecure_channel(owner.grpc, options=OPTIONS)
        return self._channels[owner.grpc]


def _metadata(context: Any, owner: ShardOwner) -> list[tuple[str, str | bytes]]:
    kept = (pair for pair in context.invocation_metadata() if not pair[0].startswith(("grpc-", "user-", SHARD)))
    return [*kept, (SHARD, str(owner.shard))]


def _is_from_gateway(error: grpc.aio.AioRpcError) -> bool:
    return any(name == STATUS_DETAILS for name, _ in cast(Any, error.trailing_metadata() or ()))


class Router:
    """One router. `run` serves until a signal or `stop`; `rest_port` is known once it listens."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings, self._directory = settings, Directory(settings.database_url)
        self.rest_port = 0
        self.grpc = ServiceServer(
            settings.model_copy(update={"port": settings.grpc_port}), [ADMIN_SERVICE, GATEWAY_SERVICE]
        )
        self._calls = GrpcRouter(self._directory)
        self.grpc.grpc.add_generic_rpc_handlers((self._calls,))

    @property
    def shard_count(self) -> int:
        """The number of shards that have had a gateway."""
        return len(self._directory.shards)

    async def run(self) -> None:
        """Serves until it is stopped. Raises OSError if a port is in use."""
        background, settings = BackgroundTasks(), self._settings
        listener = listen(settings.host, settings.port)
        self.rest_port = listener.getsockname()[1]
        background.start(repeat(self._look, LOOK_S, "reading the owners of shards"), "owners of shards")
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
        ) as http:
            app = RestRouter(self._directory, settings, http)
            connections = Connections(min(settings.max_connections, open_files() // 4), settings.request_timeout_s)
            config = uvicorn.Config(
                app, http=partial(Connection, connections=connections), ws="none",  # type: ignore[arg-type]
                log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75,
                timeout_graceful_shutdown=int(settings.drain_s) + 1, backlog=4096,
            )  # fmt: skip
            server = RestServer(config)
            await self.grpc.start()
            serving = asyncio.create_task(server.serve([listener]), name="rest")
            logger.info("REST on http://%s:%d%s", settings.host, self.rest_port, settings.base_path)
            await self.grpc.run_until_stopped()
            app.closing.set()
            server.stop_soon()
            await serving
            await self._calls.close()
        await background.cancel()
        await self._directory.close()

    async def _look(self) -> None:
        await self._directory.look()
        await self.grpc.set_serving(self._directory.is_served)

    def stop(self) -> None:
        """Ends `run` once the requests in progress are answered."""
        self.grpc.request_stop()


def main() -> None:
    """Runs a router until SIGTERM or SIGINT."""
    settings = RouterSettings.from_command_line("python -m fovea_gateway.fronts.router")
    configure_logging("router", settings.log_level)

    async def run() -> None:
        await Router(settings).run()

    try:
        asyncio.run(run())
    except (FoveaError, OSError) as error:
        raise SystemExit(f"router: {error}") from None


if __name__ == "__main__":
    main()
