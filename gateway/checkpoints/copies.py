"""Copying a checkpoint into a training run of its own, which holds it and cannot be trained."""

import asyncio
import time
from dataclasses import replace

import sqlalchemy as sa
from google.protobuf import json_format

from fovea.api.v1 import weights_pb2
from fovea.wire.errors import AlreadyExists
from fovea.wire.names import SNAPSHOT_FILE
from gateway import identity
from gateway.checkpoints import checkpoint_rows as rows
from gateway.checkpoints import copy_rows
from gateway.checkpoints.checkpoint_registry import Checkpoints, check_ttl_or_none
from gateway.checkpoints.checkpoint_rows import Checkpoint, KeptSnapshot
from gateway.checkpoints.copy_rows import Copy
from gateway.database.database import Database
from gateway.identity import Caller, CheckpointPath
from gateway.sessions.sessions import Sessions
from gateway.training import model_rows
from gateway.training.model_rows import Model, ModelState


class Copies:
    """Copies by the training run that holds them. A copy is of its source's kind and shares no file with it."""

    def __init__(self, database: Database, sessions: Sessions, checkpoints: Checkpoints) -> None:
        self._database, self._sessions, self._checkpoints = database, sessions, checkpoints
        self._running: dict[str, asyncio.Task[str]] = {}

    async def copy(
        self,
        caller: Caller,
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
        """
        if request_key and (known := await self._of_key(caller, request_key)):
            return known.path
        session = await self._sessions.require(caller, session_id)
        number = identity.check_seq_id(model_seq_id, "model_seq_id", 0)
        model_id = identity.model_id(session.session_id, number)
        expires_at = check_ttl_or_none(ttl_s)
        running = self._running.get(model_id)
        if running is None:
            work = self._copy(caller, source_path, session_id, model_id, expires_at, request_key)
            running = self._running[model_id] = asyncio.create_task(work, name=f"copy to {model_id}")
            running.add_done_callback(lambda done: self._forget(model_id, done))
        # A client that stops waiting sends the same again: it must find the copy, or this task.
        await asyncio.wait([running])
        if (copy := await self._of_model(model_id)) and copy.source_path != source_path:
            raise _taken(model_id)
        return running.result()

    async def stop(self) -> None:
        """Gives up what runs, for the end of the process; clients ask again."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _forget(self, model_id: str, done: asyncio.Task[str]) -> None:
        del self._running[model_id]
        if not done.cancelled():
            done.exception()  # every client may have gone away: then nobody else retrieves it

    async def _copy(
        self,
        caller: Caller,
        source_path: str,
        session_id: str,
        model_id: str,
        expires_at: float | None,
        request_key: str | None,
    ) -> str:
        if known := await self._of_model(model_id):
            return known.path
        if await self._database.read(lambda connection: model_rows.get(connection, model_id)):
            raise _taken(model_id)
        source = await self._checkpoints.find(caller, source_path, "source_path")
        run = await self._database.read(lambda connection: model_rows.get(connection, source.model_id))
        model = Model(
            model_id, session_id, caller.owner, source.base_model, source.lora, run.user_metadata if run else {},
            state=ModelState.ENDED, state_reason=f"it holds a copy of {source_path} and cannot be trained",
            next_seq_id=1,
        )  # fmt: skip
        copied = replace(
            source,
            path=str(CheckpointPath(model_id, source.segment, source.name)),
            model_id=model_id,
            owner=caller.owner,
            uri=self._checkpoints.new_folder(model_id, source.segment, source.name),
            created_at=time.time(),
            expires_at=expires_at,
            public=False,
        )
        storage = self._checkpoints.storage
        async with self._checkpoints.writing(copied.uri):
            copied.size_bytes = await storage.copy(source.uri, copied.uri)
            kept = await self._rename_snapshot(copied) if source.snapshot_id else None
            await storage.sync(copied.uri)
        copy = Copy(model_id, caller.owner, request_key, source_path, copied.path)
        if not await self._database.write(lambda connection: _keep(connection, model, copied, kept, copy)):
            await storage.remove(copied.uri)
            raise _taken(model_id)
        return copied.path

    async def _rename_snapshot(self, copied: Checkpoint) -> KeptSnapshot:
        """The same weights under a name of their own: the source's goes when the source is deleted."""
        storage = self._checkpoints.storage
        snapshot = json_format.Parse(await storage.read(copied.uri, SNAPSHOT_FILE), weights_pb2.Snapshot())
        copied.snapshot_id = snapshot.snapshot_id = identity.snapshot_id(copied.model_id, 1)
        snapshot.model_id = copied.model_id
        await storage.write(copied.uri, SNAPSHOT_FILE, json_format.MessageToJson(snapshot).encode())
        return KeptSnapshot(snapshot, copied.uri, "")

    async def _of_key(self, caller: Caller, request_key: str) -> Copy | None:
        return await self._database.read(lambda connection: copy_rows.of_key(connection, caller.owner, request_key))

    async def _of_model(self, model_id: str) -> Copy | None:
        return await self._database.read(lambda connection: copy_rows.of_model(connection, model_id))


def _keep(connection: sa.Connection, model: Model, copied: Checkpoint, kept: KeptSnapshot | None, copy: Copy) -> bool:
    # Looked up first: what a job has written stays written if it returns. Nobody else writes meanwhile.
    if copy.request_key and copy_rows.of_key(connection, copy.owner, copy.request_key):
        return False
    if not model_rows.insert(connection, model):
        return False
    copy_rows.insert(connection, copy)
    if kept is not None:
        rows.put_snapshot(connection, kept)
    rows.put(connection, copied)
    return True


def _taken(model_id: str) -> AlreadyExists:
    return AlreadyExists(f"{model_id} exists already and is another model; take the next model_seq_id", "model_seq_id")
