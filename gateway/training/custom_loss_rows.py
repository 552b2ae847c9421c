"""Rows of traced losses."""

import time
from dataclasses import asdict, dataclass, field

import sqlalchemy as sa

from gateway.database.schema import custom_losses
from gateway.database.sql_engine import insert_new


@dataclass(frozen=True)
class CustomLossRow:
    """A loss of a session; `loss` is a serialized `fovea.api.v1.CustomLoss`."""

    custom_loss_id: str
    session_id: str
    loss: bytes
    created_at: float = field(default_factory=time.time)


def insert(connection: sa.Connection, row: CustomLossRow) -> bool:
    """Keeps a loss; False if its id is taken, which leaves the first one."""
    return insert_new(connection, custom_losses, asdict(row))


def get(connection: sa.Connection, session_id: str, custom_loss_id: str) -> bytes | None:
    """A serialized loss, if it is the session's."""
    where = (custom_losses.c.custom_loss_id == custom_loss_id) & (custom_losses.c.session_id == session_id)
    row = connection.execute(sa.select(custom_losses.c.loss).where(where)).first()
    return bytes(row.loss) if row else None


def delete(connection: sa.Connection, session_id: str) -> None:
    """Drops all losses of a session."""
    connection.execute(sa.delete(custom_losses).where(custom_losses.c.session_id == session_id))
