"""The door of the gateway: it listens from the start, and lets nobody in before it has the state for itself."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from starlette.types import ASGIApp, Receive, Scope, Send

from fovea.wire.errors import FoveaError, Unauthenticated, Unavailable
from gateway.access.keyring import KeyRing
from gateway.http.endpoint import error_response

_ALIVE = "/healthz"


class Door(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses REST and gRPC calls with what clients repeat, until `is_open`. Health checks pass.

    gRPC calls without a good key are refused here too: nothing of them is waited for, neither a message nor its end.

    Args:
        service: Full name of the gRPC service; add this to the server before the service itself.
        keys: Who is let in.
    """

    def __init__(self, service: str, keys: KeyRing) -> None:
        self._prefix, self._keys = f"/{service}/", keys
        self.is_open = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """What refuses a gRPC call; None lets it through."""
        if not handler_call_details.method.startswith(self._prefix):
            return None
        if not self.is_open:
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, _refusal()))
        try:
            self._keys.identify_call(handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, error))
        return None

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


async def _refuse(error: FoveaError, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    raise error
    yield b""
