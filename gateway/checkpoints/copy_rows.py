"""Rows of copied checkpoints: which request made which, so that a repeat answers the same."""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from gateway.database.schema import copies
from gateway.database.sql_engine import insert_new


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


def insert(connection: sa.Connection, copy: Copy) -> bool:
    """Keeps a copy; False if its run or its key has one."""
    return insert_new(connection, copies, dict(vars(copy)))


def of_key(connection: sa.Connection, owner: str, request_key: str) -> Copy | None:
    """The copy that a request with this key made."""
    return _first(connection, (copies.c.owner == owner) & (copies.c.request_key == request_key))


def of_model(connection: sa.Connection, model_id: str) -> Copy | None:
    """The copy that a run holds."""
    return _first(connection, copies.c.model_id == model_id)


def _first(connection: sa.Connection, where: sa.ColumnElement[Any]) -> Copy | None:
    row = connection.execute(sa.select(copies).where(where)).mappings().first()
    return Copy(**row) if row else None
