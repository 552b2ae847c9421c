"""Rows of checkpoints and of snapshots."""

import time
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from fovea.api.v1 import weights_pb2
from gateway.database.schema import checkpoints, published, snapshots
from gateway.database.sql_engine import insert_new


@dataclass(eq=False)
class Checkpoint:
    """Weights in storage under a name. `snapshot_id` is set for those to sample from; `public` ones are everybody's."""

    path: str
    model_id: str
    owner: str
    segment: str
    name: str
    uri: str
    base_model: str
    lora: weights_pb2.LoraConfig
    snapshot_id: str = ""
    step: int = 0
    size_bytes: int = 0
    user_metadata: dict[str, str] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    expires_at: float | None = None
    public: bool = False


@dataclass(eq=False)
class KeptSnapshot:
    """Frozen weights: in the memory of one trainer, and in storage if `uri` is set."""

    identity: weights_pb2.Snapshot
    uri: str
    trainer_instance: str
    created_at: float = field(default_factory=time.time)


def _to_checkpoint(row: Any) -> Checkpoint:
    values = {**row, "lora": weights_pb2.LoraConfig.FromString(row["lora"])}
    is_public = values.pop("published_at") is not None
    return Checkpoint(**values, public=is_public)


def _selected() -> sa.Select[Any]:
    with_published = checkpoints.outerjoin(published, checkpoints.c.path == published.c.path)
    return sa.select(checkpoints, published.c.published_at).select_from(with_published)


def _living(now: float) -> sa.ColumnElement[bool]:
    return checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > now)


def _to_snapshot(row: Any) -> KeptSnapshot:
    identity = weights_pb2.Snapshot.FromString(row["identity"])
    return KeptSnapshot(identity, row["uri"], row["trainer_instance"], row["created_at"])


def put(connection: sa.Connection, checkpoint: Checkpoint) -> None:
    """Keeps a checkpoint, which nobody else can read yet, in place of any of the same path."""
    for table in (published, checkpoints):
        connection.execute(sa.delete(table).where(table.c.path == checkpoint.path))
    row = {**vars(checkpoint), "lora": checkpoint.lora.SerializeToString()}
    del row["public"]
    connection.execute(sa.insert(checkpoints).values(**row))


def get(connection: sa.Connection, path: str) -> Checkpoint | None:
    """A checkpoint by its `tinker://` path, expired or not."""
    row = (connection.execute(_selected().where(checkpoints.c.path == path))).mappings().first()
    return _to_checkpoint(row) if row else None


def delete(connection: sa.Connection, checkpoint: Checkpoint) -> None:
    """Forgets a checkpoint, but not one that has taken its place under the same path, and what was to sample from."""
    where = (checkpoints.c.path == checkpoint.path) & (checkpoints.c.uri == checkpoint.uri)
    if connection.execute(sa.delete(checkpoints).where(where)).rowcount:
        connection.execute(sa.delete(published).where(published.c.path == checkpoint.path))
    if checkpoint.snapshot_id:
        connection.execute(sa.delete(snapshots).where(snapshots.c.snapshot_id == checkpoint.snapshot_id))


def set_expiry(connection: sa.Connection, path: str, expires_at: float | None) -> None:
    """Sets or removes when a checkpoint expires."""
    connection.execute(sa.update(checkpoints).where(checkpoints.c.path == path).values(expires_at=expires_at))


def set_public(connection: sa.Connection, path: str, public: bool) -> None:
    """Publishes a checkpoint or takes it back; neither is an error twice."""
    if public:
        insert_new(connection, published, {"path": path, "published_at": time.time()})
    else:
        connection.execute(sa.delete(published).where(published.c.path == path))


def of_models(connection: sa.Connection, model_ids: list[str]) -> list[Checkpoint]:
    """The checkpoints of some models that have not expired, newest first."""
    where = checkpoints.c.model_id.in_(model_ids) & _living(time.time())
    query = _selected().where(where).order_by(checkpoints.c.created_at.desc())
    return [_to_checkpoint(row) for row in (connection.execute(query)).mappings()]


def of_model(connection: sa.Connection, model_id: str) -> list[Checkpoint]:
    """A model's checkpoints that have not expired, newest first."""
    return of_models(connection, [model_id])


def of_owner(connection: sa.Connection, owner: str, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
    """A page of an owner's checkpoints that have not expired, newest first, and how many there are in all."""
    where = (checkpoints.c.owner == owner) & _living(time.time())
    query = _selected().where(where).order_by(checkpoints.c.created_at.desc()).limit(limit).offset(offset)
    page = [_to_checkpoint(row) for row in (connection.execute(query)).mappings()]
    counting = sa.select(sa.func.count()).select_from(checkpoints).where(where)
    return page, (connection.execute(counting)).scalar_one()


def public_models(now: float) -> sa.Select[Any]:
    """Ids of the models that have a published checkpoint, as a subquery."""
    query = sa.select(checkpoints.c.model_id).join(published, checkpoints.c.path == published.c.path)
    return query.where(_living(now))


def expired(connection: sa.Connection, now: float) -> list[Checkpoint]:
    """Checkpoints past their time."""
    query = _selected().where(checkpoints.c.expires_at <= now)
    return [_to_checkpoint(row) for row in (connection.execute(query)).mappings()]


def uris(connection: sa.Connection) -> list[str]:
    """Every folder that a checkpoint or a snapshot names."""
    folders = sa.union(sa.select(checkpoints.c.uri), sa.select(snapshots.c.uri))
    return [row.uri for row in connection.execute(folders)]


def put_snapshot(connection: sa.Connection, kept: KeptSnapshot) -> None:
    """Keeps a new snapshot."""
    row = {
        "snapshot_id": kept.identity.snapshot_id,
        "model_id": kept.identity.model_id,
        "identity": kept.identity.SerializeToString(),
        "uri": kept.uri,
        "trainer_instance": kept.trainer_instance,
        "created_at": kept.created_at,
    }
    insert_new(connection, snapshots, row)


def get_snapshot(connection: sa.Connection, snapshot_id: str) -> KeptSnapshot | None:
    """A snapshot by id."""
    query = sa.select(snapshots).where(snapshots.c.snapshot_id == snapshot_id)
    row = (connection.execute(query)).mappings().first()
    return _to_snapshot(row) if row else None


def unnamed_snapshots(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Ids of the snapshots of models that are in memory only."""
    where = snapshots.c.model_id.in_(model_ids) & (snapshots.c.uri == "")
    return [row.snapshot_id for row in connection.execute(sa.select(snapshots.c.snapshot_id).where(where))]
