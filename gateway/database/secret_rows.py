"""Random keys that the gateway makes for itself and keeps, such as the one that signs links."""

import secrets

import sqlalchemy as sa

from gateway.database import schema
from gateway.database.sql_engine import insert_new

_BYTES = 32


def take(connection: sa.Connection, name: str) -> bytes:
    """The key of this name (32 bytes), made when it is asked for the first time."""
    table = schema.secrets
    insert_new(connection, table, {"name": name, "value": secrets.token_bytes(_BYTES)})
    value: bytes = connection.execute(sa.select(table.c.value).where(table.c.name == name)).scalar_one()
    return value
