"""Rows of snapshots."""

from typing import Any

import sqlalchemy as sa

from fovea.api.v1 import weights_pb2
from gateway.database.schema import sampling_sessions, snapshots
from gateway.database.sql_engine import insert_new
from gateway.replicas.kept_snapshot import KeptSnapshot


def put(connection: sa.Connection, kept: KeptSnapshot) -> None:
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


def get(connection: sa.Connection, snapshot_id: str) -> KeptSnapshot | None:
    """A snapshot by id."""
    query = sa.select(snapshots).where(snapshots.c.snapshot_id == snapshot_id)
    row = (connection.execute(query)).mappings().first()
    return _to_snapshot(row) if row else None


def unnamed(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Ids of the snapshots of models that are in memory only."""
    where = snapshots.c.model_id.in_(model_ids) & (snapshots.c.uri == "")
    return [row.snapshot_id for row in connection.execute(sa.select(snapshots.c.snapshot_id).where(where))]


def unreachable(connection: sa.Connection) -> list[str]:
    """Ids of snapshots that are in memory only and that no sampling session, open or over, names."""
    is_named = sa.exists().where(sampling_sessions.c.snapshot_id == snapshots.c.snapshot_id)
    query = sa.select(snapshots.c.snapshot_id).where((snapshots.c.uri == "") & ~is_named)
    return [row.snapshot_id for row in connection.execute(query)]


def delete(connection: sa.Connection, snapshot_id: str) -> None:
    """Forgets a snapshot."""
    connection.execute(sa.delete(snapshots).where(snapshots.c.snapshot_id == snapshot_id))


def _to_snapshot(row: Any) -> KeptSnapshot:
    identity = weights_pb2.Snapshot.FromString(row["identity"])
    return KeptSnapshot(identity, row["uri"], row["trainer_instance"], row["created_at"])
