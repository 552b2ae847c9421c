"""Routes of traced losses."""

import json

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.api.v1 import gateway_pb2, trainer_pb2
from gateway.custom_losses import CustomLosses
from gateway.identity import Caller
from gateway.rest import bodies
from gateway.rest.body import parse_json, read
from gateway.rest.endpoint import Endpoints, Json


class CustomLossRoutes:
    """Handlers of traced losses."""

    def __init__(self, losses: CustomLosses, max_body_bytes: int) -> None:
        self._losses, self._max_body_bytes = losses, max_body_bytes

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        return [endpoints.route("POST", "create_custom_loss", self.create)]

    async def create(self, request: Request, caller: Caller) -> Response:
        """Submits a loss. What it may not do fails the future."""
        body = await parse_json(bodies.CreateCustomLoss, await read(request, self._max_body_bytes))
        loss = trainer_pb2.CustomLoss(
            name=body.name,
            inputs=[trainer_pb2.CustomLossInput(name=given.name, rank=given.rank) for given in body.inputs],
            graph=json.dumps(body.graph, separators=(",", ":")).encode(),
        )
        message = gateway_pb2.CreateCustomLossRequest(
            session_id=body.session_id, custom_loss_seq_id=body.custom_loss_seq_id, loss=loss
        )
        return Json({"request_id": await self._losses.submit(caller, message)})
