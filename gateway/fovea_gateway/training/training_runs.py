"""Training runs for the SDK's REST client: models with their checkpoints, copies of checkpoints, and their routes.

A copy gets a training run of its own, which cannot be trained.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from google.protobuf import json_format
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fovea.api.v1 import weights_pb2
from fovea.runtime.tasks import SingleFlight
from fovea.wire.conventions import SNAPSHOT_FILE
from fovea.wire.errors import AlreadyExists, InvalidInput, NotFound, Unimplemented
from fovea_gateway.access.api_keys import SUBJECT, Scope
from fovea_gateway.access.owners import check_project
from fovea_gateway.checkpoints.checkpoint import SAMPLER, TRAINING, Checkpoint, CheckpointPath
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, check_ttl_or_none, put_row
from fovea_gateway.checkpoints.checkpoint_routes import checkpoint_json
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import copies
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.http.endpoint import Endpoints, Json, check_query, iso_time, paging
from fovea_gateway.http.request_body import Body, ModelNumber, parse_json, read
from fovea_gateway.replicas import snapshot_pushes
from fovea_gateway.replicas.snapshot_pushes import SnapshotRecord, id_of_snapshot
from fovea_gateway.sessions.future import check_seq_id
from fovea_gateway.sessions.sessions import Sessions
from fovea_gateway.training.models import Model, ModelState, get_row, id_of_model, insert_row, rows_of_owner

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
        self, owner: str, limit: int, offset: int, with_public: bool, project_id: str = ""
    ) -> tuple[list[tuple[Model, list[Checkpoint]]], int]:
        """Returns a page of training runs with the checkpoints that the owner may read, and the number of all runs."""
        page, total = await self._database.read_whole(
            lambda connection: rows_of_owner(connection, owner, limit, offset, with_public, project_id)
        )
        of_model: dict[str, list[Checkpoint]] = {model.model_id: [] for model in page}
        for checkpoint in await self._checkpoints.readable(owner, list(of_model)):
            of_model[checkpoint.model_id].append(checkpoint)
        return [(model, of_model[model.model_id]) for model in page], total


@dataclass(frozen=True)
class Copy:
    """A copy of a checkpoint and the training run that holds it.

    Attributes:
        request_key: The client's idempotency key, or None if the client sent none.
    """

    model_id: str
    owner: str
    request_key: str | None
    source_path: str
    path: str


class Copies:
    """The copies of checkpoints. A copy has the same kind as its source and shares no file with it."""

    def __init__(self, database: Database, sessions: Sessions, checkpoints: Checkpoints) -> None:
        self._database, self._sessions, self._checkpoints = database, sessions, checkpoints
        self._running: SingleFlight[str, str] = SingleFlight()

    async def copy(
        self,
        owner: str,
        source_path: str,
        session_id: str,
        model_seq_id: int,
        ttl_s: int | None,
        request_key: str | None = None,
    ) -> str:
        """Copies a checkpoint that the caller may read, and returns the path of the copy. A repeat returns the same.

        Args:
            session_id: The session that will own the run.
            model_seq_id: The number of the new model within its session.
            ttl_s: Seconds after which the copy expires; None means never. The copy does not inherit the expiry of its
                source.
            request_key: The client's idempotency key; a client repeats it when it repeats the request.

        Raises:
            NotFound: The session or the source does not exist.
            SessionEnded: The session has ended.
            AlreadyExists: The model number is already in use by another model.
            ResourceExhausted: The owner has no space left.
        """
        if request_key and (known := await self._of_key(owner, request_key)):
            if known.source_path != source_path:
                raise AlreadyExists(
                    f"this idempotency key belongs to a copy of {known.source_path}: use another key", "source_path"
                )
            return known.path
        session = await self._sessions.require(owner, session_id)
        run_id = id_of_model(session.session_id, check_seq_id(model_seq_id, "model_seq_id", 0))
        expires_at = check_ttl_or_none(ttl_s)
        await self._checkpoints.check_room(owner)
        # A client that stops waiting repeats its request. The repeated request must find the copy, or the task that
        # makes it.
        path = await self._running.run(
            run_id, lambda: self._copy(owner, source_path, session_id, run_id, expires_at, request_key)
        )
        if (copy := await self._of_model(run_id)) and copy.source_path != source_path:
            raise _taken(run_id)
        return path

    async def copy_into(
        self, owner: str, source_path: str, project_id: str, ttl_s: int | None, request_key: str | None
    ) -> str:
        """Copies a checkpoint into a project, in an ended session of its own. Raises the same errors as `copy`."""
        # A failed copy leaves the session open, so that a repeated request finds it; it expires otherwise.
        key = request_key and f"copy {request_key}"
        session = await self._sessions.create(owner, [], {}, key, f"copy of {source_path[:200]}", project_id)
        SUBJECT.set(f"{session.session_id}/{source_path}")
        path = await self.copy(owner, source_path, session.session_id, 0, ttl_s, request_key)
        await self._sessions.finish(owner, session.session_id, "success", None)
        return path

    async def stop(self) -> None:
        """Cancels running copies at the end of the process. Clients repeat their requests."""
        await self._running.cancel()

    async def _copy(
        self,
        owner: str,
        source_path: str,
        session_id: str,
        run_id: str,
        expires_at: float | None,
        request_key: str | None,
    ) -> str:
        if known := await self._of_model(run_id):
            return known.path
        if await self._database.read(lambda connection: get_row(connection, run_id)):
            raise _taken(run_id)
        source = await self._checkpoints.find(owner, source_path, "source_path")
        run = await self._database.read_whole(lambda connection: get_row(connection, source.model_id))
        model = Model(
            run_id, session_id, owner, source.base_model, source.lora, run.user_metadata if run else {},
            state=ModelState.ENDED, state_reason=f"it holds a copy of {source_path} and cannot be trained",
            next_seq_id=1,
        )  # fmt: skip
        copied = replace(
            source,
            path=str(CheckpointPath(run_id, source.segment, source.name)),
            model_id=run_id,
            owner=owner,
            uri=self._checkpoints.new_folder(run_id, source.segment, source.name),
            created_at=time.time(),
            expires_at=expires_at,
            public=False,
        )
        storage = self._checkpoints.storage
        async with self._checkpoints.writing(copied.uri):
            copied.size_bytes = await storage.copy(source.uri, copied.uri)
            kept = await self._rename_snapshot(copied) if source.snapshot_id else None
            await storage.sync(copied.uri)
        copy = Copy(run_id, owner, request_key, source_path, copied.path)
        if not await self._database.write(lambda connection: _store(connection, model, copied, kept, copy)):
            await storage.remove(copied.uri)
            raise _taken(run_id)
        return copied.path

    async def _rename_snapshot(self, copied: Checkpoint) -> SnapshotRecord:
        """Gives the copied weights a snapshot id of their own, since the source's id is deleted with the source."""
        storage = self._checkpoints.storage
        snapshot = json_format.Parse(await storage.read(copied.uri, SNAPSHOT_FILE), weights_pb2.Snapshot())
        copied.snapshot_id = snapshot.snapshot_id = id_of_snapshot(copied.model_id, 1)
        snapshot.model_id = copied.model_id
        await storage.write(copied.uri, SNAPSHOT_FILE, json_format.MessageToJson(snapshot).encode())
        return SnapshotRecord(snapshot, copied.uri, "")

    async def _of_key(self, owner: str, request_key: str) -> Copy | None:
        return await self._database.read(lambda connection: _of_key(connection, owner, request_key))

    async def _of_model(self, model_id: str) -> Copy | None:
        return await self._database.read(lambda connection: _of_model(connection, model_id))


