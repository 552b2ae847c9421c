"""Routes of training runs and checkpoints."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.checkpoints import Checkpoints
from gateway.identity import SAMPLER, SCHEME, TRAINING, Caller
from gateway.models import Models
from gateway.rest import bodies
from gateway.rest.body import parse_json, read
from gateway.rest.endpoint import Endpoints, Json
from gateway.rest.sessions import paging
from gateway.store.checkpoints import Checkpoint
from gateway.store.models import Model, ModelState

_TYPES = {TRAINING: "training", SAMPLER: "sampler"}
_MOST = 1000


class CheckpointRoutes:
    """Handlers of training runs and checkpoints."""

    def __init__(self, checkpoints: Checkpoints, models: Models, max_body_bytes: int) -> None:
        self._checkpoints, self._models, self._max_body_bytes = checkpoints, models, max_body_bytes

    def routes(self, endpoints: Endpoints) -> list[Route]:
        """All of them."""
        run = "training_runs/{run}"
        return [
            endpoints.route("POST", "weights_info", self.weights_info),
            endpoints.route("GET", "training_runs", self.runs),
            endpoints.route("GET", run, self.run),
            endpoints.route("GET", f"{run}/checkpoints", self.of_run),
            endpoints.route("DELETE", f"{run}/checkpoints/{{segment}}/{{name}}", self.delete),
            endpoints.route("PUT", f"{run}/checkpoints/{{segment}}/{{name}}/ttl", self.set_ttl),
            endpoints.route("GET", "checkpoints", self.page),
        ]

    async def weights_info(self, request: Request, caller: Caller) -> Response:
        """Describes the weights of a checkpoint of either kind."""
        body = await parse_json(bodies.WeightsInfo, await read(request, self._max_body_bytes))
        checkpoint = await self._checkpoints.find(caller, body.tinker_path, "tinker_path")
        lora = checkpoint.lora
        answer: dict[str, Any] = {"base_model": checkpoint.base_model, "is_lora": lora.rank > 0}
        if lora.rank:
            answer |= {
                "lora_rank": lora.rank,
                "train_unembed": lora.train_unembedding,
                "train_mlp": lora.train_mlp,
                "train_attn": lora.train_attention,
            }
        return Json(answer)

    async def runs(self, request: Request, caller: Caller) -> Response:
        """A page of the caller's training runs."""
        limit, offset = paging(request, 20, _MOST)
        page, total = await self._checkpoints.runs(caller, limit, offset)
        listed = [_run_json(model, await self._checkpoints.of_run(caller, model.model_id)) for model in page]
        return Json({"training_runs": listed, "cursor": {"offset": offset, "limit": limit, "total_count": total}})

    async def run(self, request: Request, caller: Caller) -> Response:
        """One training run."""
        model = await self._models.get(caller, request.path_params["run"])
        return Json(_run_json(model, await self._checkpoints.of_run(caller, model.model_id)))

    async def of_run(self, request: Request, caller: Caller) -> Response:
        """All checkpoints of a run."""
        found = await self._checkpoints.of_run(caller, request.path_params["run"])
        return Json({"checkpoints": [_checkpoint_json(checkpoint) for checkpoint in found]})

    async def page(self, request: Request, caller: Caller) -> Response:
        """A page of the caller's checkpoints."""
        limit, offset = paging(request, 100, _MOST)
        page, total = await self._checkpoints.page(caller, limit, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return Json({"checkpoints": [_checkpoint_json(checkpoint) for checkpoint in page], "cursor": cursor})

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Deletes a checkpoint."""
        await self._checkpoints.delete(caller, _path(request))
        return Json({"status": "deleted"})

    async def set_ttl(self, request: Request, caller: Caller) -> Response:
        """Sets or removes a checkpoint's expiry."""
        body = await parse_json(bodies.SetTtl, await read(request, self._max_body_bytes))
        await self._checkpoints.set_ttl(caller, _path(request), body.ttl_seconds)
        return Json({"status": "updated"})


def _path(request: Request) -> str:
    parts = request.path_params
    return f"{SCHEME}{parts['run']}/{parts['segment']}/{parts['name']}"


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
        "public": False,
        "user_metadata": checkpoint.user_metadata or None,
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }


def _time(seconds: float) -> str:
    """ISO 8601 with an offset: the CLI compares with aware times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
