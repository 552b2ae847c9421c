"""HTTP routes of sessions, their projects, the search for them, and futures."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Literal

import sqlalchemy as sa
from pydantic import AwareDatetime, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import FoveaError, InvalidInput
from fovea_gateway.access.api_keys import CALLER, Caller, Scope
from fovea_gateway.access.owners import DEFAULT_PROJECT, in_projects, require_projects
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import checkpoints, models, session_projects, sessions
from fovea_gateway.http.endpoint import BurstLimiter, Endpoints, Json, check_query, compress, iso_time, paging
from fovea_gateway.http.request_body import Body, parse_json, read
from fovea_gateway.sessions.future import Kind, Outcome, Pending, ResultEncoder
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Session, Sessions

_MOST_SESSIONS = 200
_PROTOBUF = "application/x-protobuf"
_PROTO_OFF_LOOP_BYTES, _JSON_OFF_LOOP_BYTES = 2**15, 2**13
"""The sizes from which a result is encoded in a thread. A number as JSON costs 0.5 us, so that 8 KiB cost 1 ms."""
_SPREAD = 0.2
_MOST_WORDS = 16
"""The most words, pairs of metadata, and statuses of one search."""
FINISHED = ("success", "errored", "interrupted")
"""The reasons with which a client ends a session; all others are the gateway's."""


class CreateSession(Body):
    """The body of POST create_session."""

    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: str = ""


class Heartbeat(Body):
    """The body of POST session_heartbeat."""

    session_id: str
    type: str = ""


class FinishReason(Body):
    """The reason for the end of a session."""

    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    """The body of POST sessions/{id}/finish."""

    reason: FinishReason
    detail: str | None = None
    type: str = ""


class AssignProject(Body):
    """The body of PUT sessions/{id}/project."""

    project_id: str


class SessionOwner(Body):
    """The owners in a search: the caller, all that the caller may list, or those named."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field([], max_length=10)

    def names(self, caller: Caller) -> list[str] | None:
        """Returns the owners' names; None means all. Raises PermissionDenied, InvalidInput."""
        is_admin = caller.scope.includes(Scope.ADMIN)
        if self.type != "user":
            return None if self.type == "accessible" and is_admin else [caller.owner]
        if not self.owner_urns:
            raise InvalidInput("owner.owner_urns is empty; name 1 to 10 owners", field="owner.owner_urns")
        if set(self.owner_urns) != {caller.owner}:
            caller.require(Scope.ADMIN, "a search in other owners' sessions")
        return self.owner_urns


class SessionStatusQuery(Body):
    """A status in a search. Fovea ends no session as cancelled or failed."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(None, min_length=1, max_length=3)

    def condition(self) -> sa.ColumnElement[bool]:
        """Returns the condition for a session's row. Raises InvalidInput."""
        if self.type == "client_finished":
            return sessions.c.end_reason.in_(self.reasons or FINISHED)
        if self.reasons is not None:
            raise InvalidInput(f"statuses: only client_finished may have reasons, not {self.type}", field="statuses")
        is_active = sessions.c.ended_at.is_(None) & sessions.c.parked_at.is_(None)
        return is_active if self.type == "active" else sa.false()


