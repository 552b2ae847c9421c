"""Routes of uploads, as SDK 0.39 asks for them: begin, send each file to its link, finish."""

from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import InvalidInput
from fovea_gateway.checkpoints.uploads import UploadLink, Uploads
from fovea_gateway.http.endpoint import Endpoints, Json
from fovea_gateway.http.lora_config import LoraConfig
from fovea_gateway.http.request_body import Body, arriving, parse_json, read
from fovea_gateway.replicas.base_models import BaseModels
from fovea_gateway.scopes import Scope


class StartUpload(Body):
    """POST external_weights_upload_start."""

    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None


class FinishUpload(Body):
    """POST external_weights_upload_finish."""

    upload_id: str


class UploadRoutes:
    """Handlers of uploads.

    Args:
        lora_message: What of our wire a body means.
        base_path: In front of all paths, without trailing slash.
        patience_s: Seconds that a body may take to begin.
    """

    def __init__(
        self,
        uploads: Uploads,
        base_models: BaseModels,
        lora_message: Callable[[LoraConfig], weights_pb2.LoraConfig],
        base_path: str,
        patience_s: float,
    ) -> None:
        self._uploads, self._base_models, self._lora_message = uploads, base_models, lora_message
        self._base_path, self._patience_s = base_path, patience_s

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("POST", "external_weights_upload_start", self.start, Scope.TRAIN),
            endpoints.keyless_route("PUT", "uploads/{upload}/{file}", self.receive),
            endpoints.route("POST", "external_weights_upload_finish", self.finish, Scope.TRAIN),
        ]

    async def start(self, request: Request, owner: str) -> Response:
        """A signed URL for each file, on the host that the client used, and when they expire."""
        body = await parse_json(request, StartUpload, await read(request))
        if body.destination_project_id is not None:
            raise InvalidInput("destination_project_id: there are no projects here", field="destination_project_id")
        self._base_models.check_trained(body.base_model)
        if body.lora_config.rank < 1:
            raise InvalidInput("lora_config.rank must be 1 or more: adapters are what is taken", field="lora_config")
        lora = self._lora_message(body.lora_config)
        upload_id, links = await self._uploads.start(owner, body.base_model, lora)
        root = f"{request.url.scheme}://{request.url.netloc}{self._base_path}/api/v1/uploads"
        urls = {link.file: f"{root}/{_link_path(link)}" for link in links}
        expires = datetime.fromtimestamp(links[0].expires_at, UTC).isoformat()
        return Json({"upload_id": upload_id, "urls": urls, "expires": expires})

    async def receive(self, request: Request) -> Response:
        """Keeps a file."""
        parts, query = request.path_params, request.query_params
        try:
            expires_at = int(query.get("expires", ""))
        except ValueError:
            raise InvalidInput("expires is missing from this link, or is no number", field="expires") from None
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidInput("send the file as it is, without Content-Encoding")
        link = UploadLink(parts["upload"], parts["file"], expires_at, query.get("signature", ""))
        declared = int(request.headers.get("content-length") or 0)
        await self._uploads.receive(link, declared, arriving(request, self._patience_s))
        return Response(status_code=200)

    async def finish(self, request: Request, owner: str) -> Response:
        """Makes a checkpoint of what was sent."""
        body = await parse_json(request, FinishUpload, await read(request))
        return Json({"tinker_path": await self._uploads.finish(owner, body.upload_id)})


def _link_path(link: UploadLink) -> str:
    query = urlencode({"expires": link.expires_at, "signature": link.signature})
    return f"{link.upload_id}/{quote(link.file)}?{query}"
