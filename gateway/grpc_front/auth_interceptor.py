"""Who may begin a gRPC call, decided before anything of it is waited for."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from fovea.wire.errors import FoveaError, Unauthenticated
from gateway.access.api_keys import KeyRing
from gateway.http.endpoint import not_ready


class AuthInterceptor(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses calls without a good key, and all calls, with what clients repeat, until the gateway is ready.

    Args:
        service: Full name of the gRPC service; add this to the server before the service itself.
        keys: Who is let in.
        ready: Set once the gateway has the state for itself.
    """

    def __init__(self, service: str, keys: KeyRing, ready: asyncio.Event) -> None:
        self._prefix, self._keys, self._ready = f"/{service}/", keys, ready

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """What refuses a call; None lets it through."""
        if not handler_call_details.method.startswith(self._prefix):
            return None
        if not self._ready.is_set():
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, not_ready()))
        try:
            self._keys.identify_call(handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, error))
        return None


async def _refuse(error: FoveaError, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    raise error
    yield b""