class SessionCursor(Body):
    """The last session of the previous page."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchSessions(Body):
    """The body of POST sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = Field(None, max_length=100)
    user_metadata: dict[str, str] = Field({}, max_length=_MOST_WORDS)
    display_name: str | None = Field(None, min_length=1)
    owner: SessionOwner = SessionOwner()
    statuses: list[SessionStatusQuery] | None = Field(None, min_length=1, max_length=_MOST_WORDS)
    limit: int = Field(50, ge=1, le=_MOST_SESSIONS)
    cursor: SessionCursor | None = None

    def find(self, connection: sa.Connection, caller: Caller) -> list[tuple[str, int]]:
        """Returns the ids of up to `limit` + 1 sessions, newest first, each with the size of its texts.

        Raises NotFound for an unknown project, InvalidInput, PermissionDenied for other owners' sessions.
        """
        owners = self.owner.names(caller)
        where: list[sa.ColumnElement[bool]] = [] if owners is None else [sessions.c.owner.in_(owners)]
        if self.project_ids is not None:
            only = owners[0] if owners is not None and len(owners) == 1 else None
            require_projects(connection, only, self.project_ids, "project_ids")
            where.append(in_projects(sessions.c.session_id, self.project_ids))
        if names := self._names():
            where.append(sa.or_(*names))
        where += [_has(connection.dialect.name, name, value) for name, value in self.user_metadata.items()]
        if self.statuses is not None:
            where.append(sa.or_(*(status.condition() for status in self.statuses)))
        place = sessions.c.created_at, sessions.c.session_id
        if self.cursor is not None:
            # The cursor's time is rounded to microseconds, so the session's own time is read again.
            last = self.cursor.last_session_id
            found = connection.scalar(sa.select(sessions.c.created_at).where(sessions.c.session_id == last))
            at = self.cursor.last_created_at.timestamp() if found is None else found
            where.append((place[0] < at) | ((place[0] == at) & (place[1] < last)))
        texts = (sessions.c.user_metadata, sessions.c.display_name)
        size: Any = sum(sa.func.coalesce(sa.func.length(sa.cast(column, sa.Text)), 0) for column in texts)
        query = sa.select(place[1], size).where(*where).order_by(*(column.desc() for column in place))
        return [(session_id, size) for session_id, size in connection.execute(query.limit(self.limit + 1))]

    def _names(self) -> list[sa.ColumnElement[bool]]:
        """Returns the conditions for id and name, of which one must hold. Raises InvalidInput."""
        found: list[sa.ColumnElement[bool]] = []
        if self.session_id is not None:
            found.append(sessions.c.session_id == self.session_id)
        if self.display_name is not None:
            words = self.display_name.lower().split()
            if not 1 <= len(words) <= _MOST_WORDS:
                field = "display_name"
                raise InvalidInput(f"{field} has {len(words)} words; search for 1 .. {_MOST_WORDS}", field=field)
            name = sa.func.lower(sessions.c.display_name)
            found.append(sa.and_(*(name.contains(word, autoescape=True) for word in words)))
        return found


class SessionRoutes:
    """Handlers of sessions."""

    def __init__(self, sessions: Sessions, database: Database) -> None:
        self._sessions, self._database = sessions, database

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("POST", "create_session", self.create, Scope.READ),
            endpoints.route("POST", "session_heartbeat", self.heartbeat, Scope.READ),
            endpoints.route("POST", "sessions/{session_id}/finish", self.finish, Scope.READ),
            endpoints.route("PUT", "sessions/{session_id}/project", self.assign, Scope.READ),
            endpoints.route("POST", "sessions/search", self.search, Scope.READ),
            endpoints.route("GET", "sessions", self.page, Scope.READ),
            endpoints.route("GET", "sessions/{session_id}", self.get, Scope.READ),
            endpoints.route("GET", "parked_sessions", self.parked, Scope.READ),
        ]

    async def create(self, request: Request, owner: str) -> Response:
        """Opens a session. Requests with the same X-Idempotency-Key open it once."""
        body = await parse_json(request, CreateSession, await read(request))
        key = request.headers.get("x-idempotency-key")
        session = await self._sessions.create(
            owner, body.tags, body.user_metadata or {}, key, body.display_name, body.project_id
        )
        return Json({"type": "create_session", "session_id": session.session_id})

    async def heartbeat(self, request: Request, owner: str) -> Response:
        """Extends the life of a session. Answers 410 if the session has ended."""
        body = await parse_json(request, Heartbeat, await read(request))
        await self._sessions.require(owner, body.session_id)
        return Json({"type": "session_heartbeat"})

    async def finish(self, request: Request, owner: str) -> Response:
        body = await parse_json(request, FinishSession, await read(request))
        session_id = request.path_params["session_id"]
        await self._sessions.finish(owner, session_id, body.reason.type, body.detail)
        return Json({"status": "finished"})

    async def assign(self, request: Request, owner: str) -> Response:
        """Moves a session into a project."""
        body = await parse_json(request, AssignProject, await read(request))
        await self._sessions.assign(owner, request.path_params["session_id"], body.project_id)
        return Json({"status": "assigned"})

    async def search(self, request: Request, owner: str) -> Response:
        """Lists a page of the sessions that match, newest first, and the cursor of the next page."""
        body = await parse_json(request, SearchSessions, await read(request))
        caller = CALLER.get()
        found = await self._database.read_whole(lambda connection: body.find(connection, caller))
        request.state.incoming.memory.take(4 * sum(size for _, size in found))
        ids = [session_id for session_id, _ in found[: body.limit]]
        page = await self._database.read_whole(lambda connection: summaries(connection, ids))
        cursor = None
        if len(found) > body.limit and page:
            cursor = {"last_created_at": page[-1]["created_at"], "last_session_id": page[-1]["session_id"]}
        return Json({"sessions": page, "next_cursor": cursor})

    async def page(self, request: Request, owner: str) -> Response:
        limit, offset = paging(request, 20, _MOST_SESSIONS)
        return Json({"sessions": await self._sessions.page(owner, limit, offset)})

    async def parked(self, request: Request, owner: str) -> Response:
        """Lists parked sessions with their sizes, longest parked first. Finishing one deletes it.

        Lists the caller's sessions. With the scope admin, `owner` selects another owner's or all (`owner=*`).
        """
        check_query(request, "owner")
        found = await self._sessions.parked_for(request.query_params.get("owner", ""))
        return Json({"sessions": [_parked_json(session, model_ids) for session, model_ids in found]})

    async def get(self, request: Request, owner: str) -> Response:
        """Returns the ids of a session's models and sampling sessions."""
        session = await self._sessions.get(owner, request.path_params["session_id"])
        model_ids, sampler_ids = await self._sessions.contents(session)
        metadata = {name: str(value) for name, value in session.user_metadata.items()}
        answer = {"training_run_ids": model_ids, "sampler_ids": sampler_ids, "user_metadata": metadata}
        return Json(answer | ({"display_name": session.display_name} if session.display_name else {}))


