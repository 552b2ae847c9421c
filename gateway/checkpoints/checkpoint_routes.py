"""Routes of training runs and checkpoints."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import InvalidInput, Unimplemented
from gateway.checkpoints.checkpoint_registry import Checkpoints
from gateway.checkpoints.checkpoint_rows import Checkpoint
from gateway.checkpoints.copies import Copies
from gateway.http import bodies
from gateway.http.endpoint import Endpoints, Json
from gateway.http.request_body import parse_json, read
from gateway.identity import EXTERNAL, SAMPLER, SCHEME, TRAINING, Caller
from gateway.sessions.session_routes import paging
from gateway.training.model_rows import Model, ModelState

_TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
_SCOPES = {"owned": False, "accessible": True}
_MOST = 1000
_ACCESS_TOKEN = "x-tinker-weights-access-token"


class CheckpointRoutes:
    """Handlers of training runs and checkpoints."""

    def __init__(self, checkpoints: Checkpoints, copies: Copies) -> None:
        self._checkpoints, self._copies = checkpoints, copies

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        run = "training_runs/{run}"
        checkpoint = f"{run}/checkpoints/{{segment}}/{{name}}"
        return [
            endpoints.route("POST", "weights_info", self.weights_info),
            endpoints.route("GET", "training_runs", self.runs),
            endpoints.route("GET", run, self.run),
            endpoints.route("GET", f"{run}/checkpoints", self.of_run),
            endpoints.route("DELETE", checkpoint, self.delete),
            endpoints.route("PUT", f"{checkpoint}/ttl", self.set_ttl),
            endpoints.route("POST", f"{checkpoint}/publish", self.publish),
            endpoints.route("DELETE", f"{checkpoint}/publish", self.unpublish),
            *(
                endpoints.route(method, f"{run}/checkpoints/{{name}}{action}", self.untyped)
                for method, action in (("DELETE", ""), ("PUT", "/ttl"), ("POST", "/publish"))
            ),
            endpoints.route("GET", "checkpoints", self.page),
            endpoints.route("POST", "copy_weights", self.copy),
        ]

    async def weights_info(self, request: Request, caller: Caller) -> Response:
        """Describes the weights of a checkpoint of any kind that the caller may read."""
        body = await parse_json(request, bodies.WeightsInfo, await read(request))
        checkpoint = await self._checkpoints.find(caller, body.tinker_path, "tinker_path")
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

    async def runs(self, request: Request, caller: Caller) -> Response:
        """A page of training runs: the caller's, or with access_scope=accessible also those with something public."""
        with_public = _with_public(request, "limit", "offset", "project_id")
        limit, offset = paging(request, 20, _MOST)
        page, total = await self._checkpoints.runs(caller, limit, offset, with_public)
        listed = [_run_json(model, checkpoints) for model, checkpoints in page]
        return Json({"training_runs": listed, "cursor": {"offset": offset, "limit": limit, "total_count": total}})

    async def run(self, request: Request, caller: Caller) -> Response:
        """One training run."""
        with_public = _with_public(request)
        return Json(_run_json(*await self._checkpoints.run(caller, request.path_params["run"], with_public)))

    async def of_run(self, request: Request, caller: Caller) -> Response:
        """The checkpoints of a run that the caller may read, all of them."""
        check_query(request)
        found = await self._checkpoints.of_run(caller, request.path_params["run"])
        return Json({"checkpoints": [_checkpoint_json(checkpoint) for checkpoint in found]})

    async def page(self, request: Request, caller: Caller) -> Response:
        """A page of the caller's checkpoints."""
        check_query(request, "limit", "offset")
        limit, offset = paging(request, 100, _MOST)
        page, total = await self._checkpoints.page(caller, limit, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return Json({"checkpoints": [_checkpoint_json(checkpoint) for checkpoint in page], "cursor": cursor})

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Deletes a checkpoint."""
        await self._checkpoints.delete(caller, _path(request))
        return Json({"status": "deleted"})

    async def untyped(self, request: Request, caller: Caller) -> Response:
        """Refuses an id that is only a name: a run may have one of each kind."""
        name = request.path_params["name"]
        kinds = ", ".join(f"{segment}/{name}" for segment in _TYPES)
        raise InvalidInput(
            f"the checkpoint id {name!r} lacks its kind: write one of {kinds}, as listings do", field="checkpoint_id"
        )

    async def set_ttl(self, request: Request, caller: Caller) -> Response:
        """Sets or removes a checkpoint's expiry."""
        body = await parse_json(request, bodies.SetTtl, await read(request))
        await self._checkpoints.set_ttl(caller, _path(request), body.ttl_seconds)
        return Json({"status": "updated"})

    async def publish(self, request: Request, caller: Caller) -> Response:
        """Lets every caller read a checkpoint; no error if it was so already."""
        await self._checkpoints.set_public(caller, _path(request), public=True)
        return Json({"status": "published"})

    async def unpublish(self, request: Request, caller: Caller) -> Response:
        """Takes a checkpoint back; no error if it was not public."""
        await self._checkpoints.set_public(caller, _path(request), public=False)
        return Json({"status": "unpublished"})

    async def copy(self, request: Request, caller: Caller) -> Response:
        """Copies a checkpoint into a training run of its own, once for each X-Idempotency-Key and place."""
        body = await parse_json(request, bodies.CopyWeights, await read(request))
        if body.destination_project_id is not None:
            raise Unimplemented(
                "there are no projects here: send session_id and model_seq_id, not destination_project_id",
                field="destination_project_id",
            )
        if body.weights_access_token is not None or _ACCESS_TOKEN in request.headers:
            raise Unimplemented(
                "weights_access_token is not supported: publish the source instead", field="weights_access_token"
            )
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidInput("send session_id with model_seq_id: they place the copy", field="session_id")
        path = await self._copies.copy(
            caller, body.source_path, body.session_id, body.model_seq_id, body.ttl_seconds,
            request.headers.get("x-idempotency-key"),
        )  # fmt: skip
        return Json({"tinker_path": path})


def _path(request: Request) -> str:
    parts = request.path_params
    return f"{SCHEME}{parts['run']}/{parts['segment']}/{parts['name']}"


def check_query(request: Request, *known: str) -> None:
    """Raises Unimplemented that names a query parameter which would be ignored."""
    for name in request.query_params:
        if name not in known:
            raise Unimplemented(f"{request.url.path} does not take the parameter {name}", field=name)


def _with_public(request: Request, *known: str) -> bool:
    """Whether what others published is asked for. Raises InvalidInput, Unimplemented."""
    check_query(request, "access_scope", *known)
    if "project_id" in request.query_params:
        raise Unimplemented("there are no projects here: leave project_id out", field="project_id")
    scope = request.query_params.get("access_scope", "owned")
    if scope not in _SCOPES:
        raise InvalidInput(f"access_scope is {scope!r}; it is owned or accessible", field="access_scope")
    return _SCOPES[scope]


def _run_json(model: Model, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    last = {
        segment: next((_checkpoint_json(c) for c in checkpoints if c.segment == segment), None)
        for segment in (TRAINING, SAMPLER)
    }
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": model.lora.rank > 0,
        "corrupted": model.state in (ModelState.LOST, ModelState.FAILED),
        "lora_rank": model.lora.rank or None,
        "last_request_time": _time(model.last_request_at),
        "last_checkpoint": last[TRAINING],
        "last_sampler_checkpoint": last[SAMPLER],
        "user_metadata": {name: str(value) for name, value in model.user_metadata.items()},
    }


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.segment}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.segment],
        "time": _time(checkpoint.created_at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata or None,
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }


def _time(seconds: float) -> str:
    """ISO 8601 with an offset: the CLI compares with aware times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
