"""Routes of futures."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.futures.board import FutureBoard
from gateway.futures.future import Pending
from gateway.identity import Caller
from gateway.rest import bodies, results
from gateway.rest.body import parse_json, read
from gateway.rest.endpoint import Endpoints, Json

_PROTOBUF = "application/x-protobuf"


class FutureRoutes:
    """Handlers of futures.

    Args:
        hold_s: Seconds that a poll of an unfinished future is held; clients give up at 45.
    """

    def __init__(self, board: FutureBoard, hold_s: float, max_body_bytes: int) -> None:
        self._board, self._hold_s, self._max_body_bytes = board, hold_s, max_body_bytes

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        return [
            endpoints.route("POST", "retrieve_future", self.retrieve),
            endpoints.route("POST", "cancel_future", self.cancel),
        ]

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        """The result of a future, its error (both with status 200), or 408 while there is none."""
        body = await parse_json(bodies.RetrieveFuture, await read(request, self._max_body_bytes))
        outcome = await self._board.wait(body.request_id, caller.owner, self._hold_s)
        if isinstance(outcome, Pending):
            waiting = {"queue_state": outcome.queue_state.value, "queue_state_reason": outcome.waiting_for}
            return Json({"type": "try_again", "request_id": body.request_id, **waiting}, status_code=408)
        if outcome.error is not None:
            return Json(results.error_json(outcome))
        if outcome.kind in results.PROTO_KINDS and _PROTOBUF in request.headers.get("accept", ""):
            return Response(results.to_proto(outcome), media_type=_PROTOBUF)
        return Json(results.to_json(outcome))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Stops a sample that nobody waits for; harmless for anything else."""
        body = await parse_json(bodies.CancelFuture, await read(request, self._max_body_bytes))
        await self._board.cancel(body.request_id, caller.owner)
        return Json({"status": "cancelled"})
