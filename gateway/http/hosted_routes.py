"""Routes of what only the hosted service has: refused by name. And who a key belongs to, which its CLI asks for."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import NotFound
from gateway.http.endpoint import Endpoints, Json
from gateway.identity import Caller

_HOSTED = {
    ("POST", "sessions/search"): "searching sessions; list them with GET sessions",
    ("GET", "sessions/{session_id}/trace_export"): "traces of sessions; the gateway's --metrics-port has its figures",
    ("PUT", "sessions/{session_id}/project"): "projects",
    ("POST", "auth/token"): "JWTs; send the API key itself, as X-API-Key",
    ("DELETE", "auth/apikey/me"): "deleting keys; its operator does, by `fovea keys revoke`",
    ("GET", "billing/usage/events"): "billing",
    ("GET", "billing/usage/checkpoints/current"): "billing",
    ("GET", "audit"): "an audit log",
}


class HostedRoutes:
    """Handlers of what is not served here."""

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        refused = [_refusal(endpoints, method, path, what) for (method, path), what in _HOSTED.items()]
        return [endpoints.route("GET", "auth/apikey/me", self.describe_key), *refused]

    async def describe_key(self, request: Request, caller: Caller) -> Response:
        """The caller's key, for `tinker auth login`. Keys here belong to no organization and to nobody's address."""
        return Json(
            {
                "key_id": int.from_bytes(caller.owner.encode()[-6:], "big"),
                "name": caller.owner,
                "note": "a key of this Fovea",
                "details": {"org_details": {"name": "Fovea"}, "user_details": {"email": ""}},
            }
        )


def _refusal(endpoints: Endpoints, method: str, path: str, what: str) -> Route:
    async def refuse(request: Request, caller: Caller) -> Response:
        raise NotFound(f"Fovea has no {path}: it does not offer {what}")

    return endpoints.route(method, path, refuse)
