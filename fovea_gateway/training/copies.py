"""Copying a checkpoint into a training run of its own, which holds it and cannot be trained; and the rows of copies."""

import time
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from google.protobuf import json_format

from fovea.api.v1 import weights_pb2
from fovea.runtime.tasks import SingleFlight
from fovea.wire.conventions import SNAPSHOT_FILE
from fovea.wire.errors import AlreadyExists
from fovea_gateway.checkpoints.checkpoint import Checkpoint, CheckpointPath
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, check_ttl_or_none, put_row
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import copies
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.futures.future import check_seq_id
from fovea_gateway.replicas import snapshot_pushes
from fovea_gateway.replicas.snapshot_pushes import KeptSnapshot, id_of_snapshot
from fovea_gateway.sessions.sessions import Sessions
from fovea_gateway.training.models import Model, ModelState, get_row, id_of_model, insert_row


@dataclass(frozen=True)
class Copy:
    """A copy of a checkpoint, and the training run made to hold it.

    Attributes:
        request_key: The client's idempotency key, if it sent one.
    """

    model_id: str
    owner: str
    request_key: str | None
    source_path: str
    path: str


class Copies:
    """Copies by the training run that holds them. A copy is of its source's kind and shares no file with it."""

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
        """Copies a checkpoint that the caller may read; returns the copy's path. A repeat answers the first one's.

        Args:
            session_id: The session that will own the run.
            model_seq_id: Position among the session's models.
            ttl_s: Seconds after which the copy expires; None keeps it. The source's own is not inherited.
            request_key: Of the client; repeats carry the same.

        Raises:
            NotFound, SessionEnded: For the source, for the session.
            AlreadyExists: The position is taken by something else.
            ResourceExhausted: The owner has no room.
        """
        if request_key and (known := await self._of_key(owner, request_key)):
            return known.path
        session = await self._sessions.require(owner, session_id)
        run_id = id_of_model(session.session_id, check_seq_id(model_seq_id, "model_seq_id", 0))
        expires_at = check_ttl_or_none(ttl_s)
        await self._checkpoints.check_room(owner)
        # A client that stops waiting sends the same again: it must find the copy, or what makes it.
        path = await self._running.run(
            run_id, lambda: self._copy(owner, source_path, session_id, run_id, expires_at, request_key)
        )
        if (copy := await self._of_model(run_id)) and copy.source_path != source_path:
            raise _taken(run_id)
        return path

    async def stop(self) -> None:
        """Gives up what runs, for the end of the process; clients ask again."""
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
        run = await self._database.read(lambda connection: get_row(connection, source.model_id))
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
        if not await self._database.write(lambda connection: _keep(connection, model, copied, kept, copy)):
            await storage.remove(copied.uri)
            raise _taken(run_id)
        return copied.path

    async def _rename_snapshot(self, copied: Checkpoint) -> KeptSnapshot:
        """The same weights under a name of their own: the source's goes when the source is deleted."""
        storage = self._checkpoints.storage
        snapshot = json_format.Parse(await storage.read(copied.uri, SNAPSHOT_FILE), weights_pb2.Snapshot())
        copied.snapshot_id = snapshot.snapshot_id = id_of_snapshot(copied.model_id, 1)
        snapshot.model_id = copied.model_id
        await storage.write(copied.uri, SNAPSHOT_FILE, json_format.MessageToJson(snapshot).encode())
        return KeptSnapshot(snapshot, copied.uri, "")

    async def _of_key(self, owner: str, request_key: str) -> Copy | None:
        return await self._database.read(lambda connection: _of_key(connection, owner, request_key))

    async def _of_model(self, model_id: str) -> Copy | None:
        return await self._database.read(lambda connection: _of_model(connection, model_id))


def _keep(connection: sa.Connection, model: Model, copied: Checkpoint, kept: KeptSnapshot | None, copy: Copy) -> bool:
    # Looked up first: what a job has written stays written if it returns. Nobody else writes meanwhile.
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
    return AlreadyExists(f"{model_id} exists already and is another model; take the next model_seq_id", "model_seq_id")


def _insert(connection: sa.Connection, copy: Copy) -> bool:
    """Keeps a copy; False if its run or its key has one."""
    return insert_new(connection, copies, dict(vars(copy)))


def _of_key(connection: sa.Connection, owner: str, request_key: str) -> Copy | None:
    """The copy that a request with this key made."""
    return _first(connection, (copies.c.owner == owner) & (copies.c.request_key == request_key))


def _of_model(connection: sa.Connection, model_id: str) -> Copy | None:
    """The copy that a run holds."""
    return _first(connection, copies.c.model_id == model_id)


def _first(connection: sa.Connection, where: sa.ColumnElement[Any]) -> Copy | None:
    row = connection.execute(sa.select(copies).where(where)).mappings().first()
    return Copy(**row) if row else None
