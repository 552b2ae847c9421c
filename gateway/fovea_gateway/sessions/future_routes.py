"""HTTP routes of futures."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import FoveaError
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.http.endpoint import BurstLimiter, Endpoints, Json, compress
from fovea_gateway.http.request_body import Body, parse_json, read
from fovea_gateway.sessions.future import Kind, Outcome, Pending, ResultEncoder
from fovea_gateway.sessions.futures import Futures

_PROTOBUF = "application/x-protobuf"
_PROTO_OFF_LOOP_BYTES, _JSON_OFF_LOOP_BYTES = 2**15, 2**13
"""The sizes from which a result is encoded in a thread. A number as JSON costs 0.5 us, so that 8 KiB cost 1 ms."""
_SPREAD = 0.2


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
