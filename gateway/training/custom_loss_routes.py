"""Routes of traced losses."""

import json

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.api.v1 import gateway_pb2, trainer_pb2
from fovea.wire.custom_loss import MAX_GRAPH_BYTES
from gateway.http import bodies
from gateway.http.endpoint import Endpoints, Json
from gateway.http.request_body import parse_json, read
from gateway.identity import Caller
from gateway.training.custom_losses import CustomLosses

_MOST_BYTES = 2 * MAX_GRAPH_BYTES
"""A graph as it is kept, with whatever white space a client puts in."""


class CustomLossRoutes:
    """Handlers of traced losses."""

    def __init__(self, losses: CustomLosses) -> None:
        self._losses = losses

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        return [endpoints.route("POST", "create_custom_loss", self.create)]

    async def create(self, request: Request, caller: Caller) -> Response:
        """Submits a loss. What it may not do fails the future."""
        body = await parse_json(request, bodies.CreateCustomLoss, await read(request, _MOST_BYTES))
        loss = trainer_pb2.CustomLoss(
            name=body.name,
            inputs=[trainer_pb2.CustomLossInput(name=given.name, rank=given.rank) for given in body.inputs],
            graph=json.dumps(body.graph, separators=(",", ":")).encode(),
        )
        message = gateway_pb2.CreateCustomLossRequest(
            session_id=body.session_id, custom_loss_seq_id=body.custom_loss_seq_id, loss=loss
        )
        return Json({"request_id": await self._losses.submit(caller, message)})
