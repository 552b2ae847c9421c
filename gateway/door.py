"""The door of the gateway: it listens from the start, and lets nobody in before it has the state for itself."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from starlette.types import ASGIApp, Receive, Scope, Send

from fovea.wire.errors import FoveaError, Unavailable
from gateway.rest.endpoint import error_response

_ALIVE = "/healthz"


class Door(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses REST and gRPC calls with what clients repeat, until `is_open`. Health checks pass.

    Args:
        service: Full name of the gRPC service; add this to the server before the service itself.
    """

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"
        self.is_open = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """What answers a gRPC call while the door is shut; None lets it through."""
        if self.is_open or not handler_call_details.method.startswith(self._prefix):
            return None
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def guard(self, app: ASGIApp) -> ASGIApp:
        """The REST API behind this door."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if self.is_open or scope["type"] != "http" or scope["path"].endswith(_ALIVE):
                await app(scope, receive, send)
            else:
                await error_response(_refusal())(scope, receive, send)

        return guarded


def _refusal() -> FoveaError:
    return Unavailable("this gateway takes over once the one before it has ended: send this again in a second")


async def _refuse(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    raise _refusal()
    yield b""
