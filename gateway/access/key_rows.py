"""Rows of API keys. A key is an owner's; an owner is a name that outlives its keys."""

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from fovea.wire.errors import InvalidInput
from gateway.database.schema import keys
from gateway.database.sql_engine import insert_new

_ID_LENGTH = 12


class Source(enum.StrEnum):
    """Where a key comes from."""

    CREATED = "created"
    """Made by `fovea keys create`: valid until it expires or is revoked."""
    CONFIGURED = "configured"
    """Named by the gateway's settings: valid while they name it."""
    REMOVED = "removed"
    """Named by the settings once, and no longer."""


@dataclass(frozen=True)
class Key:
    """One key, without the key itself.

    Attributes:
        key_id: The beginning of the hash, for people.
        key_hash: SHA-256 of the key, in hex.
        owner: Whose it is: all data belongs to an owner.
        name: What it is for.
        expires_at: Seconds since the epoch; None for never.
    """

    key_id: str
    key_hash: str
    owner: str
    name: str = ""
    source: Source = Source.CREATED
    created_at: float = field(default_factory=time.time)
    expires_at: float | None = None
    revoked_at: float | None = None

    def problem(self, now: float) -> str:
        """Why it is not valid, in words that end a sentence; empty if it is."""
        if self.revoked_at is not None:
            return "has been revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "has expired"
        return "is no longer among the keys of the gateway's settings" if self.source is Source.REMOVED else ""


def nameless(key_hash: str) -> str:
    """The owner of a key that was given without one."""
    return f"key-{key_hash[:_ID_LENGTH]}"


def of_hash(key_hash: str, owner: str, **more: Any) -> Key:
    """A new key."""
    return Key(key_hash[:_ID_LENGTH], key_hash, owner or nameless(key_hash), **more)


def every(connection: sa.Connection) -> list[Key]:
    """All keys, valid or not, oldest first."""
    rows = connection.execute(sa.select(keys).order_by(keys.c.created_at)).mappings()
    return [_key(row) for row in rows]


def insert(connection: sa.Connection, key: Key) -> bool:
    """Keeps a new key; False if it is there already."""
    return insert_new(connection, keys, vars(key))


def revoke(connection: sa.Connection, key_id: str, now: float) -> Key | None:
    """Ends a key for good, also one that the settings go on to name; returns it, or None for an unknown id."""
    where = keys.c.key_id == key_id
    connection.execute(sa.update(keys).where(where, keys.c.revoked_at.is_(None)).values(revoked_at=now))
    row = connection.execute(sa.select(keys).where(where)).mappings().first()
    return _key(row) if row else None


def configure(connection: sa.Connection, given: Mapping[str, Key]) -> None:
    """Makes the settings' keys, by hash, the only configured ones. One that was created stays as it was created.

    Raises InvalidInput if the settings give a created key to another owner.
    """
    configured = keys.c.source == Source.CONFIGURED
    gone = sa.update(keys).where(configured, keys.c.key_hash.not_in(given)).values(source=Source.REMOVED)
    connection.execute(gone)
    known = {key.key_hash: key for key in every(connection) if key.key_hash in given}
    for key_hash, key in given.items():
        if key_hash not in known:
            insert(connection, key)
        elif known[key_hash].source is not Source.CREATED:
            owned = {"owner": key.owner, "source": Source.CONFIGURED}
            connection.execute(sa.update(keys).where(keys.c.key_hash == key_hash).values(owned))
        elif key.owner not in (known[key_hash].owner, nameless(key_hash)):
            raise InvalidInput(
                f"api_key: key {key.key_id} was created for {known[key_hash].owner!r}, not {key.owner!r}; it is valid "
                "without the settings: leave it out",
                field="api_key",
            )


def _key(row: Any) -> Key:
    return Key(**{**row, "source": Source(row["source"])})
