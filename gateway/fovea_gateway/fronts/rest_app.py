"""The ASGI application of Tinker's REST API, and the routes that belong to no feature."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.runtime.credentials import redactor_of
from fovea.wire.conventions import MAX_IMAGE_ASPECT_RATIO, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, is_token
from fovea.wire.errors import NotFound
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.checkpoints.checkpoint_routes import CheckpointRoutes, ExportRoutes, UploadRoutes
from fovea_gateway.fronts.administration import AdminRoutes, SignInRoutes
from fovea_gateway.fronts.components import Components
from fovea_gateway.fronts.openai_answers import OpenAIAnswers
from fovea_gateway.fronts.openai_routes import OPENAI, OpenAIRoutes
from fovea_gateway.health import Health
from fovea_gateway.http.endpoint import (
    BurstLimiter,
    BurstMiddleware,
    Endpoints,
    Json,
    Readiness,
    ReadyMiddleware,
    Routes,
    error_response,
    key_of,
)
from fovea_gateway.http.model_inputs import lora_message
from fovea_gateway.http.request_body import read
from fovea_gateway.live.live_routes import LiveRoutes
from fovea_gateway.replicas.base_models import BaseModels
from fovea_gateway.sampling import sample_wire
from fovea_gateway.sampling.sample_routes import SamplingRoutes, asks_for_experts
from fovea_gateway.sessions.session_routes import FutureRoutes, SessionRoutes
from fovea_gateway.sessions.session_trace import TraceRoutes
from fovea_gateway.settings import GatewaySettings
from fovea_gateway.training import training_routes
from fovea_gateway.training.training_routes import TrainingRoutes
from fovea_gateway.training.training_runs import TrainingRunRoutes

_FLAGS = {
    "proto_compress_fwdbwd": True,
    # The SDK's default transport, pyqwest 0.12, aborts about one interpreter exit in ten on Python 3.11: its threads
    # are still delivering the last answer. httpx does not; see docs/lab/notes.md.
    "use_pyqwest_transport": False,
    # A client polls once for all its samples instead of once for each; unpickled clients get numbers that never clash.
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": True,
}
_HOSTED_ONLY = {
    ("DELETE", "auth/apikey/me"): "deleting keys; its operator revokes them with `fovea keys revoke`",
}
"""Routes that only the hosted service has. Each is refused with an error that names the missing feature."""


def build_api(components: Components, settings: GatewaySettings, ready: Readiness) -> Starlette:
    """Returns the application with all routes. Until the gateway is ready, it refuses requests with an error that
    clients retry.
    """
    base_path = settings.base_path.rstrip("/")
    endpoints = Endpoints(
        components.keys.identify, components.owners.check_rate, base_path, components.request_memory,
        settings.request_timeout_s, components.activity.note_refusal, components.paths.hide,
        components.audit, components.sign_ins.identify,
    )  # fmt: skip
    limiter = BurstLimiter()
    read_logs = partial(components.base_models.read_logs, redactor_of(settings.model_dump(mode="json")))
    future_routes = FutureRoutes(
        components.futures,
        limiter,
        {**training_routes.ENCODERS, **sample_wire.ENCODERS},
        settings.poll_hold_s,
        settings.inline_limit_bytes,
        settings.compress_from_bytes,
    )
    lora = partial(lora_message, alpha=settings.default_lora_alpha, train_vision=settings.train_vision)
    # Routes are tried in order, so the most frequent ones come first.
    groups: list[Routes] = [
        future_routes,
        SamplingRoutes(components.sampling, components.futures, settings.max_body_bytes, settings.poll_hold_s),
        OpenAIRoutes(
            OpenAIAnswers(components.sampling, components.base_models),
            components.health.served_models,
            components.checkpoints,
            settings.max_body_bytes,
        ),
        ServerRoutes(components.health, components.base_models, settings.sdk_flags, settings.max_body_bytes),
        SessionRoutes(components.sessions, components.database),
        TraceRoutes(components.sessions, components.database, components.link_signer, base_path),
        TrainingRoutes(
            components.training,
            components.models,
            components.custom_losses,
            components.base_models,
            components.checkpoints,
            lora,
            settings.max_body_bytes,
        ),
        TrainingRunRoutes(components.training_runs, components.copies),
        CheckpointRoutes(components.checkpoints),
        ExportRoutes(components.exports, base_path),
        UploadRoutes(components.uploads, components.base_models, lora, base_path, settings.request_timeout_s),
        AdminRoutes(
            components.keys, components.owners, components.database, components.audit, settings.gpu_hour_price_usd
        ),
        SignInRoutes(components.sign_ins, base_path, settings.oidc_public_url),
        LiveRoutes(components.live_view, components.models, components.keys.identify, base_path, read_logs),
    ]
    return Starlette(
        routes=[route for group in groups for route in group.routes(endpoints)],
        middleware=[Middleware(ReadyMiddleware, ready, base_path), Middleware(BurstMiddleware, limiter)],
        exception_handlers={404: _no_route(f"{base_path}{OPENAI.prefix}"), 405: _no_method},
    )


class ServerRoutes:
    """Handlers of requests about the server itself.

    Args:
        flags: Overrides of the flags sent to clients.
        max_body_bytes: The largest body of samples and losses.
    """

    def __init__(self, health: Health, base_models: BaseModels, flags: dict[str, Any], max_body_bytes: int) -> None:
        self._health, self._base_models = health, base_models
        self._flags, self._max_body_bytes = flags, max_body_bytes

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.open_route("healthz", {"status": "ok"}),
            endpoints.route("POST", "client/config", self.client_config, Scope.READ, exchanges=True),
            endpoints.route("POST", "client/dynamic_config", self.dynamic_config, Scope.READ),
            endpoints.route("GET", "get_server_capabilities", self.get_capabilities, Scope.READ),
            endpoints.route("POST", "telemetry", self.telemetry, Scope.READ),
            endpoints.route("GET", "auth/apikey/me", self.describe_key, Scope.READ),
            *(_refusal(endpoints, method, path, what) for (method, path), what in _HOSTED_ONLY.items()),
        ]

    async def client_config(self, request: Request, owner: str) -> Response:
        """Returns the client's flags; flags that are left out keep the SDK's defaults."""
        await read(request)
        # With this flag the gateway deletes results that the client reports as fetched, and with them the routed
        # experts.
        kept = {"sample_use_retrieve_futures": False} if asks_for_experts(request) else {}
        # Only a client with a token exchanges it; an API key is valid by itself.
        exchanged = {"pjwt_auth_enabled": True} if is_token(key_of(request) or "") else {}
        return Json(_FLAGS | exchanged | self._flags | kept)

    async def dynamic_config(self, request: Request, owner: str) -> Response:
        """Returns the flags that clients read repeatedly. They say that this server supports cancel_future."""
        await read(request)
        return Json({"sample_cancel_enabled": True})

    async def get_capabilities(self, request: Request, owner: str) -> Response:
        models = [
            {
                "model_name": served.name,
                "max_context_length": served.max_context_length,
                "trainable": served.is_trained,
                "sampleable": served.is_sampled,
                # Fovea's own fields, for fovea_data: the model's files, and the limits that rows must meet.
                "tokenizer_id": self._base_models.get(served.name).tokenizer_id,
                "max_lora_rank": served.max_lora_rank,
                "max_image_bytes": MAX_IMAGE_BYTES,
                "max_image_pixels": MAX_IMAGE_PIXELS,
                "max_image_aspect_ratio": MAX_IMAGE_ASPECT_RATIO,
                "max_body_bytes": self._max_body_bytes,
            }
            for served in await self._health.served_models()
        ]
        return Json({"supported_models": models})

    async def telemetry(self, request: Request, owner: str) -> Response:
        """Accepts and discards what clients report."""
        return Json({"status": "accepted"})

    async def describe_key(self, request: Request, owner: str) -> Response:
        """Describes the caller's key for `tinker auth login`. Fovea's keys have no organization or e-mail address."""
        return Json(
            {
                "key_id": int.from_bytes(owner.encode()[-6:], "big"),
                "name": owner,
                "note": "a key of this Fovea",
                "details": {"org_details": {"name": "Fovea"}, "user_details": {"email": ""}},
            }
        )


def _refusal(endpoints: Endpoints, method: str, path: str, what: str) -> Route:
    async def refuse(request: Request, owner: str) -> Response:
        raise NotFound(f"Fovea has no {path}: it does not offer {what}")

    return endpoints.route(method, path, refuse, Scope.READ)


def _no_route(openai: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Returns a handler for unknown routes, which answers in OpenAI's format below OpenAI's path."""

    async def refuse(request: Request, error: Exception) -> Response:
        say = OPENAI.answer_error if request.url.path.startswith(openai) else error_response
        return say(NotFound(f"Fovea has no {request.method} {request.url.path}"))

    return refuse


async def _no_method(request: Request, error: Exception) -> Response:
    return Json({"detail": f"{request.url.path} does not support {request.method}"}, status_code=405)
