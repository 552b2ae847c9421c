"""Base of the clients: a channel to one service with limits, safe retries, deadlines and the server's own errors."""

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fovea.api.v1 import logs_pb2, logs_pb2_grpc
from fovea.runtime import credentials, tracing
from fovea.wire.conventions import MESSAGE_BYTES, PIECE_BYTES
from fovea.wire.errors import STATUS_DETAILS, BrokenOff, Cancelled, FoveaError, Unavailable, from_rpc_error

Response = TypeVar("Response")

OPTIONS: list[tuple[str, object]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Reconnect within a second to a service that restarts on the same port; gRPC's default can take two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]

_ENDED_WHILE_SENDING = "Internal error from Core"
"""Error text of grpc.aio (1.76 to 1.83), with code INTERNAL, if a stream ends while the client still sends."""


def retry_options(methods: list[tuple[str, str]]) -> list[tuple[str, object]]:
    """Returns options that make gRPC retry the given (service, method) calls on UNAVAILABLE.

    Only for calls that are safe to repeat.
    """
    names = [{"service": service, "method": method} for service, method in methods]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return [("grpc.service_config", json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]}))]


def open_channel(address: str, options: list[tuple[str, object]]) -> grpc.aio.Channel:
    """Opens a channel to a service of the same Fovea, with mutual TLS if this process has certificates."""
    if certificates := credentials.certificates():
        return grpc.aio.secure_channel(
            address, certificates.for_client(), options=[*options, *credentials.CLIENT_OPTIONS]
        )
    return grpc.aio.insecure_channel(address, options=options)


def open_blocking_channel(address: str) -> grpc.Channel:
    """Opens a blocking channel, for use in threads."""
    if certificates := credentials.certificates():
        return grpc.secure_channel(address, certificates.for_client(), options=[*OPTIONS, *credentials.CLIENT_OPTIONS])
    return grpc.insecure_channel(address, options=OPTIONS)


class ServiceClient:
    """Base class of the typed clients. Use it with `async with`, or call `close`.

    Args:
        address: host:port of the service.
        retryable: (service, method) pairs that gRPC may retry on UNAVAILABLE.
        metadata: Metadata sent with every call, such as an API key.
        internal: Whether the service is behind the gateway. Such a service uses TLS if this process has certificates.
    """

    def __init__(
        self,
        address: str,
        retryable: list[tuple[str, str]] | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
        internal: bool = True,
    ) -> None:
        self.address = address
        self._metadata = metadata
        options = [*OPTIONS, *retry_options(retryable or [])]
        self.channel = (
            open_channel(address, options) if internal else grpc.aio.insecure_channel(address, options=options)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel and cancels calls in flight."""
        await self.channel.close(None)

    async def is_serving(self, service: str = "", timeout_s: float = 2.0) -> bool:
        """Returns whether the health check of `service` answers SERVING. False if the service cannot be reached."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def log_lines(
        self, least_level: int, text: str, most: int, timeout_s: float = 2.0
    ) -> Sequence[logs_pb2.LogLine]:
        """Returns the service's newest log lines of at least this level with this text, in the order of their times."""
        request = logs_pb2.ReadLogRequest(least_level=least_level, text=text, most=most)
        stub = logs_pb2_grpc.LogServiceStub(self.channel)
        response: logs_pb2.ReadLogResponse = await self._unary(stub.ReadLog, request, timeout_s)
        return response.lines

    def _raised(self, error: grpc.aio.AioRpcError) -> FoveaError:
        """Returns the error that the server raised, or BrokenOff if the server did not answer.

        CANCELLED without details means that the server stopped, because a cancellation by this client raises another
        error. A client that still sends when the stream ends gets an internal error, whatever the cause.
        """
        raised = from_rpc_error(error)
        trailing: Any = error.trailing_metadata() or ()
        if STATUS_DETAILS in [name for name, _ in trailing]:
            return raised
        if isinstance(raised, Cancelled):
            return BrokenOff(f"the service at {self.address} stopped during the call")
        if raised.message == _ENDED_WHILE_SENDING:
            return BrokenOff(f"the service at {self.address} ended the call before the request was complete")
        return BrokenOff(raised.message) if type(raised) is Unavailable else raised

    async def _unary(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        """Returns the response. `request` is a message or an async iterable of messages."""
        try:
            return await method(request, timeout=timeout_s, metadata=tracing.metadata(self._metadata))
        except grpc.aio.AioRpcError as error:
            raise self._raised(error) from None

    async def _send_image(self, method: Any, message: Callable[..., Any], data: bytes, timeout_s: float) -> str:
        """Sends an encoded image as messages with its SHA-256 and its pieces. Returns the SHA-256."""
        sha256 = hashlib.sha256(data).hexdigest()

        async def pieces() -> AsyncIterator[Any]:
            for offset in range(0, max(len(data), 1), PIECE_BYTES):
                yield message(sha256=sha256, data=data[offset : offset + PIECE_BYTES])

        await self._unary(method, pieces(), timeout_s)
        return sha256

    async def _stream(self, method: Any, request: Any, timeout_s: float | None) -> AsyncIterator[Any]:
        """Yields responses. `request` is a message or an async iterable of messages. Leaving early cancels the call."""
        call = method(request, timeout=timeout_s, metadata=tracing.metadata(self._metadata))
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._raised(error) from None
        finally:
            call.cancel()
