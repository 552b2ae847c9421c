"""Administration of keys, owners and usage: Fovea's own REST routes, and the gRPC AdminService.

Access to keys and owners needs the scope admin. Usage and parked sessions need it only for other owners. Scopes are
checked before a handler or method runs.
"""

import asyncio
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, time, timedelta
from html import escape
from typing import Any, Literal

import grpc
from pydantic import Field
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fovea.api.v1 import admin_pb2 as pb
from fovea.api.v1 import admin_pb2_grpc
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, Unauthenticated
from fovea_gateway.access.api_keys import CALLER, SUBJECT, Key, KeyRing, Scope, parse_scope
from fovea_gateway.access.audit_log import ENTRY_BYTES, MOST_LISTED, SEARCHED, VALUES, AuditLog, note_key, question_of
from fovea_gateway.access.oidc import CALLBACK
from fovea_gateway.access.owners import FIGURES, LIMITS, Owner, Owners, stored_checkpoints, usage_for
from fovea_gateway.access.sign_ins import LOGIN_S, SignIns
from fovea_gateway.database.database import Database
from fovea_gateway.fronts.components import Components
from fovea_gateway.http.endpoint import (
    SESSION_COOKIE,
    TINKER,
    Api,
    Endpoints,
    Json,
    check_query,
    count_of,
    key_of,
    paging,
)
from fovea_gateway.http.request_body import Body, parse_json, read

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
    """Handlers of the administration routes.

    Args:
        gpu_hour_price_usd: The price of an hour of one GPU; 0 if there is none.
    """

    def __init__(
        self, keys: KeyRing, owners: Owners, database: Database, audit: AuditLog, gpu_hour_price_usd: float
    ) -> None:
        self._keys, self._owners, self._database, self._audit = keys, owners, database, audit
        self._price = gpu_hour_price_usd

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("POST", "keys", self.create_key, Scope.ADMIN),
            endpoints.route("GET", "keys", self.list_keys, Scope.ADMIN),
            endpoints.route("DELETE", "keys/{key_id}", self.revoke_key, Scope.ADMIN),
            endpoints.route("PUT", "keys/{key_id}/expiry", self.expire_key, Scope.ADMIN),
            endpoints.route("GET", "owners", self.list_owners, Scope.ADMIN),
            endpoints.route("PUT", "owners/{owner}", self.put_owner, Scope.ADMIN),
            endpoints.route("GET", "usage", self.usage, Scope.READ),
            endpoints.route("GET", "audit", self.audit, Scope.ADMIN),
            endpoints.route("GET", "billing/usage/checkpoints/current", self.stored, Scope.ADMIN),
            endpoints.route("GET", "billing/usage/events", self.billing_events, Scope.ADMIN),
        ]

    async def create_key(self, request: Request, owner: str) -> Response:
        """Creates a key. The response is the only one that contains its text."""
        body = await parse_json(request, CreateKey, await read(request))
        text, key = await self._keys.create(body.owner, body.name, parse_scope(body.scope), _ahead(body.expires_at))
        return Json({"text": text, "key": note_key(key).shown})

    async def list_keys(self, request: Request, owner: str) -> Response:
        """Lists all keys, valid or not."""
        return Json({"keys": [key.shown for key in self._keys.listed()]})

    async def revoke_key(self, request: Request, owner: str) -> Response:
        """Revokes a key permanently."""
        return Json({"key": note_key(await self._keys.revoke(request.path_params["key_id"])).shown})

    async def expire_key(self, request: Request, owner: str) -> Response:
        """Sets or removes the time at which a key expires."""
        body = await parse_json(request, ExpireKey, await read(request))
        key = await self._keys.expire(request.path_params["key_id"], body.expires_at)
        return Json({"key": note_key(key).shown})

    async def list_owners(self, request: Request, owner: str) -> Response:
        """Lists the records of all owners that have one."""
        return Json({"owners": [dataclasses.asdict(each) for each in self._owners.listed()]})

    async def put_owner(self, request: Request, owner: str) -> Response:
        """Writes an owner's record, which takes effect at once."""
        body = await parse_json(request, PutOwner, await read(request))
        record = Owner(request.path_params["owner"], **body.model_dump())
        await self._owners.put(record)
        VALUES.set(body.model_dump())
        return Json({"owner": dataclasses.asdict(record)})

    async def usage(self, request: Request, owner: str) -> Response:
        """Returns usage by key and day: the caller's own, or for the scope admin that of another owner or of all
        (`owner=*`).
        """
        check_query(request, "days", "owner")
        asked = request.query_params.get("owner", "")
        found = await usage_for(self._database, asked, count_of(request, "days", 30))
        return Json(found | ({"gpu_hour_price_usd": self._price} if self._price else {}))

    async def billing_events(self, request: Request, owner: str) -> Response:
        """Returns the usage of all owners in whole UTC days, as the SDK reads it. Costs follow from GPU-seconds."""
        check_query(request, "starting_on", "ending_before")
        start, end = (_midnight_of(request, name) for name in ("starting_on", "ending_before"))
        if not 0 < (end - start).days <= _MOST_BILLED_DAYS:
            words = f"ending_before must be 1 .. {_MOST_BILLED_DAYS} days after starting_on"
            raise InvalidInput(words, field="ending_before")
        days = (datetime.now(UTC) - start).days + 1
        rows = (await usage_for(self._database, "*", days))["usage"] if days > 0 else []
        wanted = [row for row in rows if str(start.date()) <= row["day"] < str(end.date())]
        return Json({"data": billing_events(wanted, self._price), "sessions": {}, "cost_data_through": None})

    async def audit(self, request: Request, owner: str) -> Response:
        """Returns a page of the audit log, oldest first: `days` UTC days that end with `day`, by default today."""
        check_query(request, "event_type", "day", "days", "limit", "offset", *SEARCHED)
        question = question_of(request.query_params, count_of(request, "days", 1))
        limit, offset = paging(request, MOST_LISTED, MOST_LISTED)
        total = await self._audit.count(question)
        # A row takes about three times its stored size in memory, and then its text.
        request.state.incoming.memory.take(4 * ENTRY_BYTES * max(min(limit, total - offset), 0))
        entries = await self._audit.page(question, limit, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return await asyncio.to_thread(Json, {"entries": entries, "cursor": cursor})

    async def stored(self, request: Request, owner: str) -> Response:
        """Returns the checkpoints of all owners, or of one project: their number and bytes by project and owner.

        Storage has no price.
        """
        check_query(request, "project_id")
        project_id = request.query_params.get("project_id")
        listed = await self._database.read_whole(lambda connection: stored_checkpoints(connection, project_id))
        return Json({"effective_rate_usd_per_gigabyte_month": None, "data": listed})


_MOST_BILLED_DAYS = 14


def _midnight_of(request: Request, name: str) -> datetime:
    """Returns a UTC midnight from the query. Raises InvalidInput: usage is stored by day, not by hour."""
    text = request.query_params.get(name, "")
    try:
        found = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        found = datetime.max.replace(tzinfo=UTC)
    if found.timetz().replace(tzinfo=None) != time():
        raise InvalidInput(
            f"{name} is {text[:40]!r}; it must be midnight in UTC, such as 2026-01-31T00:00:00Z, because Fovea stores"
            " usage by day",
            field=name,
        )
    return found


def billing_events(rows: Iterable[Mapping[str, Any]], gpu_hour_price_usd: float) -> list[dict[str, Any]]:
    """Returns an event for each day, owner and kind of tokens, in the format of the SDK.

    The cost of a day is that of its GPU-seconds, divided among the kinds by tokens; cached prompt tokens cost nothing.
    """
    days: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        days[row["day"], row["owner"]].update({name: row[name] for name in FIGURES})
    events = []
    for (day, owner), used in sorted(days.items()):
        kinds: list[tuple[dict[str, Any], float]] = [
            ({"type": "training"}, used["trained_tokens"] + used["scored_tokens"]),
            ({"type": "sampling_prefill", "cached": False}, used["prompt_tokens"] - used["cached_tokens"]),
            ({"type": "sampling_prefill", "cached": True}, used["cached_tokens"]),
            ({"type": "sampling_sample"}, used["sampled_tokens"]),
        ]
        paid = sum(count for kind, count in kinds if not kind.get("cached"))
        rate = used["gpu_seconds"] / 3600 * gpu_hour_price_usd / paid if paid else 0.0
        start = datetime.fromisoformat(f"{day}T00:00:00+00:00")
        for kind, count in sorted(kinds, key=lambda one: -one[1]):
            priced = 0.0 if kind.get("cached") else rate
            costs = {"estimated_cost_usd": priced * count, "effective_rate_usd_per_million_tokens": priced * 1e6}
            events += [
                {
                    "bucket_start": start.isoformat(),
                    "bucket_end": (start + timedelta(1)).isoformat(),
                    "user_id": owner,
                    "user_name": owner,
                    **(costs if gpu_hour_price_usd else {}),
                    "event_info": kind | {"token_count": int(count)},
                }
            ] * bool(count)
    return events


class SignInRoutes:
    """Handlers of sign-in through an OpenID Connect provider, and of the SDK's exchange of credentials.

    Args:
        base_path: The prefix of all paths, without a trailing slash.
        public_url: The page's address; if empty, that of each request.
    """

    def __init__(self, sign_ins: SignIns, base_path: str, public_url: str) -> None:
        self._sign_ins, self._base_path, self._public_url = sign_ins, base_path, public_url.rstrip("/")

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.open_route("auth/methods", {"api_key": True, "sign_in": self._sign_ins.is_on}),
            endpoints.keyless_route("GET", "auth/login", self.login, _BROWSER),
            endpoints.keyless_route("GET", "auth/callback", self.callback, _BROWSER),
            endpoints.route("POST", "auth/logout", self.logout, Scope.READ),
            endpoints.route("POST", "auth/token", self.exchange, Scope.READ, exchanges=True),
        ]

    async def login(self, request: Request) -> Response:
        """Sends the browser to the provider. A cookie ties the answer to this browser."""
        ours, state = self._sign_ins, self._sign_ins.begin()
        secrets = ours.derive("nonce", state), ours.derive("verifier", state)
        found = await ours.provider.login_url(self._root(request) + CALLBACK, state, *secrets)
        answer = RedirectResponse(found, status_code=303, headers=_UNSTORED)
        self._put_cookie(request, answer, _LOGIN_COOKIE, state, LOGIN_S)
        return answer

    async def callback(self, request: Request) -> Response:
        """Opens a session for the person that the provider names, and leads to the page."""
        query, ours = request.query_params, self._sign_ins
        provider, state = ours.provider, query.get("state", "")
        ours.check_state(state, request.cookies.get(_LOGIN_COOKIE, ""))
        if told := query.get("error_description") or query.get("error"):
            raise Unauthenticated(f"the provider refused the sign-in: {told[:200]}")
        secrets = ours.derive("nonce", state), ours.derive("verifier", state)
        person = await provider.redeem(query.get("code", ""), self._root(request) + CALLBACK, *secrets)
        text, key = await ours.open_session(person)
        CALLER.set(key.caller)
        answer = RedirectResponse(f"{self._base_path}/", status_code=303, headers=_UNSTORED)
        self._put_cookie(request, answer, SESSION_COOKIE, text, ours.session_s)
        self._put_cookie(request, answer, _LOGIN_COOKIE, "", 0)
        return answer

    async def logout(self, request: Request, owner: str) -> Response:
        """Ends the session of the page's cookie."""
        await self._sign_ins.close_session(key_of(request) or "")
        answer = Json({"status": "ok"})
        self._put_cookie(request, answer, SESSION_COOKIE, "", 0)
        return answer

    async def exchange(self, request: Request, owner: str) -> Response:
        """Exchanges an ID token or an API key for a short-lived token, which is sent in place of an API key."""
        await read(request)
        if not self._sign_ins.is_on:
            words = "without gateway.oidc_issuer there are no JWTs; send the API key itself, as X-API-Key"
            raise NotFound(f"auth/token is not served: {words}")
        return Json({"jwt": self._sign_ins.exchange(key_of(request) or "", CALLER.get())}, headers=_UNSTORED)

    def _root(self, request: Request) -> str:
        return self._public_url or f"{request.url.scheme}://{request.url.netloc}{self._base_path}"

    def _put_cookie(self, request: Request, answer: Response, name: str, value: str, age_s: float) -> None:
        # The provider's page leads back to `callback`, so the cookie of a login must be sent then.
        same_site: Literal["lax", "strict"] = "lax" if name == _LOGIN_COOKIE else "strict"
        is_secure, path = self._root(request).startswith("https:"), f"{self._base_path}/"
        answer.set_cookie(name, value, int(age_s), path=path, secure=is_secure, httponly=True, samesite=same_site)


