"""Training runs for the SDK's REST client: models with their checkpoints, and the route that copies checkpoints."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.wire.errors import InvalidInput, NotFound, Unimplemented
from fovea_gateway.access.api_keys import Scope
from fovea_gateway.checkpoints.checkpoint import SAMPLER, TRAINING, Checkpoint
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints
from fovea_gateway.checkpoints.checkpoint_routes import checkpoint_json
from fovea_gateway.database.database import Database
from fovea_gateway.http.endpoint import Endpoints, Json, check_query, iso_time, paging
from fovea_gateway.http.request_body import Body, ModelNumber, parse_json, read
from fovea_gateway.training.copies import Copies
from fovea_gateway.training.models import Model, ModelState, get_row, rows_of_owner

_SCOPES = {"owned": False, "accessible": True}
_MOST = 1000
_ACCESS_TOKEN = "x-tinker-weights-access-token"


class CopyWeights(Body):
    """The body of POST copy_weights."""

    source_path: str
    session_id: str | None = None
    model_seq_id: ModelNumber | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None
    type: str = ""


class TrainingRuns:
    """Models together with the checkpoints that an owner may read."""

    def __init__(self, database: Database, checkpoints: Checkpoints) -> None:
        self._database, self._checkpoints = database, checkpoints

    async def get(self, owner: str, model_id: str, with_public: bool) -> tuple[Model, list[Checkpoint]]:
        """Returns a training run and those of its checkpoints that the owner may read, newest first. Raises NotFound.

        Args:
            with_public: Whether to find another owner's run if one of its checkpoints is published.
        """
        model = await self._database.read(lambda connection: get_row(connection, model_id))
        if model is not None and (with_public or model.owner == owner):
            listed = await self._checkpoints.readable(owner, [model_id])
            if listed or model.owner == owner:
                return model, listed
        raise NotFound(f"there is no training run {model_id!r}", field="training_run_id")

    async def page(
        self, owner: str, limit: int, offset: int, with_public: bool
    ) -> tuple[list[tuple[Model, list[Checkpoint]]], int]:
        """Returns a page of training runs with the checkpoints that the owner may read, and the number of all runs."""
        page, total = await self._database.read(
            lambda connection: rows_of_owner(connection, owner, limit, offset, with_public)
        )
        of_model: dict[str, list[Checkpoint]] = {model.model_id: [] for model in page}
        for checkpoint in await self._checkpoints.readable(owner, list(of_model)):
            of_model[checkpoint.model_id].append(checkpoint)
        return [(model, of_model[model.model_id]) for model in page], total


class TrainingRunRoutes:
    """Handlers of training runs."""

    def __init__(self, runs: TrainingRuns, copies: Copies) -> None:
        self._runs, self._copies = runs, copies

    def routes(self, endpoints: Endpoints) -> list[Route]:
        return [
            endpoints.route("GET", "training_runs", self.page, Scope.READ),
            endpoints.route("GET", "training_runs/{run}", self.get, Scope.READ),
            endpoints.route("GET", "training_runs/{run}/checkpoints", self.checkpoints, Scope.READ),
            endpoints.route("POST", "copy_weights", self.copy, Scope.TRAIN),
        ]

    async def page(self, request: Request, owner: str) -> Response:
        """Returns a page of the caller's training runs; access_scope=accessible adds published ones."""
        with_public = _with_public(request, "limit", "offset", "project_id")
        limit, offset = paging(request, 20, _MOST)
        page, total = await self._runs.page(owner, limit, offset, with_public)
        listed = [_run_json(model, checkpoints) for model, checkpoints in page]
        return Json({"training_runs": listed, "cursor": {"offset": offset, "limit": limit, "total_count": total}})

    async def get(self, request: Request, owner: str) -> Response:
        with_public = _with_public(request)
        return Json(_run_json(*await self._runs.get(owner, request.path_params["run"], with_public)))

    async def checkpoints(self, request: Request, owner: str) -> Response:
        """Returns all checkpoints of a run that the caller may read."""
        check_query(request)
        _, found = await self._runs.get(owner, request.path_params["run"], with_public=True)
        return Json({"checkpoints": [checkpoint_json(checkpoint) for checkpoint in found]})

    async def copy(self, request: Request, owner: str) -> Response:
        """Copies a checkpoint into a training run of its own, once for each X-Idempotency-Key and model number."""
        body = await parse_json(request, CopyWeights, await read(request))
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
            raise InvalidInput("send session_id with model_seq_id: they identify the copy", field="session_id")
        path = await self._copies.copy(
            owner, body.source_path, body.session_id, body.model_seq_id, body.ttl_seconds,
            request.headers.get("x-idempotency-key"),
        )  # fmt: skip
        return Json({"tinker_path": path})


def _with_public(request: Request, *known: str) -> bool:
    """Returns whether the request asks for other owners' published runs. Raises InvalidInput, Unimplemented."""
    check_query(request, "access_scope", *known)
    if "project_id" in request.query_params:
        raise Unimplemented("there are no projects here: leave project_id out", field="project_id")
    scope = request.query_params.get("access_scope", "owned")
    if scope not in _SCOPES:
        raise InvalidInput(f"access_scope is {scope!r}; it must be owned or accessible", field="access_scope")
    return _SCOPES[scope]


def _run_json(model: Model, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    last = {
        segment: next((checkpoint_json(c) for c in checkpoints if c.segment == segment), None)
        for segment in (TRAINING, SAMPLER)
    }
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": model.lora.rank > 0,
        "corrupted": model.state in (ModelState.LOST, ModelState.FAILED),
        "lora_rank": model.lora.rank or None,
        "last_request_time": iso_time(model.last_request_at),
        "last_checkpoint": last[TRAINING],
        "last_sampler_checkpoint": last[SAMPLER],
        "user_metadata": {name: str(value) for name, value in model.user_metadata.items()},
    }
