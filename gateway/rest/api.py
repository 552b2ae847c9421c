"""The ASGI application of the REST API."""

from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import NotFound
from gateway.capabilities import Capabilities
from gateway.checkpoints import Checkpoints
from gateway.futures.board import FutureBoard
from gateway.keys import KeyRing
from gateway.models import Models
from gateway.rest.checkpoints import CheckpointRoutes
from gateway.rest.endpoint import Endpoints, Json, error_response
from gateway.rest.futures import FutureRoutes
from gateway.rest.sampling import SamplingRoutes
from gateway.rest.sessions import SessionRoutes
from gateway.rest.training import TrainingRoutes
from gateway.sampling import Sampling
from gateway.sessions import Sessions
from gateway.settings import GatewaySettings
from gateway.training import Training


def build_api(
    settings: GatewaySettings,
    keys: KeyRing,
    sessions: Sessions,
    capabilities: Capabilities,
    models: Models,
    training: Training,
    sampling: Sampling,
    board: FutureBoard,
    checkpoints: Checkpoints,
) -> Starlette:
    """All routes over the use cases."""
    endpoints = Endpoints(keys, settings.base_path.rstrip("/"))
    limit = settings.max_body_bytes
    groups: list[Routes] = [
        SessionRoutes(sessions, capabilities, settings.sdk_flags, limit),
        TrainingRoutes(training, models, sampling, settings),
        SamplingRoutes(sampling, limit),
        FutureRoutes(board, settings.poll_hold_s, limit),
        CheckpointRoutes(checkpoints, models, limit),
    ]
    routes = [route for group in groups for route in group.routes(endpoints)]
    return Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_method})


class Routes(Protocol):
    """Handlers that belong together."""

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        ...


async def _no_route(request: Request, error: Exception) -> Response:
    return error_response(NotFound(f"Fovea has no {request.url.path}"))


async def _no_method(request: Request, error: Exception) -> Response:
    return Json({"detail": f"{request.url.path} does not take {request.method}"}, status_code=405)