def summaries(connection: sa.Connection, session_ids: list[str]) -> list[dict[str, Any]]:
    """Returns descriptions of sessions, newest first, with their projects and the sizes of their checkpoints."""
    held = sa.select(models.c.session_id, sa.func.count(), sa.func.sum(checkpoints.c.size_bytes))
    held = held.join_from(models, checkpoints, models.c.model_id == checkpoints.c.model_id)
    held = held.where(models.c.session_id.in_(session_ids)).group_by(models.c.session_id)
    sizes = {session_id: (int(count), int(size)) for session_id, count, size in connection.execute(held)}
    in_project = sessions.outerjoin(session_projects, sessions.c.session_id == session_projects.c.session_id)
    query = sa.select(sessions, session_projects.c.project_id).select_from(in_project)
    query = query.where(sessions.c.session_id.in_(session_ids))
    rows = connection.execute(query.order_by(sessions.c.created_at.desc(), sessions.c.session_id.desc())).mappings()
    return [_summary(row, *sizes.get(row["session_id"], (0, 0))) for row in rows]


def _summary(row: Any, count: int, size_bytes: int) -> dict[str, Any]:
    status: dict[str, Any] | None = None
    if row["end_reason"] in FINISHED:
        status = {"type": "client_finished", "reason": {"type": row["end_reason"]}, "detail": row["end_detail"]}
    elif row["ended_at"] is None and row["parked_at"] is None:
        status = {"type": "active"}
    return {
        "session_id": row["session_id"],
        "created_at": iso_time(row["created_at"]),
        "owner": row["owner"],
        "project_id": row["project_id"] or DEFAULT_PROJECT,
        "status": status,
        "checkpoints_count": count,
        "display_name": row["display_name"],
        "user_metadata": {name: str(value) for name, value in row["user_metadata"].items()},
        "checkpoint_storage_bytes": size_bytes,
    }


def _has(dialect: str, name: str, value: str) -> sa.ColumnElement[bool]:
    """Returns the condition that a session's metadata has this text under this name."""
    column: Any = sessions.c.user_metadata
    if dialect == "sqlite":  # json_each fails for what SQLite does not read as JSON, such as NaN
        column = sa.case((sa.func.json_valid(column) == 1, column), else_="{}")
    each = sa.func.json_each if dialect == "sqlite" else sa.func.json_each_text
    pair: Any = each(column).table_valued("key", "value")
    return sa.exists(sa.select(sa.literal(1)).select_from(pair).where(pair.c.key == name, pair.c.value == value))


