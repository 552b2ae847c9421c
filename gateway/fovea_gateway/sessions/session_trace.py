"""The timeline of a session's requests, in the JSON format that ui.perfetto.dev opens."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fovea_gateway.access.api_keys import Scope
from fovea_gateway.access.sign_ins import LinkSigner, Signature
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import futures
from fovea_gateway.http.endpoint import Endpoints, Json
from fovea_gateway.sessions.sessions import Sessions

_TRACE_TTL_S = 3600
_TRACED_PER_PIECE, _MOST_TRACED = 1000, 100_000


class TraceRoutes:
    """Handlers of the timeline.

    Args:
        signer: Signs the link to the timeline, which needs no API key.
        base_path: The prefix of all paths, without trailing slash.
    """

    def __init__(self, sessions: Sessions, database: Database, signer: LinkSigner, base_path: str) -> None:
        self._sessions, self._database, self._signer, self._base_path = sessions, database, signer, base_path

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("GET", "sessions/{session_id}/trace_export", self.link, Scope.READ),
            endpoints.keyless_route("GET", "sessions/{session_id}/trace", self.trace),
        ]

    async def link(self, request: Request, owner: str) -> Response:
        """Returns a signed URL of the timeline, on the host that the client used. It is valid for an hour."""
        session_id = (await self._sessions.get(owner, request.path_params["session_id"])).session_id
        signature = self._signer.sign(int(time.time()) + _TRACE_TTL_S, "trace", session_id)
        root = f"{request.url.scheme}://{request.url.netloc}{self._base_path}/api/v1/sessions"
        return Json({"status": "ready", "url": f"{root}/{quote(session_id)}/trace?{signature}"})

    async def trace(self, request: Request) -> Response:
        """Sends the timeline of the requests that the database holds, piece by piece."""
        session_id = request.path_params["session_id"]
        self._signer.check(Signature.parse(request.query_params), "trace_export", "trace", session_id)
        headers = {"content-disposition": "attachment"}
        return StreamingResponse(self._pieces(session_id), media_type="application/json", headers=headers)

    async def _pieces(self, session_id: str) -> AsyncIterator[bytes]:
        yield b'{"displayTimeUnit":"ms","traceEvents":[{"ph":"M","pid":0,"name":"process_name","args":{}}'
        numbers: dict[str, int] = {}
        after = (0.0, "")
        for _ in range(_MOST_TRACED // _TRACED_PER_PIECE):
            place = after
            rows = await self._database.read(lambda connection: _traced(connection, session_id, place))  # noqa: B023
            if not rows:
                break
            after = (rows[-1].created_at, rows[-1].future_id)
            events = (event for row in rows for event in _trace_events(row, numbers))
            yield b"".join(b"," + json.dumps(event, separators=(",", ":")).encode() for event in events)
        yield b"]}"


def _traced(connection: sa.Connection, session_id: str, after: tuple[float, str]) -> list[Any]:
    """Returns the next futures of a session, by the time of their requests."""
    place = futures.c.created_at, futures.c.future_id
    is_later = (place[0] > after[0]) | ((place[0] == after[0]) & (place[1] > after[1]))
    query = sa.select(futures).where(futures.c.session_id == session_id, is_later).order_by(*place)
    return list(connection.execute(query.limit(_TRACED_PER_PIECE)))


def _trace_events(row: Any, numbers: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yields the events of a request; the requests of a model or a sampling session form a process of the timeline."""
    if row.scope not in numbers:
        numbers[row.scope] = len(numbers) + 1
        yield {"ph": "M", "pid": numbers[row.scope], "name": "process_name", "args": {"name": row.scope}}
    common = {"pid": numbers[row.scope], "cat": row.kind, "id": row.future_id, "name": f"{row.kind} {row.seq_id}"}
    arguments = {"state": row.state, "tokens": row.token_count, "request_id": row.future_id}
    yield common | {"ph": "b", "ts": round(row.created_at * 1e6), "args": arguments}
    if row.finished_at is not None:
        yield common | {"ph": "e", "ts": round(row.finished_at * 1e6)}
