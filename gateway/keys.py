"""API keys: who a request is from. Keys are compared and kept as hashes."""

import hashlib
import time

import sqlalchemy as sa

from fovea.wire.errors import Unauthenticated
from gateway.identity import Caller
from gateway.store.database import Database, insert_new
from gateway.store.schema import api_keys


def hash_key(key: str) -> str:
    """SHA-256 of a key; keys are long random text, so no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The keys that are let in: those of the settings and those in the database."""

    def __init__(self, database: Database, keys: list[str]) -> None:
        self._database = database
        self._owners = {hash_key(key): f"key-{hash_key(key)[:12]}" for key in keys}

    async def load(self) -> None:
        """Reads the database's keys and keeps the hashes of the settings' own."""
        for key_hash, owner in self._owners.items():
            row = {"owner": owner, "key_hash": key_hash, "created_at": time.time()}
            await self._database.write(lambda connection, row=row: insert_new(connection, api_keys, row))  # type: ignore[misc]
        rows = await self._database.read(lambda connection: connection.execute(sa.select(api_keys)).all())
        self._owners |= {row.key_hash: row.owner for row in rows}

    def identify(self, key: str | None) -> Caller:
        """Who has this key. Raises Unauthenticated."""
        if not key:
            raise Unauthenticated("no API key: send it as X-API-Key (the SDK reads TINKER_API_KEY)")
        owner = self._owners.get(hash_key(key))
        if owner is None:
            raise Unauthenticated("this API key is not known here")
        return Caller(owner)
