"""The registry of checkpoints: names, storage locations, expiry and read permission; and their database rows."""

import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import sqlalchemy as sa
from cachetools import TTLCache

from fovea.api.v1 import weights_pb2
from fovea.runtime.durable import ExpiryClock
from fovea.wire.conventions import ADAPTER_WEIGHTS
from fovea.wire.errors import AlreadyExists, InvalidInput, NotFound, ResourceExhausted
from fovea_gateway.access.kept_rows import KeptRows, stored_bytes
from fovea_gateway.access.owners import Owners, in_projects, require_projects
from fovea_gateway.checkpoints.checkpoint import (
    EXTERNAL,
    SAMPLER,
    TRAINING,
    Checkpoint,
    CheckpointPath,
    Storage,
    check_name,
    folder_name,
    parse_path,
)
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import checkpoints, models, published, snapshots
from fovea_gateway.database.sql_engine import insert_new

logger = logging.getLogger(__name__)

_LEAST_TTL_S = 3600
_MOST_TTL_S = 10 * 366 * 86400
_REMEMBERED, _SHARED_S = 4096, 1.0
_NOUNS = {
    TRAINING: "a training checkpoint",
    SAMPLER: "weights to sample from",
    EXTERNAL: "an export to be downloaded",
}


def check_ttl(ttl_s: int, field: str = "ttl_seconds") -> float | None:
    """Returns the expiry, in seconds since the epoch, for a time to live in seconds; None for 0.

    Raises InvalidInput outside 1 hour .. 10 years.
    """
    if ttl_s == 0:
        return None
    if not _LEAST_TTL_S <= ttl_s <= _MOST_TTL_S:
        raise InvalidInput(f"{field} is {ttl_s}; it must be {_LEAST_TTL_S} .. {_MOST_TTL_S}", field=field)
    return time.time() + ttl_s


def check_ttl_or_none(ttl_s: int | None) -> float | None:
    """Returns the expiry for a client's time to live. None means never; 0 is an error, like any time below 1 hour."""
    return None if ttl_s is None else check_ttl(ttl_s or -1)


class Search(NamedTuple):
    """The criteria of a search for checkpoints.

    Attributes:
        with_public: Whether to include the published checkpoints of other owners.
        segment: One of the kinds; None for all.
        before: The `created_at` and path of the last checkpoint of the previous page.
        project_ids: The owner's projects; None for all.
    """

    owner: str
    limit: int
    with_public: bool = False
    segment: str | None = None
    base_models: list[str] | None = None
    before: tuple[float, str] | None = None
    project_ids: list[str] | None = None


