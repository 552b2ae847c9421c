"""Servicer of AdminService. Who may call is decided in the interceptor."""

# ruff: noqa: N802 - gRPC names the methods.

import grpc

from fovea.api.v1 import admin_pb2 as pb
from fovea.api.v1 import admin_pb2_grpc
from gateway.access.api_keys import Key, parse_scope
from gateway.parts import Parts

Context = grpc.aio.ServicerContext


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Every method: one use case, the answer."""

    def __init__(self, parts: Parts) -> None:
        self._keys = parts.keys

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        """Makes a key."""
        scope = parse_scope(request.scope)
        text, key = await self._keys.create(request.owner, request.name, scope, request.expires_at or None)
        return pb.CreateKeyResponse(text=text, key=_key(key))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        return pb.ListKeysResponse(keys=map(_key, self._keys.listed()))

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        return pb.RevokeKeyResponse(key=_key(await self._keys.revoke(request.key_id)))

    async def ExpireKey(self, request: pb.ExpireKeyRequest, context: Context) -> pb.ExpireKeyResponse:
        return pb.ExpireKeyResponse(key=_key(await self._keys.expire(request.key_id, request.expires_at or None)))


def _key(key: Key) -> pb.ApiKey:
    return pb.ApiKey(**key.shown)
