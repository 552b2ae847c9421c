"""Routes of administration, Fovea's own: of everybody's keys for callers with the scope admin."""

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.api_keys import KeyRing, parse_scope
from gateway.http.endpoint import Endpoints, Json
from gateway.http.request_body import Body, parse_json, read
from gateway.scopes import Scope

_Time = Field(None, gt=0, le=1e11, allow_inf_nan=False)
"""Seconds since the epoch, or null."""


class CreateKey(Body):
    """POST keys."""

    owner: str
    name: str = ""
    scope: str = Scope.TRAIN
    expires_at: float | None = _Time


class ExpireKey(Body):
    """PUT keys/{key_id}/expiry."""

    expires_at: float | None = _Time


class AdminRoutes:
    """Handlers of administration."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("POST", "keys", self.create_key, Scope.ADMIN),
            endpoints.route("GET", "keys", self.list_keys, Scope.ADMIN),
            endpoints.route("DELETE", "keys/{key_id}", self.revoke_key, Scope.ADMIN),
            endpoints.route("PUT", "keys/{key_id}/expiry", self.expire_key, Scope.ADMIN),
        ]

    async def create_key(self, request: Request, owner: str) -> Response:
        """Makes a key; its text is told this once."""
        body = await parse_json(request, CreateKey, await read(request))
        text, key = await self._keys.create(body.owner, body.name, parse_scope(body.scope), body.expires_at)
        return Json({"text": text, "key": key.shown})

    async def list_keys(self, request: Request, owner: str) -> Response:
        """All keys, valid or not."""
        return Json({"keys": [key.shown for key in self._keys.listed()]})

    async def revoke_key(self, request: Request, owner: str) -> Response:
        """Ends a key for good."""
        return Json({"key": (await self._keys.revoke(request.path_params["key_id"])).shown})

    async def expire_key(self, request: Request, owner: str) -> Response:
        """Sets or removes the time at which a key ends."""
        body = await parse_json(request, ExpireKey, await read(request))
        return Json({"key": (await self._keys.expire(request.path_params["key_id"], body.expires_at)).shown})