def _refused_page(error: FoveaError) -> Response:
    """Returns an error as a page with a link to the live page."""
    policy = {
        "Content-Security-Policy": "default-src 'none'; style-src 'self'; frame-ancestors 'none'; base-uri 'none'"
    }
    return Response(_REFUSED.format(escape(error.message)), error.http_status, _UNSTORED | policy, "text/html")


_REFUSED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Not signed in</title>
<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="../../../page/page.css">
<div class="ask card" role="main"><h1>Not signed in</h1><p class="wrong" role="alert">{}</p>
<p><a href="../../../">Back to the page</a></p></div></html>"""
_LOGIN_COOKIE = "fovea_login"
_UNSTORED = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_BROWSER = Api(TINKER.prefix, _refused_page)


# ruff: noqa: N802 - gRPC names the methods.


_DAYS = 30
Context = grpc.aio.ServicerContext


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The methods of AdminService; each runs one use case."""

    def __init__(self, components: Components) -> None:
        self._keys, self._owners, self._database = components.keys, components.owners, components.database
        self._sessions = components.sessions

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        """Creates a key."""
        scope = parse_scope(request.scope)
        text, key = await self._keys.create(request.owner, request.name, scope, _ahead(request.expires_at or None))
        return pb.CreateKeyResponse(text=text, key=_key(note_key(key)))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        return pb.ListKeysResponse(keys=map(_key, self._keys.listed()))

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        return pb.RevokeKeyResponse(key=_key(note_key(await self._keys.revoke(request.key_id))))

    async def ExpireKey(self, request: pb.ExpireKeyRequest, context: Context) -> pb.ExpireKeyResponse:
        key = await self._keys.expire(request.key_id, request.expires_at or None)
        return pb.ExpireKeyResponse(key=_key(note_key(key)))

    async def PutOwner(self, request: pb.PutOwnerRequest, context: Context) -> pb.PutOwnerResponse:
        """Writes an owner's record."""
        given = request.owner
        values = {name: getattr(given, name) for name in LIMITS}
        record = Owner(given.owner, weight=given.weight or 1.0, **values)
        await self._owners.put(record)
        SUBJECT.set(record.owner)
        VALUES.set({"weight": record.weight} | values)
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


def _ahead(expires_at: float | None) -> float | None:
    """Returns the expiry of a new key. Raises InvalidInput if it has passed."""
    if expires_at is not None and expires_at <= datetime.now(UTC).timestamp():
        raise InvalidInput("expires_at is in the past", field="expires_at")
    return expires_at


def _key(key: Key) -> pb.ApiKey:
    return pb.ApiKey(**key.shown)