def _parked_json(session: Session, model_ids: list[str]) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "owner": session.owner,
        "parked_at": session.parked_at,
        "size_bytes": session.parked_bytes,
        "training_run_ids": model_ids,
    }


class RetrieveFuture(Body):
    """The body of POST retrieve_future."""

    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(Body):
    """The body of POST cancel_future."""

    request_id: str


def hold_s(poll_hold_s: float) -> float:
    """Returns the seconds to hold one poll. They vary, so that simultaneous polls are not all renewed in one burst."""
    return poll_hold_s * random.uniform(1 - _SPREAD, 1 + _SPREAD)


class FutureRoutes:
    """Handlers of futures.

    Args:
        limiter: Spreads the answers to polls that end together.
        encoders: The encoder of results for each kind of work.
        poll_hold_s: Seconds to hold a poll of an unfinished future, varied by up to a fifth.
        inline_limit_bytes: Larger results are announced by their size to clients that support this.
        compress_from_bytes: The size from which results are compressed.
    """

    def __init__(
        self,
        futures: Futures,
        limiter: BurstLimiter,
        encoders: Mapping[Kind, ResultEncoder],
        poll_hold_s: float,
        inline_limit_bytes: int,
        compress_from_bytes: int,
    ) -> None:
        self._futures, self._limiter, self._encoders = futures, limiter, encoders
        self._poll_hold_s = poll_hold_s
        self._inline_limit_bytes, self._compress_from_bytes = inline_limit_bytes, compress_from_bytes

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("POST", "retrieve_future", self.retrieve, Scope.READ),
            endpoints.route("POST", "cancel_future", self.cancel, Scope.SAMPLE),
        ]

    async def retrieve(self, request: Request, owner: str) -> Response:
        """Returns the result or the error of a future, both with status 200, or 408 while it is unfinished.

        A result above the inline limit is announced by its size to clients that support this.
        """
        body = await parse_json(request, RetrieveFuture, await read(request))
        outcome = await self._futures.wait(body.request_id, owner, hold_s(self._poll_hold_s))
        await self._limiter.enter()
        if isinstance(outcome, Pending):
            progress = outcome.progress
            waiting = {"queue_state": progress.queue_state.value, "queue_state_reason": progress.waiting_for}
            return Json({"type": "try_again", "request_id": body.request_id, **waiting}, status_code=408)
        if outcome.error is not None:
            return Json(error_json(outcome.error))
        response = await self._result(outcome, request.headers.get("accept", ""))
        if body.allow_metadata_only and len(response.body) > self._inline_limit_bytes:
            return Json({"status": "complete_metadata", "response_payload_size": len(response.body)})
        if len(response.body) < self._compress_from_bytes:
            return response
        return await compress(response, request.headers.get("accept-encoding", ""))

    async def cancel(self, request: Request, owner: str) -> Response:
        """Cancels a sample that its client no longer needs. Has no effect on other work."""
        body = await parse_json(request, CancelFuture, await read(request))
        await self._futures.cancel(body.request_id, owner)
        return Json({"status": "cancelled"})

    async def _result(self, outcome: Outcome, accept: str) -> Response:
        encoder = self._encoders[outcome.kind]
        is_proto = _PROTOBUF in accept
        if len(outcome.result) < (_PROTO_OFF_LOOP_BYTES if is_proto else _JSON_OFF_LOOP_BYTES):
            return _encoded(encoder, outcome.result, is_proto)
        return await asyncio.to_thread(_encoded, encoder, outcome.result, is_proto)


def _encoded(encoder: ResultEncoder, result: bytes, is_proto: bool) -> Response:
    """Returns the answer with a result. Runs in a thread if the result is large."""
    if encoder.to_proto is not None and is_proto:
        return Response(encoder.to_proto(result), media_type=_PROTOBUF)
    return Json(encoder.to_json(result))


def error_json(error: FoveaError) -> dict[str, Any]:
    """Returns a failed future in the form that the SDK expects."""
    return {"error": error.message, "category": error.category, "reason": error.reason}
