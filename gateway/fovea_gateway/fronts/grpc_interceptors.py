"""The checks that every gRPC call passes before its method runs: authentication, scope, and limits of size.

Sizes are checked on the encoded bytes, before a message is built from them.
"""

import asyncio
import logging
import os
import socket
import stat
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from fovea.api.v1 import gateway_pb2
from fovea.runtime.server import open_files
from fovea.wire.conventions import ADMIN_SERVICE, GATEWAY_SERVICE, MESSAGE_BYTES
from fovea.wire.errors import FoveaError, InvalidInput, PayloadTooLarge
from fovea_gateway.access.api_keys import SUBJECT, KeyRing, Scope
from fovea_gateway.access.audit_log import EVENTS, OK, Action, AuditLog, check_event
from fovea_gateway.access.owners import Owners, QuotaUse
from fovea_gateway.http.connections import client_of
from fovea_gateway.http.endpoint import SHARD, Readiness, log_action
from fovea_gateway.http.request_body import (
    ELEMENT_BYTES,
    SMALL_BYTES,
    SMALL_ELEMENTS,
    check_protobuf_elements,
    off_loop,
    subject_of,
)
from fovea_gateway.settings import GatewaySettings

_METHODS: Mapping[str, Mapping[Scope, tuple[str, ...]]] = {
    GATEWAY_SERVICE: {
        Scope.READ: ("GetCapabilities", "CreateSession", "Heartbeat", "FinishSession", "GetModel", "WaitFuture"),
        Scope.SAMPLE: ("UploadImage", "CreateSamplingSession", "SampleTokens"),
        Scope.TRAIN: (
            "SubmitCreateModel", "SubmitForwardBackward", "CreateCustomLoss", "SubmitOptimStep", "SubmitSaveState",
            "SubmitLoadState", "SubmitSaveForSampler", "SubmitSaveExternal",
        ),
    },
    ADMIN_SERVICE: {
        Scope.READ: ("GetUsage", "ListParkedSessions"),
        Scope.ADMIN: ("CreateKey", "ListKeys", "RevokeKey", "ExpireKey", "PutOwner", "ListOwners"),
    },
}  # fmt: skip
SCOPES: Mapping[str, Scope] = {
    f"/{service}/{name}": scope
    for service, methods in _METHODS.items()
    for scope, names in methods.items()
    for name in names
}
"""The scope that each method needs. A method that is not listed needs the highest."""

_UNCOUNTED = ("WaitFuture", "Heartbeat")
"""Calls that clients repeat automatically; no rate limit counts them."""
_PREFIXES = tuple(f"/{service}/" for service in _METHODS)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that refuses calls without a valid key, and calls that the gateway cannot serve now.

    This must be an interceptor. Since grpcio 1.84, methods that stubs register take precedence over a generic handler
    that was added before the services, so every call would pass, even without a key.

    Args:
        keys: The accepted keys.
        owners: The request rates of owners.
        ready: Knows which calls the gateway can serve now.
    """

    def __init__(self, keys: KeyRing, owners: Owners, ready: Readiness) -> None:
        self._keys, self._owners, self._ready = keys, owners, ready

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Returns a handler that refuses the call, or the next handler."""
        if error := self._problem(handler_call_details):
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, error))
        return await continuation(handler_call_details)

    def _problem(self, call: grpc.HandlerCallDetails) -> FoveaError | None:
        method: str = call.method
        if not method.startswith(_PREFIXES):
            return None
        metadata: Any = dict(call.invocation_metadata or ())
        if error := self._ready.problem(metadata.get(SHARD)):
            return error
        try:
            caller = self._keys.identify_call(call.invocation_metadata)
            name = method.rpartition("/")[2]
            caller.require(SCOPES.get(method, Scope.ADMIN), name)
            if name not in _UNCOUNTED:
                self._owners.check_rate(caller.owner)
        except FoveaError as error:
            return error
        return None