class Checkpoints:
    """Checkpoints by `tinker://` path. Their owner has full access; others may read the published ones."""

    def __init__(
        self, database: Database, storage: Storage, owners: Owners, clock: ExpiryClock, rows: KeptRows
    ) -> None:
        self._database, self._owners, self._rows = database, owners, rows
        self.storage = storage
        self.unfinished_bytes: Counter[str] = Counter()
        """Bytes of uploads that are no checkpoints yet, by owner."""
        self._clock = clock
        self.being_written: set[str] = set()
        # A gateway of another shard may delete or withdraw a checkpoint.
        ttl_s = _SHARED_S if database.shards.count > 1 else math.inf
        self._sampled: TTLCache[str, Checkpoint] = TTLCache(_REMEMBERED, ttl_s)

    async def plan(
        self,
        model_id: str,
        owner: str,
        base_model: str,
        lora: weights_pb2.LoraConfig,
        segment: str,
        name: str,
        user_metadata: dict[str, str],
        overwrite: bool = False,
    ) -> tuple[Checkpoint, Checkpoint | None]:
        """Plans a checkpoint in a new folder. Returns it, and the checkpoint that it replaces, if any.

        Raises InvalidInput for a bad name or too much metadata, AlreadyExists for a name in use, ResourceExhausted if
        the owner has no room.
        """
        self._rows.take(owner, {"user_metadata": user_metadata})
        await self.check_room(owner)
        path = str(CheckpointPath(model_id, segment, check_name(name, "path")))
        old = await self._database.read(lambda connection: get_row(connection, path))
        if old is not None and not overwrite and not _is_expired(old, self._clock.now()):
            fix = "save with overwrite=True or use another name" if segment == TRAINING else "use another name"
            raise AlreadyExists(f"checkpoint {path} exists already: {fix}", field="path")
        uri = self.new_folder(model_id, segment, name)
        planned = Checkpoint(path, model_id, owner, segment, name, uri, base_model, lora, user_metadata=user_metadata)
        return planned, old

    async def check_room(self, owner: str) -> None:
        """Raises ResourceExhausted if an owner has reached its limit of stored bytes."""
        if await self.room(owner) <= 0:
            raise self.no_room(owner)

    async def room(self, owner: str) -> float:
        """Returns the number of bytes that an owner may still store; infinity if it has no limit."""
        if not (most := self._owners.of(owner).max_stored_bytes):
            return math.inf
        stored = await self._database.read(lambda connection: stored_bytes(connection, owner))
        return most - stored - self.unfinished_bytes[owner]

    def no_room(self, owner: str) -> ResourceExhausted:
        """Returns the error for an owner that has reached its limit of stored bytes."""
        return ResourceExhausted(
            f"this owner's max_stored_bytes is {self._owners.of(owner).max_stored_bytes}, and its checkpoints "
            "with their texts, its recorded samples and its unfinished uploads use all of it: delete checkpoints, or "
            "let them expire",
            limit="max_stored_bytes",
        )

    async def forget_model(self, model_id: str) -> None:
        """Removes the folder of a deleted model, which has no checkpoint any more."""
        await self.storage.remove(f"{self.storage.root}/{folder_name(model_id)}")

    def new_folder(self, model_id: str, segment: str, name: str) -> str:
        """Returns the URI of a new folder below the root. It is not created yet."""
        return f"{self.storage.root}/{folder_name(model_id)}/{segment}/{name}.{uuid.uuid4().hex[:8]}"

    @asynccontextmanager
    async def writing(self, *uris: str) -> AsyncIterator[None]:
        """Removes these folders if the block fails, because a trainer that died cannot remove them."""
        self.being_written.update(uris)
        try:
            yield
        except BaseException:
            for uri in uris:
                await self.storage.remove(uri)
            raise
        finally:
            self.being_written.difference_update(uris)

    async def find(self, owner: str, path: str, field: str = "path") -> Checkpoint:
        """Returns a checkpoint that the caller may read.

        Raises NotFound if it is unknown, expired, or another owner's and not published; InvalidInput for a malformed
        path.
        """
        parse_path(path, field)
        checkpoint = await self._database.read(lambda connection: get_row(connection, path))
        if checkpoint is None or not _is_readable(checkpoint, owner):
            raise NotFound(f"there is no checkpoint {path}", field=field)
        return checkpoint

    async def find_own(self, owner: str, path: str, field: str = "path") -> Checkpoint:
        """Returns a checkpoint that the caller owns. Raises NotFound for all others, published ones included."""
        checkpoint = await self.find(owner, path, field)
        if checkpoint.owner != owner:
            raise NotFound(f"there is no checkpoint {path} of yours", field=field)
        return checkpoint

    async def find_training(self, owner: str, path: str, optimizer: bool = False) -> Checkpoint:
        """Returns a checkpoint that training can continue from: a training checkpoint, or an exported or uploaded
        adapter.

        Args:
            optimizer: Whether its optimizer state is needed.

        Raises NotFound, InvalidInput for other kinds.
        """
        checkpoint = await self.find(owner, path)
        if checkpoint.segment == SAMPLER:
            raise InvalidInput(f"{path} is {_NOUNS[SAMPLER]}; load one that save_state created", field="path")
        if checkpoint.segment == EXTERNAL:
            if optimizer:
                raise InvalidInput(f"{path} has no optimizer state: load only its weights", field="path")
            if ADAPTER_WEIGHTS not in await self.storage.sizes(checkpoint.uri):
                raise InvalidInput(
                    f"{path} is encrypted or holds full parameters; load one that save_state created", field="path"
                )
        return checkpoint

    async def find_sampler(self, owner: str, path: str) -> Checkpoint:
        """Returns a checkpoint that can be sampled from. Raises NotFound, InvalidInput for other kinds."""
        checkpoint = await self.find(owner, path, "model_path")
        if checkpoint.segment != SAMPLER:
            raise InvalidInput(
                f"{path} is {_NOUNS[checkpoint.segment]}; sample from one that save_weights_for_sampler created",
                field="model_path",
            )
        return checkpoint

    async def check_sampled(self, owner: str, path: str, snapshot_id: str) -> None:
        """Raises NotFound once the weights of an open sampling session have expired or been deleted or unpublished."""
        checkpoint = self._sampled.get(path)
        if checkpoint is None or not _is_readable(checkpoint, owner):
            checkpoint = await self.find_sampler(owner, path)
            self._sampled[path] = checkpoint
        if checkpoint.snapshot_id != snapshot_id:
            raise NotFound(f"{path} has been overwritten; create a new sampling client for it", field="model_path")

    async def readable(self, owner: str, model_ids: list[str]) -> list[Checkpoint]:
        """Returns the checkpoints of some models that an owner may read, newest first."""
        listed = await self._database.read(lambda connection: rows_of_models(connection, model_ids))
        return [checkpoint for checkpoint in listed if _is_readable(checkpoint, owner)]

    async def page(self, owner: str | None, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        """Returns a page of the checkpoints of an owner, or of all owners, newest first, and their total number."""
        return await self._database.read(lambda connection: rows_of_owner(connection, owner, limit, offset))

    async def search(self, search: Search) -> list[Checkpoint]:
        """Returns checkpoints, newest first."""
        return await self._database.read_whole(lambda connection: rows_of_search(connection, search))

    async def delete(self, owner: str, path: str) -> None:
        """Deletes a checkpoint and its folder."""
        await self._drop(await self.find_own(owner, path))

    async def set_ttl(self, owner: str, path: str, ttl_s: int | None) -> None:
        """Sets when a checkpoint expires; None means never."""
        expires_at = check_ttl_or_none(ttl_s)
        await self.find_own(owner, path)
        await self._database.write(lambda connection: update_expiry(connection, path, expires_at))
        self._sampled.pop(path, None)

    async def set_public(self, owner: str, path: str, public: bool) -> None:
        """Publishes a checkpoint, or withdraws it. Doing either twice is not an error."""
        await self.find_own(owner, path)
        await self._database.write(lambda connection: update_public(connection, path, public))
        self._sampled.pop(path, None)

    async def sweep(self) -> None:
        now = self._clock.now()
        for checkpoint in await self._database.read(lambda connection: expired_rows(connection, now)):
            await self._drop(checkpoint)

    async def remove_folder(self, uri: str) -> None:
        """Removes a folder that no checkpoint names any more."""
        await self.storage.remove(uri)

    async def _drop(self, checkpoint: Checkpoint) -> None:
        await self._database.write(lambda connection: delete_row(connection, checkpoint))
        self._sampled.pop(checkpoint.path, None)
        await self.remove_folder(checkpoint.uri)
        logger.info("checkpoint %s was deleted", checkpoint.path)


def _is_expired(checkpoint: Checkpoint, now: float) -> bool:
    return checkpoint.expires_at is not None and checkpoint.expires_at <= now


def _is_readable(checkpoint: Checkpoint, owner: str) -> bool:
    return (checkpoint.public or checkpoint.owner == owner) and not _is_expired(checkpoint, time.time())


def put_row(connection: sa.Connection, checkpoint: Checkpoint) -> None:
    """Stores a checkpoint, which only its owner can read, replacing any of the same path."""
    for table in (published, checkpoints):
        connection.execute(sa.delete(table).where(table.c.path == checkpoint.path))
    row = {**vars(checkpoint), "lora": checkpoint.lora.SerializeToString()}
    del row["public"]
    connection.execute(sa.insert(checkpoints).values(**row))


def get_row(connection: sa.Connection, path: str) -> Checkpoint | None:
    """Returns a checkpoint by its `tinker://` path, expired or not."""
    row = (connection.execute(_selected().where(checkpoints.c.path == path))).mappings().first()
    return _to_checkpoint(row) if row else None


def delete_row(connection: sa.Connection, checkpoint: Checkpoint) -> None:
    """Deletes a checkpoint and its snapshot, but not a newer checkpoint that has replaced it under the same path."""
    where = (checkpoints.c.path == checkpoint.path) & (checkpoints.c.uri == checkpoint.uri)
    if connection.execute(sa.delete(checkpoints).where(where)).rowcount:
        connection.execute(sa.delete(published).where(published.c.path == checkpoint.path))
    if checkpoint.snapshot_id:
        connection.execute(sa.delete(snapshots).where(snapshots.c.snapshot_id == checkpoint.snapshot_id))


def update_expiry(connection: sa.Connection, path: str, expires_at: float | None) -> None:
    """Sets or removes the expiry of a checkpoint."""
    connection.execute(sa.update(checkpoints).where(checkpoints.c.path == path).values(expires_at=expires_at))


def update_public(connection: sa.Connection, path: str, public: bool) -> None:
    """Publishes a checkpoint or withdraws it. Doing either twice is not an error."""
    if public:
        insert_new(connection, published, {"path": path, "published_at": time.time()})
    else:
        connection.execute(sa.delete(published).where(published.c.path == path))


def rows_of_models(connection: sa.Connection, model_ids: list[str]) -> list[Checkpoint]:
    """Returns the unexpired checkpoints of some models, newest first."""
    where = checkpoints.c.model_id.in_(model_ids) & _living(time.time())
    query = _selected().where(where).order_by(checkpoints.c.created_at.desc())
    return [_to_checkpoint(row) for row in (connection.execute(query)).mappings()]


def rows_of_model(connection: sa.Connection, model_id: str) -> list[Checkpoint]:
    """Returns a model's unexpired checkpoints, newest first."""
    return rows_of_models(connection, [model_id])


def rows_of_owner(
    connection: sa.Connection, owner: str | None, limit: int, offset: int
) -> tuple[list[Checkpoint], int]:
    """Returns a page of an owner's unexpired checkpoints, newest first, and their total number.

    With `owner` None, the checkpoints are those of all owners.
    """
    where = _living(time.time())
    if owner is not None:
        where &= checkpoints.c.owner == owner
    query = _selected().where(where).order_by(checkpoints.c.created_at.desc()).limit(limit).offset(offset)
    page = [_to_checkpoint(row) for row in (connection.execute(query)).mappings()]
    counting = sa.select(sa.func.count()).select_from(checkpoints).where(where)
    return page, (connection.execute(counting)).scalar_one()


def rows_of_search(connection: sa.Connection, search: Search) -> list[Checkpoint]:
    """Returns the unexpired checkpoints that match, newest first, up to the search's limit."""
    place, where = (checkpoints.c.created_at, checkpoints.c.path), checkpoints.c.owner == search.owner
    if search.with_public:
        where |= published.c.path.is_not(None)
    where &= _living(time.time())
    if search.segment is not None:
        where &= checkpoints.c.segment == search.segment
    if search.base_models is not None:
        where &= checkpoints.c.base_model.in_(search.base_models)
    if search.project_ids is not None:
        require_projects(connection, search.owner, search.project_ids, "project_ids")
        of_model = (models.c.model_id == checkpoints.c.model_id) & (models.c.owner == search.owner)
        where &= sa.exists().where(of_model, in_projects(models.c.session_id, search.project_ids))
    if search.before is not None:
        created_at, path = search.before
        where &= (place[0] < created_at) | ((place[0] == created_at) & (place[1] < path))
    query = _selected().where(where).order_by(*(column.desc() for column in place)).limit(search.limit)
    return [_to_checkpoint(row) for row in connection.execute(query).mappings()]


def public_models(now: float) -> sa.Select[Any]:
    """Returns a subquery for the ids of the models that have a published checkpoint."""
    query = sa.select(checkpoints.c.model_id).join(published, checkpoints.c.path == published.c.path)
    return query.where(_living(now))


def expired_rows(connection: sa.Connection, now: float) -> list[Checkpoint]:
    """Returns the expired checkpoints."""
    query = _selected().where(checkpoints.c.expires_at <= now)
    return [_to_checkpoint(row) for row in (connection.execute(query)).mappings()]


def named_uris(connection: sa.Connection) -> list[str]:
    """Returns every folder that a checkpoint or a snapshot names."""
    folders = sa.union(sa.select(checkpoints.c.uri), sa.select(snapshots.c.uri))
    return [row.uri for row in connection.execute(folders)]


def _to_checkpoint(row: Any) -> Checkpoint:
    values = {**row, "lora": weights_pb2.LoraConfig.FromString(row["lora"])}
    is_public = values.pop("published_at") is not None
    return Checkpoint(**values, public=is_public)


def _selected() -> sa.Select[Any]:
    with_published = checkpoints.outerjoin(published, checkpoints.c.path == published.c.path)
    return sa.select(checkpoints, published.c.published_at).select_from(with_published)


def _living(now: float) -> sa.ColumnElement[bool]:
    return checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > now)
