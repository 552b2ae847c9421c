"""Authentication of gRPC calls before any message of them is read, and the scope that each method needs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc

from fovea.wire.conventions import ADMIN_SERVICE, GATEWAY_SERVICE
from fovea.wire.errors import FoveaError
from fovea_gateway.access.api_keys import KeyRing
from fovea_gateway.access.owners import Owners
from fovea_gateway.http.endpoint import not_ready
from fovea_gateway.scopes import Scope

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
    """Refuses calls without a valid key; until the gateway is ready, refuses all calls with an error that clients
    retry.

    This must be an interceptor. Since grpcio 1.84, methods that stubs register take precedence over a generic handler
    that was added before the services, so every call would pass, even without a key.

    Args:
        keys: The accepted keys.
        owners: The request rates of owners.
        ready: Set once this gateway owns the state.
    """

    def __init__(self, keys: KeyRing, owners: Owners, ready: asyncio.Event) -> None:
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
        if not self._ready.is_set():
            return not_ready()
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
