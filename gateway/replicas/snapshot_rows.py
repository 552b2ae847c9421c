"""Rows of snapshots that no client can sample from any more."""

import sqlalchemy as sa

from gateway.database.schema import sampling_sessions, snapshots


def unreachable(connection: sa.Connection) -> list[str]:
    """Ids of snapshots that are in memory only and that no sampling session, open or over, names."""
    is_named = sa.exists().where(sampling_sessions.c.snapshot_id == snapshots.c.snapshot_id)
    query = sa.select(snapshots.c.snapshot_id).where((snapshots.c.uri == "") & ~is_named)
    return [row.snapshot_id for row in connection.execute(query)]


def delete(connection: sa.Connection, snapshot_id: str) -> None:
    """Forgets a snapshot."""
    connection.execute(sa.delete(snapshots).where(snapshots.c.snapshot_id == snapshot_id))