async def _refuse(error: FoveaError, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    raise error
    yield b""


logger = logging.getLogger(__name__)

MOST_CONNECTIONS = "grpc.max_allowed_incoming_connections"
_OPEN_FILES = "/proc/self/fd"
_TCP_INFO_BYTES = 60
_LAST_DATA = (44, 52)
"""The offsets in `tcp_info` of <linux/tcp.h> of the milliseconds since data was last sent, and last received."""
_IDLE_MS = 120_000
_KEEPALIVE_MS = 60_000
_KEEPALIVE_TIMEOUT_MS = 20_000
_BULK_ELEMENTS = 2**16
_BULK = ("CreateCustomLoss", "SampleTokens", "SubmitForwardBackward", "UploadImage")
"""Methods with messages that contain prompts, datums, images or graphs; the messages of all others are small."""


def channel_limits(settings: GatewaySettings) -> dict[str, int]:
    """Returns options of gRPC's core for untrusted connections.

    A connection without calls is closed after `_IDLE_MS`; gRPC clients open a new one with their next call. Pings
    detect a connection to a machine that is gone.
    """
    return {
        MOST_CONNECTIONS: min(settings.max_connections, open_files() // 4),
        "grpc.server_handshake_timeout_ms": int(settings.request_timeout_s * 1000),
        "grpc.max_connection_idle_ms": _IDLE_MS,
        "grpc.keepalive_time_ms": _KEEPALIVE_MS,
        "grpc.keepalive_timeout_ms": _KEEPALIVE_TIMEOUT_MS,
    }


class ConnectionShares:
    """The division of gRPC connections among client addresses, as `Connections` divides those of REST.

    gRPC's core limits the total number of connections, but not the number per client. Here each address may have at
    most as many as are still free; a single client may therefore have half. A sweep closes the connections above that,
    those that have been silent for longest first. To gRPC's core this looks as if the client had disconnected.

    Args:
        port: The port of the gRPC server.
        most: The total number of connections that gRPC's core allows.
    """

    def __init__(self, port: int, most: int) -> None:
        self._port, self._most = port, most

    async def sweep(self) -> None:
        """Closes the connections above each client's share."""
        if len(os.listdir(_OPEN_FILES)) > self._most // 2:  # otherwise no client can have more than are free
            await asyncio.to_thread(self._close_surplus)

    def _close_surplus(self) -> None:
        of_client: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for descriptor in map(int, os.listdir(_OPEN_FILES)):
            if found := self._look(descriptor):
                client, silent_ms = found
                of_client[client].append((silent_ms, descriptor))
        total = sum(map(len, of_client.values()))
        for client, own in sorted(of_client.items(), key=lambda each: len(each[1]), reverse=True):
            surplus = (len(own) + total - self._most + 1) // 2
            if surplus <= 0:
                return
            total -= surplus
            logger.warning("closed %d of %d gRPC connections from %s", surplus, len(own), client)
            for _, descriptor in sorted(own, reverse=True)[:surplus]:
                self._look(descriptor, unwanted=client)

    def _look(self, descriptor: int, unwanted: str = "") -> tuple[str, int] | None:
        """Returns the client of an open file that is a connection to the gRPC port, and for how many ms it has been
        silent.

        Closes the connection if its client is `unwanted`.
        """
        copy = _copied(descriptor)
        if copy is None:
            return None
        with copy, suppress(OSError):  # a listening socket, or a connection reset meanwhile
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == self._port:
                client = client_of(copy.getpeername())
                silent_ms = min(struct.unpack_from("=I", _tcp_info(copy), at)[0] for at in _LAST_DATA)
                if client == unwanted:
                    copy.shutdown(socket.SHUT_RDWR)
                return client, silent_ms
        return None


def _copied(descriptor: int) -> socket.socket | None:
    """Returns a duplicate of an open file if it is a socket, because its owner may close the original at any moment."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    if stat.S_ISSOCK(os.fstat(copy).st_mode):
        return socket.socket(fileno=copy)
    os.close(copy)
    return None


def _tcp_info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)


class BoundedMessages(grpc.aio.ServerInterceptor):
    """An interceptor that decodes messages only after their bytes and elements have been counted.

    An empty message within another takes two bytes on the wire and forty in memory: 4 MiB of them took 80 MB, and two
    seconds to decode.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        method: str = handler_call_details.method
        name = method.removeprefix(f"/{GATEWAY_SERVICE}/")
        if handler is None or handler.request_deserializer is None or name == method:
            return handler  # type: ignore[no-any-return]
        decode = _decoder(name)
        # Not in the deserializer: its exceptions do not become the statuses of our errors.
        if handler.request_streaming:
            bounded = _decoding_stream(handler.stream_unary, decode)
            return grpc.stream_unary_rpc_method_handler(bounded, None, handler.response_serializer)
        if handler.response_streaming:
            streaming = _streaming(handler.unary_stream, decode)
            return grpc.unary_stream_rpc_method_handler(streaming, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(
            _decoding(handler.unary_unary, decode), None, handler.response_serializer
        )


class AuditedCalls(grpc.aio.ServerInterceptor):
    """An interceptor that enters the calls that change something in the audit log.

    Raises Internal if a method has no event.
    """

    def __init__(self, keys: KeyRing, audit: AuditLog) -> None:
        self._keys, self._audit = keys, audit
        for method in SCOPES:
            check_event(method.rpartition("/")[2])

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        name = handler_call_details.method.rpartition("/")[2]
        if handler is None or handler_call_details.method not in SCOPES or name not in EVENTS:
            return handler  # type: ignore[no-any-return]
        types = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._noting(name, handler.stream_unary), *types)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._noting_stream(name, handler.unary_stream), *types)
        return grpc.unary_unary_rpc_method_handler(self._noting(name, handler.unary_unary), *types)

    def _noting(self, name: str, inner: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def behavior(request: Any, context: Any) -> Any:
            async with self._entry(name, request, context):
                return await inner(request, context)

        return behavior

    def _noting_stream(
        self, name: str, inner: Callable[[Any, Any], AsyncIterator[Any]]
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def behavior(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._entry(name, request, context):
                async for response in inner(request, context):
                    yield response

        return behavior

    @asynccontextmanager
    async def _entry(self, name: str, request: Any, context: Any) -> AsyncIterator[None]:
        """Enters a call in the log when it ends."""
        caller, event, outcome = self._keys.identify_call(context.invocation_metadata()), EVENTS[name], OK
        SUBJECT.set(subject_of(request))
        try:
            yield
        except FoveaError as error:
            outcome = error.reason
            raise
        except BaseException:
            outcome = "FAILED"
            raise
        finally:
            await log_action(self._audit, Action(caller.owner, caller.key_id, event, name, SUBJECT.get(), outcome))


class CallBudget:
    """The bytes that one call has sent, including uploaded images that it names.

    Args:
        limit: The bytes that it may send.
        memory: The owner's part of the memory for all requests in progress.
    """

    def __init__(self, limit: int, memory: QuotaUse) -> None:
        self._limit, self._memory, self._bytes = limit, memory, 0

    def add(self, size_bytes: int) -> None:
        """Counts more bytes. Raises PayloadTooLarge, or ResourceExhausted if other requests fill the memory."""
        self._bytes += size_bytes
        if self._bytes > self._limit:
            raise PayloadTooLarge(f"the request, including its images, is larger than {self._limit} bytes")
        self._memory.take(size_bytes)

    async def add_message(self, message: Message) -> None:
        """Counts a message at its estimated size in memory. Raises the errors of `add`, and PayloadTooLarge for too
        many fields.
        """
        encoded = message.SerializeToString()
        count = await off_loop(check_protobuf_elements, encoded, message.DESCRIPTOR, _BULK_ELEMENTS)
        self.add(len(encoded) + ELEMENT_BYTES * count)


def _decoder(name: str) -> Callable[[bytes], Any]:
    kind = getattr(gateway_pb2, f"{name}Request")
    most_bytes, most = (MESSAGE_BYTES, _BULK_ELEMENTS) if name in _BULK else (SMALL_BYTES, SMALL_ELEMENTS)

    def decode(body: bytes) -> Any:
        if len(body) > most_bytes:
            raise PayloadTooLarge(f"a message of {name} may have {most_bytes} bytes, this one has {len(body)}")
        check_protobuf_elements(body, kind.DESCRIPTOR, most)
        try:
            return kind.FromString(body)
        except DecodeError as error:
            raise InvalidInput(f"the message is not a {name}Request: {error}") from None

    return decode


def _decoding(
    inner: Callable[[Any, Any], Awaitable[Any]], decode: Callable[[bytes], Any]
) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def behavior(body: bytes, context: Any) -> Any:
        return await inner(await off_loop(decode, body), context)

    return behavior


def _streaming(
    inner: Callable[[Any, Any], AsyncIterator[Any]], decode: Callable[[bytes], Any]
) -> Callable[[bytes, Any], AsyncIterator[Any]]:
    async def behavior(body: bytes, context: Any) -> AsyncIterator[Any]:
        async for response in inner(await off_loop(decode, body), context):
            yield response

    return behavior


def _decoding_stream(
    inner: Callable[[AsyncIterator[Any], Any], Awaitable[Any]], decode: Callable[[bytes], Any]
) -> Callable[[AsyncIterator[bytes], Any], Awaitable[Any]]:
    async def decoded(bodies: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for body in bodies:
            yield await off_loop(decode, body)

    return lambda bodies, context: inner(decoded(bodies), context)
