"""Routes of sessions, configuration and telemetry."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import InvalidInput, Unimplemented
from gateway.http import bodies
from gateway.http.endpoint import Endpoints, Json
from gateway.http.request_body import parse_json, read
from gateway.identity import INT64_MAX, Caller
from gateway.replicas.capabilities import Capabilities
from gateway.sessions.sessions import Sessions

_MOST_SESSIONS = 200
_DIGITS = 20
_FLAGS = {
    "proto_compress_fwdbwd": True,
    # The SDK's default transport, pyqwest 0.12, aborts one interpreter exit in ten or so on Python 3.11: its threads
    # still hand over the last answer. httpx does not; see docs/notes.
    "use_pyqwest_transport": False,
    # One poll for all samples of a client instead of one each, and numbers for unpickled clients that never clash.
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": True,
}


class SessionRoutes:
    """Handlers of sessions."""

    def __init__(self, sessions: Sessions, capabilities: Capabilities, flags: dict[str, Any]) -> None:
        self._sessions, self._capabilities, self._flags = sessions, capabilities, flags

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        return [
            endpoints.open_route("healthz", {"status": "ok"}),
            endpoints.route("POST", "client/config", self.client_config),
            endpoints.route("POST", "client/dynamic_config", self.dynamic_config),
            endpoints.route("POST", "create_session", self.create),
            endpoints.route("POST", "session_heartbeat", self.heartbeat),
            endpoints.route("POST", "sessions/{session_id}/finish", self.finish),
            endpoints.route("GET", "sessions", self.page),
            endpoints.route("GET", "sessions/{session_id}", self.get),
            endpoints.route("GET", "get_server_capabilities", self.get_capabilities),
            endpoints.route("POST", "telemetry", self.telemetry),
        ]

    async def client_config(self, request: Request, caller: Caller) -> Response:
        """Flags of the client; those not named keep the SDK's defaults."""
        await read(request)
        return Json(_FLAGS | self._flags)

    async def dynamic_config(self, request: Request, caller: Caller) -> Response:
        """Flags that are read again and again: cancel_future works here."""
        await read(request)
        return Json({"sample_cancel_enabled": True})

    async def create(self, request: Request, caller: Caller) -> Response:
        """Opens a session, once for each X-Idempotency-Key."""
        body = await parse_json(request, bodies.CreateSession, await read(request))
        key = request.headers.get("x-idempotency-key")
        if body.project_id is not None:
            raise Unimplemented("project_id: Fovea has no projects; leave it out", field="project_id")
        session = await self._sessions.create(caller, body.tags, body.user_metadata or {}, key, body.display_name)
        return Json({"type": "create_session", "session_id": session.session_id})

    async def heartbeat(self, request: Request, caller: Caller) -> Response:
        """Keeps a session alive; 410 once it is over."""
        body = await parse_json(request, bodies.Heartbeat, await read(request))
        await self._sessions.require(caller, body.session_id)
        return Json({"type": "session_heartbeat"})

    async def finish(self, request: Request, caller: Caller) -> Response:
        """Ends a session."""
        body = await parse_json(request, bodies.FinishSession, await read(request))
        session_id = request.path_params["session_id"]
        await self._sessions.finish(caller, session_id, body.reason.type, body.detail)
        return Json({"status": "finished"})

    async def page(self, request: Request, caller: Caller) -> Response:
        """The caller's sessions."""
        limit, offset = paging(request, 20, _MOST_SESSIONS)
        return Json({"sessions": await self._sessions.page(caller, limit, offset)})

    async def get(self, request: Request, caller: Caller) -> Response:
        """What a session owns."""
        session = await self._sessions.get(caller, request.path_params["session_id"])
        model_ids, sampler_ids = await self._sessions.contents(session)
        metadata = {name: str(value) for name, value in session.user_metadata.items()}
        answer = {"training_run_ids": model_ids, "sampler_ids": sampler_ids, "user_metadata": metadata}
        return Json(answer | ({"display_name": session.display_name} if session.display_name else {}))

    async def get_capabilities(self, request: Request, caller: Caller) -> Response:
        """The served models."""
        served = await self._capabilities.get()
        model = {
            "model_name": served.name,
            "max_context_length": served.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        return Json({"supported_models": [model]})

    async def telemetry(self, request: Request, caller: Caller) -> Response:
        """Accepts what clients report, and reads none of it: the server discards it."""
        return Json({"status": "accepted"})


def paging(request: Request, limit: int, most: int) -> tuple[int, int]:
    """limit and offset of a query. Raises InvalidInput if they are no counts."""
    return min(_count(request, "limit", limit), most), _count(request, "offset", 0)


def _count(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    # No longer than INT64_MAX is: Python refuses to read a number of thousands of digits, and the database one of 20.
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS and int(text) <= INT64_MAX):
        raise InvalidInput(f"{name} is {text[:40]!r}; it must be a whole number, 0 .. {INT64_MAX}", field=name)
    return int(text)
