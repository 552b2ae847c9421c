"""The ASGI application of the REST API."""

from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import NotFound
from gateway.access.keyring import KeyRing
from gateway.access.quotas import Shares
from gateway.checkpoints.checkpoint_registry import Checkpoints
from gateway.checkpoints.checkpoint_routes import CheckpointRoutes
from gateway.checkpoints.copies import Copies
from gateway.checkpoints.export_routes import ExportRoutes
from gateway.checkpoints.exports import Exports
from gateway.futures.future_routes import FutureRoutes
from gateway.futures.futures import FutureBoard
from gateway.http.burst_limiter import BulkMiddleware, Turnstile
from gateway.http.endpoint import Endpoints, Json, error_response
from gateway.http.hosted_routes import HostedRoutes
from gateway.replicas.capabilities import Capabilities
from gateway.sampling.sample_routes import SamplingRoutes
from gateway.sampling.sampling_sessions import Sampling
from gateway.sessions.session_routes import SessionRoutes
from gateway.sessions.sessions import Sessions
from gateway.settings import GatewaySettings
from gateway.training.custom_loss_routes import CustomLossRoutes
from gateway.training.custom_losses import CustomLosses
from gateway.training.models import Models
from gateway.training.training import Training
from gateway.training.training_routes import TrainingRoutes


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
    copies: Copies,
    exports: Exports,
    custom_losses: CustomLosses,
    memory: Shares,
) -> Starlette:
    """All routes over the use cases."""
    endpoints = Endpoints(keys, settings.base_path.rstrip("/"), memory, settings.request_timeout_s)
    turnstile = Turnstile()
    # Routes are tried in order, so those that are asked thousands of times come first.
    groups: list[Routes] = [
        FutureRoutes(board, sampling, turnstile, settings),
        SamplingRoutes(sampling, settings.max_body_bytes),
        HostedRoutes(),
        SessionRoutes(sessions, capabilities, settings.sdk_flags),
        TrainingRoutes(training, models, sampling, settings),
        CheckpointRoutes(checkpoints, copies),
        CustomLossRoutes(custom_losses),
        ExportRoutes(exports, settings.base_path.rstrip("/")),
    ]
    routes = [route for group in groups for route in group.routes(endpoints)]
    return Starlette(
        routes=routes,
        middleware=[Middleware(BulkMiddleware, turnstile)],
        exception_handlers={404: _no_route, 405: _no_method},
    )


class Routes(Protocol):
    """Handlers that belong together."""

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        ...


async def _no_route(request: Request, error: Exception) -> Response:
    return error_response(NotFound(f"Fovea has no {request.method} {request.url.path}"))


async def _no_method(request: Request, error: Exception) -> Response:
    return Json({"detail": f"{request.url.path} does not take {request.method}"}, status_code=405)
