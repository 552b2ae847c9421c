"""API keys: their text format, scopes and database rows, and the callers that they identify. Only hashes are stored.

A key belongs to an owner. An owner is a name that outlives its keys.
"""

import asyncio
import enum
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sa

from fovea.runtime.hosts import host_of, is_loopback
from fovea.wire.conventions import is_token
from fovea.wire.errors import InvalidInput, NotFound, PermissionDenied, Unauthenticated, Unavailable
from fovea_gateway.database.database import SOON_S, Database
from fovea_gateway.database.schema import keys
from fovea_gateway.database.sql_engine import insert_new

logger = logging.getLogger(__name__)

PREFIX = "tml-"
"""The prefix that the SDK requires of every key."""
PUBLISHED = "tml-local"
"""The key printed in the documentation, so it is accepted only from programs on this machine."""
_LOOK_S = 1.0
_KEY_BYTES = 32
_ID_LENGTH = 12
_KEY = re.compile(r"tml-[!-~]{1,500}")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-+@]{0,99}")


class Scope(enum.StrEnum):
    """The permissions of a key; each scope includes those before it."""

    READ = "read"
    """Open sessions, look at models, checkpoints, results and the owner's usage."""
    SAMPLE = "sample"
    """Sample."""
    TRAIN = "train"
    """Create, train, save and delete models and checkpoints."""
    ADMIN = "admin"
    """Create and revoke keys, set limits, see usage and end sessions of all owners."""

    def includes(self, other: "Scope") -> bool:
        """Returns whether this scope permits what the other one permits."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class Caller:
    """The sender of a request, identified by its API key.

    Attributes:
        owner: The owner of the key; all data belongs to an owner.
        key_id: The id of the key; empty for work that no request started.
    """

    owner: str
    key_id: str = ""
    scope: Scope = Scope.TRAIN

    def require(self, scope: Scope, what: str) -> None:
        """Raises PermissionDenied, which names `what`, if the key lacks the scope."""
        if not self.scope.includes(scope):
            owner = "NAME" if self.owner == nameless(hash_key(PUBLISHED)) else self.owner
            raise PermissionDenied(
                f"this API key ({self.key_id}) has scope {self.scope}, and {what} needs {scope}: use another key of "
                f"yours, or ask the operator for one (`fovea keys create --owner {owner} --scope {scope}`)",
                scope=scope.value,
            )


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller(""))  # noqa: B039 - frozen
"""The sender of the request that the current task answers."""
SUBJECT: ContextVar[str] = ContextVar("subject", default="")
"""The id of the object that this request is about, for the audit log; empty if the path of the request names it."""


def asked_owner(asked: str, what: str) -> str | None:
    """Returns the owner of the requested data: the caller if `asked` is empty, None (all owners) if it is `*`.

    Raises PermissionDenied, which names the data as `what`, for other owners if the caller lacks the scope admin.
    """
    caller = CALLER.get()
    owner = asked or caller.owner
    if owner != caller.owner:
        caller.require(Scope.ADMIN, f"{what} of other owners")
    return None if owner == "*" else owner


class GivenKey(NamedTuple):
    """A key from the settings. If `owner` is empty, the key is its own owner."""

    owner: str
    key: str


def hash_key(key: str) -> str:
    """Returns the SHA-256 of a key. Keys are long random text, so a slow hash is not needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_owner(owner: str) -> str:
    """Returns an owner's name. Raises ValueError if it is not a valid name, for example because it is a key."""
    if owner.startswith(PREFIX) or not _OWNER.fullmatch(owner):
        raise ValueError("an owner has 1 to 100 letters, digits or _ . - + @, and does not begin with tml-")
    return owner


def parse_given(text: str) -> GivenKey:
    """Reads `tml-KEY` or `OWNER=tml-KEY`. Raises ValueError with a message that does not contain the key."""
    owner, _, key = ("", "", text) if text.startswith(PREFIX) else text.rpartition(f"={PREFIX}")
    key = key if not owner else PREFIX + key
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"a key of {len(text)} characters is not tml-... or OWNER=tml-...: the SDK accepts keys that begin with "
            f"{PREFIX} and contain printable ASCII characters without spaces"
        )
    return GivenKey(check_owner(owner) if owner else "", key)


def parse_scope(text: str) -> Scope:
    """Reads a scope; an empty text means `train`. Raises InvalidInput if the text is not a scope."""
    try:
        return Scope(text or Scope.TRAIN)
    except ValueError:
        raise InvalidInput(f"scope is {text[:40]!r}; it is one of {', '.join(Scope)}", field="scope") from None


class Source(enum.StrEnum):
    """The origin of a key."""

    CREATED = "created"
    """Created by `fovea keys create`: valid until it expires or is revoked."""
    CONFIGURED = "configured"
    """Listed in the gateway's settings: valid as long as they list it."""
    REMOVED = "removed"
    """Listed in the settings once, but no longer."""


