"""HTTP routes of sessions."""

from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import Unimplemented
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.http.endpoint import Endpoints, Json, check_query, paging
from fovea_gateway.http.request_body import Body, parse_json, read
from fovea_gateway.sessions.sessions import Session, Sessions

_MOST_SESSIONS = 200


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


class SessionRoutes:
    """Handlers of sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("POST", "create_session", self.create, Scope.READ),
            endpoints.route("POST", "session_heartbeat", self.heartbeat, Scope.READ),
            endpoints.route("POST", "sessions/{session_id}/finish", self.finish, Scope.READ),
            endpoints.route("GET", "sessions", self.page, Scope.READ),
            endpoints.route("GET", "sessions/{session_id}", self.get, Scope.READ),
            endpoints.route("GET", "parked_sessions", self.parked, Scope.READ),
        ]

    async def create(self, request: Request, owner: str) -> Response:
        """Opens a session. Requests with the same X-Idempotency-Key open it once."""
        body = await parse_json(request, CreateSession, await read(request))
        key = request.headers.get("x-idempotency-key")
        if body.project_id is not None:
            raise Unimplemented("project_id: Fovea has no projects; leave it out", field="project_id")
        session = await self._sessions.create(owner, body.tags, body.user_metadata or {}, key, body.display_name)
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


def _parked_json(session: Session, model_ids: list[str]) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "owner": session.owner,
        "parked_at": session.parked_at,
        "size_bytes": session.parked_bytes,
        "training_run_ids": model_ids,
    }