def _store(
    connection: sa.Connection, model: Model, copied: Checkpoint, kept: SnapshotRecord | None, copy: Copy
) -> bool:
    # Check first: if this job returns False, what it has written so far is committed. No other job runs meanwhile.
    if copy.request_key and _of_key(connection, copy.owner, copy.request_key):
        return False
    if not insert_row(connection, model):
        return False
    _insert(connection, copy)
    if kept is not None:
        snapshot_pushes.put_row(connection, kept)
    put_row(connection, copied)
    return True


def _taken(model_id: str) -> AlreadyExists:
    return AlreadyExists(f"{model_id} already exists and is another model; use the next model_seq_id", "model_seq_id")


def _insert(connection: sa.Connection, copy: Copy) -> bool:
    """Inserts a copy. Returns False if its run or its idempotency key already has one."""
    return insert_new(connection, copies, dict(vars(copy)))


def _of_key(connection: sa.Connection, owner: str, request_key: str) -> Copy | None:
    """Returns the copy made by a request with this idempotency key."""
    return _first(connection, (copies.c.owner == owner) & (copies.c.request_key == request_key))


def _of_model(connection: sa.Connection, model_id: str) -> Copy | None:
    """Returns the copy that a run holds."""
    return _first(connection, copies.c.model_id == model_id)


def _first(connection: sa.Connection, where: sa.ColumnElement[Any]) -> Copy | None:
    row = connection.execute(sa.select(copies).where(where)).mappings().first()
    return Copy(**row) if row else None


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
        """Returns a page of the caller's training runs, or of those in one project; access_scope=accessible adds
        published ones.
        """
        with_public = _with_public(request, "limit", "offset", "project_id")
        limit, offset = paging(request, 20, _MOST)
        project_id = request.query_params.get("project_id")
        if project_id is not None:
            check_project(project_id)
        page, total = await self._runs.page(owner, limit, offset, with_public, project_id or "")
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
        if body.weights_access_token is not None or _ACCESS_TOKEN in request.headers:
            raise Unimplemented(
                "weights_access_token is not supported: publish the source instead", field="weights_access_token"
            )
        key = request.headers.get("x-idempotency-key")
        if body.destination_project_id is not None:
            if body.session_id is not None or body.model_seq_id is not None:
                raise InvalidInput(
                    "send either destination_project_id, or session_id with model_seq_id",
                    field="destination_project_id",
                )
            path = await self._copies.copy_into(
                owner, body.source_path, body.destination_project_id, body.ttl_seconds, key
            )
            return Json({"tinker_path": path})
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidInput(
                "send destination_project_id, or session_id with model_seq_id: they identify the copy",
                field="session_id",
            )
        path = await self._copies.copy(
            owner, body.source_path, body.session_id, body.model_seq_id, body.ttl_seconds, key
        )
        return Json({"tinker_path": path})


def _with_public(request: Request, *known: str) -> bool:
    """Returns whether the request asks for other owners' published runs. Raises InvalidInput, Unimplemented."""
    check_query(request, "access_scope", *known)
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
