"""Fovea's own routes for administration.

Keys and limits of all owners need the scope admin. Usage needs it only for other owners' usage.
"""

import dataclasses

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea_gateway.access.api_keys import KeyRing, parse_scope
from fovea_gateway.access.owners import Owner, Owners
from fovea_gateway.access.usage import usage_for
from fovea_gateway.database.database import Database
from fovea_gateway.http.endpoint import Endpoints, Json, check_query, count_of
from fovea_gateway.http.request_body import Body, parse_json, read
from fovea_gateway.scopes import Scope

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


class PutOwner(Body):
    """PUT owners/{owner}: a field that is left out is set to its default."""

    weight: float = 1.0
    max_models: int = 0
    max_stored_bytes: int = 0
    max_tokens_in_flight: int = 0
    max_requests_per_s: float = 0.0


class AdminRoutes:
    """Handlers of the administration routes."""

    def __init__(self, keys: KeyRing, owners: Owners, database: Database) -> None:
        self._keys, self._owners, self._database = keys, owners, database

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("POST", "keys", self.create_key, Scope.ADMIN),
            endpoints.route("GET", "keys", self.list_keys, Scope.ADMIN),
            endpoints.route("DELETE", "keys/{key_id}", self.revoke_key, Scope.ADMIN),
            endpoints.route("PUT", "keys/{key_id}/expiry", self.expire_key, Scope.ADMIN),
            endpoints.route("GET", "owners", self.list_owners, Scope.ADMIN),
            endpoints.route("PUT", "owners/{owner}", self.put_owner, Scope.ADMIN),
            endpoints.route("GET", "usage", self.usage, Scope.READ),
        ]

    async def create_key(self, request: Request, owner: str) -> Response:
        """Creates a key. The response is the only one that contains its text."""
        body = await parse_json(request, CreateKey, await read(request))
        text, key = await self._keys.create(body.owner, body.name, parse_scope(body.scope), body.expires_at)
        return Json({"text": text, "key": key.shown})

    async def list_keys(self, request: Request, owner: str) -> Response:
        """Lists all keys, valid or not."""
        return Json({"keys": [key.shown for key in self._keys.listed()]})

    async def revoke_key(self, request: Request, owner: str) -> Response:
        """Revokes a key permanently."""
        return Json({"key": (await self._keys.revoke(request.path_params["key_id"])).shown})

    async def expire_key(self, request: Request, owner: str) -> Response:
        """Sets or removes the time at which a key expires."""
        body = await parse_json(request, ExpireKey, await read(request))
        return Json({"key": (await self._keys.expire(request.path_params["key_id"], body.expires_at)).shown})

    async def list_owners(self, request: Request, owner: str) -> Response:
        """Lists the records of all owners that have one."""
        return Json({"owners": [dataclasses.asdict(each) for each in self._owners.listed()]})

    async def put_owner(self, request: Request, owner: str) -> Response:
        """Writes an owner's record, which takes effect at once."""
        body = await parse_json(request, PutOwner, await read(request))
        record = Owner(request.path_params["owner"], **body.model_dump())
        await self._owners.put(record)
        return Json({"owner": dataclasses.asdict(record)})

    async def usage(self, request: Request, owner: str) -> Response:
        """Returns usage by key and day: the caller's, or with the scope admin that of another owner or of all
        (`owner=*`).
        """
        check_query(request, "days", "owner")
        asked = request.query_params.get("owner", "")
        return Json(await usage_for(self._database, asked, count_of(request, "days", 30)))
