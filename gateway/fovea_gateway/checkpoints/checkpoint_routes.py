"""Routes of checkpoints, exports and uploads, as SDK 0.39 calls them.

Listing the files of an export needs an API key. Fetching them, or sending the files of an upload, needs a signed link.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

from pydantic import AwareDatetime, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import InvalidInput
from fovea_gateway.access.api_keys import Scope, asked_owner
from fovea_gateway.access.audit_log import VALUES
from fovea_gateway.access.sign_ins import Signature
from fovea_gateway.checkpoints.checkpoint import EXTERNAL, SAMPLER, SCHEME, TRAINING, Checkpoint
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, Search
from fovea_gateway.checkpoints.exports import Exports, Link
from fovea_gateway.checkpoints.uploads import UploadLink, Uploads
from fovea_gateway.http.endpoint import Endpoints, Json, check_query, iso_time, paging
from fovea_gateway.http.model_inputs import LoraConfig
from fovea_gateway.http.request_body import Body, arriving, parse_json, read
from fovea_gateway.replicas.base_models import BaseModels

_TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
_MOST = 1000
_SCANNED, _MOST_SCANNED = 200, 2000
"""Checkpoints that a search by metadata examines, per query and in total; the answer then says where to continue."""
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_MEDIA_TYPE = "application/octet-stream"


class WeightsInfo(Body):
    """POST weights_info."""

    tinker_path: str


class SetTtl(Body):
    """PUT .../ttl."""

    ttl_seconds: int | None


class SearchOwner(Body):
    """The owner in a search: the caller, or all owners with checkpoints that the caller may read."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = Field([])


