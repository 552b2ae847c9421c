"""Routes of futures."""

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.futures.completions import Completion, Target
from gateway.futures.future import Outcome, Pending
from gateway.futures.futures import FutureBoard
from gateway.http import bodies, results
from gateway.http.burst_limiter import Turnstile
from gateway.http.encoding import compress
from gateway.http.endpoint import Endpoints, Json
from gateway.http.request_body import parse_json, read
from gateway.identity import Caller
from gateway.sampling.sampling_sessions import Sampling
from gateway.settings import GatewaySettings

T = TypeVar("T")

_PROTOBUF = "application/x-protobuf"
_OFF_LOOP_BYTES = 2**20
_SPREAD = 0.2
_ACKNOWLEDGED, _ACKNOWLEDGED_BYTES = 2**16, 4 * 2**20
"""Results that one poll says it has: as many as a client may have had unfinished."""
_MOST_WAIT_S = 40.0
"""Clients give up at 45."""


class FutureRoutes:
    """Handlers of futures."""

    def __init__(self, board: FutureBoard, sampling: Sampling, turnstile: Turnstile, settings: GatewaySettings) -> None:
        self._board, self._sampling, self._turnstile, self._settings = board, sampling, turnstile, settings

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        return [
            endpoints.route("POST", "retrieve_future", self.retrieve),
            endpoints.route("POST", "retrieve_futures", self.retrieve_many),
            endpoints.route("POST", "cancel_future", self.cancel),
        ]

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        """The result of a future, its error (both with status 200), or 408 while there is none.

        A result above the inline limit is announced by its size, to clients that take that.
        """
        body = await parse_json(request, bodies.RetrieveFuture, await read(request))
        outcome = await self._board.wait(body.request_id, caller.owner, self._hold_s())
        await self._turnstile.enter()
        if isinstance(outcome, Pending):
            waiting = {"queue_state": outcome.queue_state.value, "queue_state_reason": outcome.waiting_for}
            return Json({"type": "try_again", "request_id": body.request_id, **waiting}, status_code=408)
        if outcome.error is not None:
            return Json(results.error_json(outcome))
        response = await self._result(outcome, request.headers.get("accept", ""))
        if body.allow_metadata_only and len(response.body) > self._settings.inline_limit_bytes:
            return Json({"status": "complete_metadata", "response_payload_size": len(response.body)})
        if len(response.body) < self._settings.compress_from_bytes:
            return response
        return await compress(response, request.headers.get("accept-encoding", ""))

    async def retrieve_many(self, request: Request, caller: Caller) -> Response:
        """What one client of a sampling session has finished since its cursor; held while there is nothing."""
        body = await parse_json(
            request, bodies.RetrieveFutures, await read(request, _ACKNOWLEDGED_BYTES), _ACKNOWLEDGED
        )
        target = Target(body.target.sampling_session_id, body.target.cloned_sampler_id)
        await self._sampling.get(caller, target.sampling_session_id)
        await self._board.acknowledge(target, body.retrieved_request_ids)
        timeout_s = self._hold_s() if body.timeout is None else min(body.timeout, _MOST_WAIT_S)
        found = await self._board.wait_any(target, body.prev_cursor, timeout_s)
        cursor = found[-1].number if found else body.prev_cursor
        return Json({"completions": [_completion_json(completion) for completion in found], "cursor": cursor})

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Stops a sample that nobody waits for; harmless for anything else."""
        body = await parse_json(request, bodies.CancelFuture, await read(request))
        await self._board.cancel(body.request_id, caller.owner)
        return Json({"status": "cancelled"})

    def _hold_s(self) -> float:
        # Polls that began together do not end together: their renewal would come as one burst.
        return self._settings.poll_hold_s * random.uniform(1 - _SPREAD, 1 + _SPREAD)

    @staticmethod
    async def _result(outcome: Outcome, accept: str) -> Response:
        if outcome.kind in results.PROTO_KINDS and _PROTOBUF in accept:
            return Response(await _off_loop(results.to_proto, outcome), media_type=_PROTOBUF)
        return await _off_loop(_json, outcome)


def _json(outcome: Outcome) -> Response:
    return Json(results.to_json(outcome))


async def _off_loop(function: Callable[[Outcome], T], outcome: Outcome) -> T:
    """Encodes a large result in a thread, so that others are answered meanwhile."""
    if len(outcome.result) < _OFF_LOOP_BYTES:
        return function(outcome)
    return await asyncio.to_thread(function, outcome)


def _completion_json(completion: Completion) -> dict[str, object]:
    if completion.is_failed:
        return {"state": "failed", "request_id": completion.future_id}
    return {
        "state": "finished",
        "request_id": completion.future_id,
        # Of the result as it is kept, which is close to the payload; the client reserves so much of its budget.
        "response_payload_uncompressed_size": completion.size_bytes,
    }
