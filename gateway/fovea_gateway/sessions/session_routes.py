"""HTTP routes of sessions and futures."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import FoveaError, Unimplemented
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.http.endpoint import BurstLimiter, Endpoints, Json, check_query, compress, paging
from fovea_gateway.http.request_body import Body, parse_json, read
from fovea_gateway.sessions.future import Kind, Outcome, Pending, ResultEncoder
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Session, Sessions

_MOST_SESSIONS = 200
_PROTOBUF = "application/x-protobuf"
_PROTO_OFF_LOOP_BYTES, _JSON_OFF_LOOP_BYTES = 2**15, 2**13
"""The sizes from which a result is encoded in a thread. A number as JSON costs 0.5 us, so that 8 KiB cost 1 ms."""
_SPREAD = 0.2


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