class SearchCursor(Body):
    """The last checkpoint of the previous page."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: str


class SearchCheckpoints(Body):
    """POST checkpoints/search, of SDK 0.39."""

    project_ids: list[str] | None = Field(None, max_length=100)
    user_metadata: dict[str, str] = Field({})
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: SearchOwner = SearchOwner()
    base_models: list[str] | None = None
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None

    def first(self, owner: str) -> Search:
        """Returns the first database query. The cursor's time is in whole microseconds, so the query starts one
        microsecond later, and `matches` removes the repeated checkpoints.
        """
        types = {kind: segment for segment, kind in _TYPES.items()}
        return Search(
            owner,
            _SCANNED if self.user_metadata else self.limit + 1,
            self.owner.type == "accessible",
            types.get(self.checkpoint_type or ""),
            self.base_models,
            (self.cursor.last_created_at.timestamp() + 1e-6, "") if self.cursor is not None else None,
            self.project_ids,
        )

    def matches(self, checkpoint: Checkpoint) -> bool:
        """Returns whether a checkpoint has the metadata and comes after the cursor."""
        return self.user_metadata.items() <= (checkpoint.user_metadata or {}).items() and (
            self.cursor is None or _place(checkpoint) < (self.cursor.last_created_at, self.cursor.last_checkpoint_uuid)
        )


class StartUpload(Body):
    """POST external_weights_upload_start."""

    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None


class FinishUpload(Body):
    """POST external_weights_upload_finish."""

    upload_id: str


class CheckpointRoutes:
    """Handlers of the checkpoint routes."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def routes(self, endpoints: Endpoints) -> list[Route]:
        run = "training_runs/{run}"
        checkpoint = f"{run}/checkpoints/{{segment}}/{{name}}"
        return [
            endpoints.route("POST", "weights_info", self.weights_info, Scope.READ),
            endpoints.route("DELETE", checkpoint, self.delete, Scope.TRAIN),
            endpoints.route("PUT", f"{checkpoint}/ttl", self.set_ttl, Scope.TRAIN),
            endpoints.route("POST", f"{checkpoint}/publish", self.publish, Scope.TRAIN),
            endpoints.route("DELETE", f"{checkpoint}/publish", self.unpublish, Scope.TRAIN),
            *(
                endpoints.route(method, f"{run}/checkpoints/{{name}}{action}", self.untyped, Scope.TRAIN)
                for method, action in (("DELETE", ""), ("PUT", "/ttl"), ("POST", "/publish"))
            ),
            endpoints.route("GET", "checkpoints", self.page, Scope.READ),
            endpoints.route("POST", "checkpoints/search", self.search, Scope.READ),
        ]

    async def weights_info(self, request: Request, owner: str) -> Response:
        """Describes the weights of a checkpoint of any kind that the caller may read."""
        body = await parse_json(request, WeightsInfo, await read(request))
        checkpoint = await self._checkpoints.find(owner, body.tinker_path, "tinker_path")
        lora = checkpoint.lora
        answer: dict[str, Any] = {
            "base_model": checkpoint.base_model,
            "is_lora": lora.rank > 0,
            "optimizer_config": {"type": "adamw"},
        }
        if lora.rank:
            answer |= {
                "lora_rank": lora.rank,
                "train_unembed": lora.train_unembedding,
                "train_mlp": lora.train_mlp,
                "train_attn": lora.train_attention,
            }
        return Json(answer)

    async def page(self, request: Request, owner: str) -> Response:
        """Lists a page of checkpoints: the caller's own, or for the scope admin those of another owner or of all
        (`owner=*`).
        """
        check_query(request, "limit", "offset", "owner")
        limit, offset = paging(request, 100, _MOST)
        whose = asked_owner(request.query_params.get("owner", ""), "checkpoints")
        page, total = await self._checkpoints.page(whose, limit, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        listed = [checkpoint_json(checkpoint) for checkpoint in page]
        if whose != owner:
            listed = [one | {"owner": checkpoint.owner} for one, checkpoint in zip(listed, page, strict=True)]
        return Json({"checkpoints": listed, "cursor": cursor})

    async def search(self, request: Request, owner: str) -> Response:
        """Lists a page of the checkpoints that match, newest first, and the cursor of the next page.

        In a search by metadata a page may have fewer than `limit` checkpoints and still not be the last one.
        """
        body = await parse_json(request, SearchCheckpoints, await read(request))
        if body.owner.type == "user":
            raise InvalidInput(
                "owner: search `own` or `accessible` checkpoints; Fovea has no owner URNs", field="owner"
            )
        search, page, count = body.first(owner), list[Checkpoint](), 0
        last: Checkpoint | None = None
        while len(page) <= body.limit and count < _MOST_SCANNED:
            found = await self._checkpoints.search(search)
            page += filter(body.matches, found)
            count += len(found)
            last = found[-1] if len(found) == search.limit else None
            if last is None:
                break
            search = search._replace(before=(last.created_at, last.path))
        if len(page) > body.limit:
            page = page[: body.limit]
            last = page[-1]
        cursor = None
        if last is not None:
            created_at, path = _place(last)
            cursor = {"last_created_at": created_at.isoformat(), "last_checkpoint_uuid": path}
        return Json({"checkpoints": [checkpoint_json(each) for each in page], "next_cursor": cursor})

    async def delete(self, request: Request, owner: str) -> Response:
        await self._checkpoints.delete(owner, _path(request))
        return Json({"status": "deleted"})

    async def untyped(self, request: Request, owner: str) -> Response:
        """Refuses an id that is only a name, because a run may have a checkpoint of each kind with that name."""
        name = request.path_params["name"]
        kinds = ", ".join(f"{segment}/{name}" for segment in _TYPES)
        raise InvalidInput(
            f"the checkpoint id {name!r} lacks its kind: use one of {kinds}, as listings show", field="checkpoint_id"
        )

    async def set_ttl(self, request: Request, owner: str) -> Response:
        """Sets or removes a checkpoint's expiry."""
        body = await parse_json(request, SetTtl, await read(request))
        VALUES.set(body.model_dump())
        await self._checkpoints.set_ttl(owner, _path(request), body.ttl_seconds)
        return Json({"status": "updated"})

    async def publish(self, request: Request, owner: str) -> Response:
        """Lets every caller read a checkpoint. Publishing it again is not an error."""
        await self._checkpoints.set_public(owner, _path(request), public=True)
        return Json({"status": "published"})

    async def unpublish(self, request: Request, owner: str) -> Response:
        """Withdraws a published checkpoint. It is not an error if the checkpoint was not public."""
        await self._checkpoints.set_public(owner, _path(request), public=False)
        return Json({"status": "unpublished"})


class ExportRoutes:
    """Handlers of the export routes.

    Args:
        base_path: The prefix of all paths, without trailing slash.
    """

    def __init__(self, exports: Exports, base_path: str) -> None:
        self._exports, self._base_path = exports, base_path

    def routes(self, endpoints: Endpoints) -> list[Route]:
        links = "training_runs/{run}/checkpoints/{segment}/{name}/external_weights_urls"
        return [
            endpoints.route("GET", links, self.links, Scope.READ),
            endpoints.keyless_route("GET", "exports/{run}/{segment}/{name}/{file:path}", self.file),
        ]

    async def links(self, request: Request, owner: str) -> Response:
        """Returns a signed URL for each file, on the host that the client used, and when the URLs expire."""
        links, expires_at = await self._exports.links(owner, _path(request))
        root = f"{request.url.scheme}://{request.url.netloc}{self._base_path}/api/v1/exports"
        urls = {link.file: f"{root}/{_link_path(link)}" for link in links}
        return Json({"urls": urls, "expires": iso_time(expires_at)})

    async def file(self, request: Request) -> Response:
        """Serves a file, or one range of it; also handles HEAD."""
        parts = request.path_params
        places = (parts["run"], parts["segment"], parts["name"], parts["file"])
        link = Link(*places, Signature.parse(request.query_params))
        file = await self._exports.follow(link)
        # The folder of an export is never written twice, so its name identifies the content.
        tag = f'"{file.uri.rpartition(".")[2]}-{file.size_bytes}"'
        asked = parse_range(request.headers.get("range"), file.size_bytes)
        if request.headers.get("if-range", tag) != tag:
            asked = None
        headers = {"Accept-Ranges": "bytes", "ETag": tag, "X-Content-Type-Options": "nosniff"}
        if asked is not None and not asked:
            headers["Content-Range"] = f"bytes */{file.size_bytes}"
            return Json({"detail": f"{file.name} has {file.size_bytes} bytes"}, status_code=416, headers=headers)
        wanted = range(file.size_bytes) if asked is None else asked
        headers["Content-Length"] = str(len(wanted))
        if asked is not None:
            headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{file.size_bytes}"
        status = 200 if asked is None else 206
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers, media_type=_MEDIA_TYPE)
        pieces = await self._exports.read(file, wanted.start, len(wanted))
        return StreamingResponse(pieces, status, headers, _MEDIA_TYPE)


