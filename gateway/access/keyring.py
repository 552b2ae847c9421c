"""Who is let in: API keys as they are given, kept and compared. Kept and compared are their hashes alone."""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from fovea.runtime.hosts import is_loopback
from fovea.wire.errors import InvalidInput, Unauthenticated
from gateway.access import key_rows as rows
from gateway.access.key_rows import Key, Source
from gateway.database.database import Database
from gateway.identity import Caller

logger = logging.getLogger(__name__)

PREFIX = "tml-"
"""How the SDK wants keys to begin."""

PUBLISHED = "tml-local"
"""In every copy of the documentation, so good for programs of this machine only."""

_LOOK_S = 1.0
_KEY = re.compile(r"tml-[!-~]{1,500}")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-+@]{0,99}")


class GivenKey(NamedTuple):
    """A key as the settings give it. Without an owner it owns what it makes by itself."""

    owner: str
    key: str


def hash_key(key: str) -> str:
    """SHA-256 of a key; keys are long random text, so no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_owner(owner: str) -> str:
    """Returns an owner's name. Raises ValueError for what is none, a key above all."""
    if owner.startswith(PREFIX) or not _OWNER.fullmatch(owner):
        raise ValueError("an owner has 1 to 100 letters, digits or _ . - + @, and does not begin with tml-")
    return owner


def parse_given(text: str) -> GivenKey:
    """Reads `tml-KEY` or `OWNER=tml-KEY`. Raises ValueError, which does not repeat the key."""
    owner, _, key = ("", "", text) if text.startswith(PREFIX) else text.rpartition(f"={PREFIX}")
    key = key if not owner else PREFIX + key
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"a key of {len(text)} characters is not tml-... or OWNER=tml-...: the SDK takes keys that begin with "
            f"{PREFIX}, of letters, digits and signs"
        )
    return GivenKey(check_owner(owner) if owner else "", key)


class KeyRing:
    """The keys that are let in: those of the settings, and those that `fovea keys create` made.

    Args:
        given: The keys of the settings. Without any, the published one is let in if `host` is a loopback.
        host: Where the gateway listens.
    """

    def __init__(self, database: Database, given: Iterable[GivenKey], host: str) -> None:
        self._database, self._host = database, host
        self._given = list(given) or ([GivenKey("", PUBLISHED)] if is_loopback(host) else [])
        self._keys: dict[str, Key] = {}

    async def load(self) -> None:
        """Makes the settings' keys the only configured ones, and reads all.

        Raises InvalidInput if nobody could come in, or a key is given to two owners.
        """
        hashed = {hash_key(key): owner for owner, key in self._given}
        given = {each: rows.of_hash(each, owner, source=Source.CONFIGURED) for each, owner in hashed.items()}
        await self._database.write(lambda connection: rows.configure(connection, given))
        await self._read()
        if not any(not key.problem(time.time()) for key in self._keys.values()):
            raise InvalidInput(
                f"host is {self._host}, which other machines reach, and there is no API key: make one with `fovea keys "
                "create`, or give one by --api-key-file or FOVEA_GATEWAY_API_KEY",
                field="host",
            )
        for key in self._keys.values():
            if key.key_hash in given and (problem := key.problem(time.time())):
                logger.warning("key %s of the settings %s", key.key_id, problem)

    async def watch(self) -> None:
        """Follows what `fovea keys` changes, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._read()
            except Exception:
                logger.exception("the API keys could not be read; those of before stay")

    def identify(self, key: str | None) -> Caller:
        """Who has this key. Raises Unauthenticated."""
        if not key:
            raise Unauthenticated("no API key: send it as X-API-Key (the SDK reads TINKER_API_KEY)")
        known = self._keys.get(hash_key(key))
        if known is None:
            raise Unauthenticated("this API key is not known here")
        if problem := known.problem(time.time()):
            raise Unauthenticated(f"this API key {problem}")
        return Caller(known.owner)

    def identify_call(self, metadata: Any) -> Caller:
        """Who sent a gRPC call with this metadata, pairs of name and value. Raises Unauthenticated."""
        return self.identify(dict(metadata or ()).get("x-api-key"))

    async def _read(self) -> None:
        self._keys = {key.key_hash: key for key in await self._database.read(rows.every)}