@dataclass(frozen=True)
class Key:
    """The record of one key, without the key itself.

    Attributes:
        key_id: The first characters of the hash, for display.
        key_hash: SHA-256 of the key, in hex.
        owner: The owner that the key belongs to; all data belongs to an owner.
        name: A description of its purpose.
        scope: The operations that it permits.
        expires_at: Seconds since the epoch; None means never.
    """

    key_id: str
    key_hash: str
    owner: str
    name: str = ""
    source: Source = Source.CREATED
    scope: Scope = Scope.TRAIN
    created_at: float = field(default_factory=time.time)
    expires_at: float | None = None
    revoked_at: float | None = None

    @property
    def caller(self) -> Caller:
        """Returns the caller that this key authenticates."""
        return Caller(self.owner, self.key_id, self.scope)

    @property
    def shown(self) -> dict[str, Any]:
        """Returns the record as JSON for administrators; a missing time is 0."""
        return {
            "key_id": self.key_id,
            "owner": self.owner,
            "name": self.name,
            "scope": self.scope.value,
            "source": self.source.value,
            "created_at": self.created_at,
            "expires_at": self.expires_at or 0.0,
            "revoked_at": self.revoked_at or 0.0,
            "problem": self.problem(time.time()),
        }

    def problem(self, now: float) -> str:
        """Returns why the key is not valid, as the end of a sentence; empty if it is valid."""
        if self.revoked_at is not None:
            return "has been revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "has expired"
        return "is no longer among the keys of the gateway's settings" if self.source is Source.REMOVED else ""


def nameless(key_hash: str) -> str:
    """Returns the owner's name for a key that the settings give without an owner."""
    return f"key-{key_hash[:_ID_LENGTH]}"


def new_key(key_hash: str, owner: str, **more: Any) -> Key:
    """Returns the record of a key. If `owner` is empty, the owner's name is derived from the hash."""
    return Key(key_hash[:_ID_LENGTH], key_hash, owner or nameless(key_hash), **more)


def random_key(owner: str, **more: Any) -> tuple[str, Key]:
    """Returns a new random key of 256 bits, and its record. Only the record is stored."""
    text = PREFIX + secrets.token_hex(_KEY_BYTES)
    return text, new_key(hash_key(text), owner, **more)


