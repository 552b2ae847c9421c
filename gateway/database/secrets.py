"""Random keys that the gateway keeps to itself."""

import secrets as random

import sqlalchemy as sa

from gateway.database.database import insert_new
from gateway.database.schema import secrets

_BYTES = 32


def take(connection: sa.Connection, name: str) -> bytes:
    """The key of a name, made the first time that it is asked for."""
    insert_new(connection, secrets, {"name": name, "value": random.token_bytes(_BYTES)})
    value: bytes = connection.execute(sa.select(secrets.c.value).where(secrets.c.name == name)).scalar_one()
    return value
