"""The servicer of AdminService. The interceptor checks permissions."""

# ruff: noqa: N802 - gRPC names the methods.

import dataclasses

import grpc

from fovea.api.v1 import admin_pb2 as pb
from fovea.api.v1 import admin_pb2_grpc
from fovea_gateway.access.api_keys import Key, parse_scope
from fovea_gateway.access.owners import LIMITS, Owner
from fovea_gateway.access.usage import usage_for
from fovea_gateway.parts import Parts

_DAYS = 30
Context = grpc.aio.ServicerContext


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The methods of AdminService; each runs one use case."""

    def __init__(self, parts: Parts) -> None:
        self._keys, self._owners, self._database = parts.keys, parts.owners, parts.database
        self._sessions = parts.sessions

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        """Creates a key."""
        scope = parse_scope(request.scope)
        text, key = await self._keys.create(request.owner, request.name, scope, request.expires_at or None)
        return pb.CreateKeyResponse(text=text, key=_key(key))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        return pb.ListKeysResponse(keys=map(_key, self._keys.listed()))

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        return pb.RevokeKeyResponse(key=_key(await self._keys.revoke(request.key_id)))

    async def ExpireKey(self, request: pb.ExpireKeyRequest, context: Context) -> pb.ExpireKeyResponse:
        return pb.ExpireKeyResponse(key=_key(await self._keys.expire(request.key_id, request.expires_at or None)))

    async def PutOwner(self, request: pb.PutOwnerRequest, context: Context) -> pb.PutOwnerResponse:
        """Writes an owner's record."""
        given = request.owner
        values = {name: getattr(given, name) for name in LIMITS}
        record = Owner(given.owner, weight=given.weight or 1.0, **values)
        await self._owners.put(record)
        return pb.PutOwnerResponse(owner=_owner(record))

    async def ListOwners(self, request: pb.ListOwnersRequest, context: Context) -> pb.ListOwnersResponse:
        return pb.ListOwnersResponse(owners=map(_owner, self._owners.listed()))

    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        """Returns usage by owner, key and day."""
        self._keys.identify_call(context.invocation_metadata())
        found = await usage_for(self._database, request.owner, max(request.days, 0) or _DAYS)
        rows = [pb.UsageOfDay(**row) for row in found["usage"]]
        return pb.GetUsageResponse(usage=rows, stored_bytes=found["stored_bytes"])

    async def ListParkedSessions(
        self, request: pb.ListParkedSessionsRequest, context: Context
    ) -> pb.ListParkedSessionsResponse:
        self._keys.identify_call(context.invocation_metadata())
        found = await self._sessions.parked_for(request.owner)
        return pb.ListParkedSessionsResponse(
            sessions=[
                pb.ParkedSession(
                    session_id=session.session_id,
                    owner=session.owner,
                    parked_at=session.parked_at,
                    size_bytes=session.parked_bytes,
                    model_ids=model_ids,
                )
                for session, model_ids in found
            ]
        )


def _owner(owner: Owner) -> pb.Owner:
    return pb.Owner(**dataclasses.asdict(owner))


def _key(key: Key) -> pb.ApiKey:
    return pb.ApiKey(**key.shown)