class KeyRing:
    """The keys that the gateway accepts: those in the settings, and those that `fovea keys create` made.

    Args:
        given: The keys in the settings. If there are none, the published key is accepted when `host` is a loopback
            address.
        host: The address that the gateway listens on.
        allowed_hosts: Host names, besides loopback ones, under which the published key may be used.
        read_token: Returns the id of the key that a token names. Raises Unauthenticated.
    """

    def __init__(
        self, database: Database, given: Iterable[GivenKey], host: str, allowed_hosts: Iterable[str] = (),
        read_token: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        self._database, self._host, self._read_token = database, host, read_token
        self._allowed_hosts = {name.lower() for name in allowed_hosts}
        self._given = list(given) or ([GivenKey("", PUBLISHED)] if is_loopback(host) else [])
        self._keys, self._named = dict[str, Key](), dict[str, Key]()
        self._reading = asyncio.Lock()

    async def load(self) -> None:
        """Makes the settings' keys the only configured ones, and reads all keys.

        Raises InvalidInput if no key is valid, or if the settings give a key to another owner than `fovea keys create`
        did.
        """
        hashed = {hash_key(key): owner for owner, key in self._given}
        given = {each: new_key(each, owner, source=Source.CONFIGURED) for each, owner in hashed.items()}
        await self._database.write(lambda connection: configure_keys(connection, given))
        await self._read()
        if not any(not key.problem(time.time()) for key in self._keys.values()):
            raise InvalidInput(
                f"host is {self._host}, which other machines reach, and there is no API key: create one with `fovea "
                "keys create`, or give one by --api-key-file or FOVEA_GATEWAY_API_KEY",
                field="host",
            )
        for key in self._keys.values():
            if key.key_hash in given and (problem := key.problem(time.time())):
                logger.warning("key %s of the settings %s", key.key_id, problem)

    async def watch(self) -> None:
        """Reads the keys every second until it is cancelled, because `fovea keys` changes them in the database."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._read()
            except Exception:
                logger.exception("the API keys could not be read; the keys read before remain in use")

    def identify(self, key: str | None, addresses: Iterable[str] = ()) -> Caller:
        """Returns the caller that this key identifies, and sets it as the current task's caller.

        Args:
            addresses: The Host and Origin headers of an HTTP request.

        Raises:
            Unauthenticated: The key is missing, unknown or no longer valid.
            PermissionDenied: The published key came with a Host or Origin that is neither loopback nor allowed. The
                cause may be DNS rebinding: a page of another site makes the browser send the site's requests to this
                gateway.
        """
        if not key:
            raise Unauthenticated("no API key: send X-API-Key (the SDK reads TINKER_API_KEY) or Authorization: Bearer")
        known = self._named.get(self._read_token(key)) if is_token(key) else self._keys.get(hash_key(key))
        if known is None:
            raise Unauthenticated("this API key is unknown; `fovea up` prints one, `fovea keys create` makes one")
        if problem := known.problem(time.time()):
            raise Unauthenticated(f"this API key {problem}")
        if key == PUBLISHED:
            self._check_local(addresses)
        CALLER.set(known.caller)
        return known.caller

    def _check_local(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            if address and not is_loopback(host := host_of(address)) and host not in self._allowed_hosts:
                raise PermissionDenied(
                    f"the key {PUBLISHED} is published, so it works only under loopback names such as 127.0.0.1; the "
                    f"request has the host or origin {address[:80]!r}. Use a loopback name, create a key with `fovea"
                    " keys create`, or add the name to gateway.allowed_host"
                )

    def identify_call(self, metadata: Any) -> Caller:
        """Returns the caller of a gRPC call, given its metadata as pairs of name and value. Raises Unauthenticated."""
        return self.identify(dict(metadata or ()).get("x-api-key"))

    async def create(self, owner: str, name: str, scope: Scope, expires_at: float | None) -> tuple[str, Key]:
        """Creates a key that is valid at once. Returns its text, which cannot be shown again, and its record.

        Raises InvalidInput if `owner` is not a valid name, and Unavailable after seconds without the database.
        """
        try:
            text, key = random_key(check_owner(owner), name=name, scope=scope, expires_at=expires_at)
        except ValueError as error:
            raise InvalidInput(str(error), field="owner") from None
        await self._database.write_soon(lambda connection: insert_key(connection, key))
        SUBJECT.set(key.key_id)
        try:
            await asyncio.wait_for(self._read(), SOON_S)
        except TimeoutError:
            raise Unavailable("the database no longer answers; the key is stored: revoke it and make another") from None
        return text, key

    async def keep(self, key: Key) -> Key:
        """Stores a key, or updates the stored one with its hash unless that is revoked. Returns the stored record."""
        await self._database.write(lambda connection: insert_key(connection, key))
        return await self._changed(key.key_id, owner=key.owner, scope=key.scope, expires_at=key.expires_at)

    def is_valid(self, key_id: str) -> bool:
        """Returns whether a key with this id exists and has neither expired nor been revoked."""
        return key_id in self._named and not self._named[key_id].problem(time.time())

    def listed(self) -> list[Key]:
        """Returns all keys, valid or not, oldest first."""
        return list(self._keys.values())

    async def revoke(self, key_id: str) -> Key:
        """Revokes a key permanently and at once. Raises NotFound."""
        return await self._changed(key_id, revoked_at=time.time())

    async def expire(self, key_id: str, expires_at: float | None) -> Key:
        """Sets when a key expires, in seconds since the epoch; None means never. Raises NotFound."""
        return await self._changed(key_id, expires_at=expires_at)

    async def _changed(self, key_id: str, **values: float | str | None) -> Key:
        key = await self._database.write(lambda connection: change_key(connection, key_id, **values))
        if key is None:
            raise NotFound(f"there is no key {key_id!r}", field="key_id")
        await self._read()
        return key

    async def _read(self) -> None:
        async with self._reading:  # because an earlier read that returns last would make a revoked key valid again
            self._keys = {key.key_hash: key for key in await self._database.read(all_keys)}
            self._named = {key.key_id: key for key in self._keys.values()}


def all_keys(connection: sa.Connection) -> list[Key]:
    """Returns all keys, valid or not, oldest first."""
    return [_key(row) for row in connection.execute(sa.select(keys).order_by(keys.c.created_at)).mappings()]


def insert_key(connection: sa.Connection, key: Key) -> bool:
    """Stores a new key. Returns False if it exists already."""
    return insert_new(connection, keys, vars(key))


def change_key(connection: sa.Connection, key_id: str, **values: float | str | None) -> Key | None:
    """Updates columns of a key unless it is revoked. Returns the key, or None for an unknown id.

    The change also applies to a key that the settings still list.
    """
    where = keys.c.key_id == key_id
    connection.execute(sa.update(keys).where(where, keys.c.revoked_at.is_(None)).values(**values))
    row = connection.execute(sa.select(keys).where(where)).mappings().first()
    return _key(row) if row else None


def configure_keys(connection: sa.Connection, given: Mapping[str, Key]) -> None:
    """Makes the settings' keys, given by hash, the only configured ones. Keys that were created stay unchanged.

    Raises InvalidInput if the settings give a created key to another owner.
    """
    configured = keys.c.source == Source.CONFIGURED
    connection.execute(sa.update(keys).where(configured, keys.c.key_hash.not_in(given)).values(source=Source.REMOVED))
    known = {key.key_hash: key for key in all_keys(connection) if key.key_hash in given}
    for key_hash, key in given.items():
        if key_hash not in known:
            insert_key(connection, key)
        elif known[key_hash].source is not Source.CREATED:
            owned = {"owner": key.owner, "source": Source.CONFIGURED}
            connection.execute(sa.update(keys).where(keys.c.key_hash == key_hash).values(owned))
        elif key.owner not in (known[key_hash].owner, nameless(key_hash)):
            raise InvalidInput(
                f"api_key: key {key.key_id} was created for {known[key_hash].owner!r}, not {key.owner!r}. It is valid "
                "without being listed in the settings: remove it from them",
                field="api_key",
            )


def _key(row: Any) -> Key:
    return Key(**{**row, "source": Source(row["source"]), "scope": Scope(row["scope"])})