class UploadRoutes:
    """Handlers of the upload routes.

    Args:
        lora_message: Converts a request's LoRA configuration into the protobuf message.
        base_path: The prefix of all paths, without trailing slash.
        patience_s: Seconds to wait for a body to begin.
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
        """Returns a signed URL for each file, on the host that the client used, and when the URLs expire."""
        body = await parse_json(request, StartUpload, await read(request))
        if body.destination_project_id is not None:
            raise InvalidInput(
                "destination_project_id: an uploaded adapter has no session, so no project; leave the field out",
                field="destination_project_id",
            )
        self._base_models.check_trained(body.base_model)
        if body.lora_config.rank < 1:
            raise InvalidInput("lora_config.rank must be 1 or more: only adapters can be uploaded", field="lora_config")
        lora = self._lora_message(body.lora_config)
        upload_id, links = await self._uploads.start(owner, body.base_model, lora)
        root = f"{request.url.scheme}://{request.url.netloc}{self._base_path}/api/v1/uploads"
        urls = {link.file: f"{root}/{link.upload_id}/{quote(link.file)}?{link.signature}" for link in links}
        expires = iso_time(links[0].signature.expires_at)
        return Json({"upload_id": upload_id, "urls": urls, "expires": expires})

    async def receive(self, request: Request) -> Response:
        """Stores a file."""
        parts, signature = request.path_params, Signature.parse(request.query_params)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidInput("uploads do not support Content-Encoding: send the file uncompressed")
        link = UploadLink(parts["upload"], parts["file"], signature)
        declared = int(request.headers.get("content-length") or 0)
        await self._uploads.receive(link, declared, arriving(request, self._patience_s))
        return Response(status_code=200)

    async def finish(self, request: Request, owner: str) -> Response:
        """Makes the uploaded files a checkpoint."""
        body = await parse_json(request, FinishUpload, await read(request))
        return Json({"tinker_path": await self._uploads.finish(owner, body.upload_id)})


def parse_range(header: str | None, size_bytes: int) -> range | None:
    """Returns the bytes that a Range header asks for (RFC 9110, section 14); empty if they are beyond the end of the
    file.

    Returns None, which means the whole file, if there is no header, or if the header has another unit, several ranges
    or a last byte before the first: servers may ignore those.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or not any(match.groups()):
        return None
    first, last = (int(text) if text else None for text in match.groups())
    if first is None:
        return range(max(size_bytes - (last or 0), 0), size_bytes)
    if last is not None and last < first:
        return None
    return range(first, size_bytes if last is None else min(last + 1, size_bytes))


def _link_path(link: Link) -> str:
    return f"{quote(link.run)}/{link.segment}/{quote(link.name)}/{quote(link.file)}?{link.signature}"


def _path(request: Request) -> str:
    parts = request.path_params
    return f"{SCHEME}{parts['run']}/{parts['segment']}/{parts['name']}"


def _place(checkpoint: Checkpoint) -> tuple[datetime, str]:
    """Returns the sort key of a checkpoint, in the precision of a cursor."""
    return datetime.fromtimestamp(checkpoint.created_at, UTC), checkpoint.path


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the JSON of a checkpoint in a listing."""
    return {
        "checkpoint_id": f"{checkpoint.segment}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.segment],
        "time": iso_time(checkpoint.created_at),
        "tinker_path": checkpoint.path,
        "base_model": checkpoint.base_model,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata or None,
        "expires_at": None if checkpoint.expires_at is None else iso_time(checkpoint.expires_at),
    }
