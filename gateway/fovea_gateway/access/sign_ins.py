"""Sign-ins on the live page, the short-lived tokens that the SDK exchanges its credential for, and signed links.

A sign-in creates a key that expires; a cookie contains its text. A token or a link names a key, so revoking that key
ends it.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlencode

import jwt
import sqlalchemy as sa

from fovea.wire.conventions import is_token
from fovea.wire.errors import InvalidInput, PermissionDenied, Unauthenticated
from fovea_gateway.access.api_keys import CALLER, Caller, Key, KeyRing, new_key
from fovea_gateway.access.oidc import Identity, OidcProvider, base64url
from fovea_gateway.database import schema
from fovea_gateway.database.database import Database
from fovea_gateway.database.sql_engine import insert_new

LOGIN_S = 600
"""Seconds in which a person must sign in at the provider."""
TOKEN_S = 900
"""Lifetime in seconds of an exchanged token. The SDK exchanges again after half of it."""
_DORMANT_S, _KEPT_S = 3600, 86400
"""Seconds without an exchange after which a person's key expires, and seconds for which expired keys stay listed."""
_PERSONAL, _SESSION = "tokens of a sign-in", "sign-in on the page"
"""The names of keys that this module creates."""
_OWN_ISSUER = "fovea"
_SIGN_INS, _LINKS = "sign-in", "export links"
"""The names of the secrets in the database."""
_SECRET_BYTES = 32
_MOST_TOKEN = 2**14


class SignIns:
    """Keys for people that the provider identifies, and tokens for keys. Call `open` first.

    Args:
        provider: None if sign-in is off.
        session_s: Seconds after which a sign-in on the page expires.
    """

    def __init__(self, database: Database, keys: KeyRing, provider: OidcProvider | None, session_s: float) -> None:
        self._database, self._keys, self._provider, self.session_s = database, keys, provider, session_s
        self._secret = b""

    @property
    def is_on(self) -> bool:
        """Returns whether the settings name a provider."""
        return self._provider is not None

    @property
    def provider(self) -> OidcProvider:
        """Returns the provider. Raises InvalidInput if sign-in is off."""
        if self._provider is None:
            raise InvalidInput("sign-in is off: set gateway.oidc_issuer, or use an API key")
        return self._provider

    async def open(self) -> None:
        """Reads the secret that signs tokens, and creates it on first use."""
        self._secret = await self._database.write(lambda connection: _take_secret(connection, _SIGN_INS))

    def begin(self) -> str:
        """Returns the state of a new sign-in: when it expires, a random number, and a signature."""
        state = f"{int(time.time()) + LOGIN_S}.{secrets.token_urlsafe(32)}"
        return f"{state}.{self.derive('state', state)}"

    def check_state(self, state: str, cookie: str) -> None:
        """Raises Unauthenticated unless this browser began the sign-in with this state a short time ago."""
        stem, _, signature = state.rpartition(".")
        is_ours = hmac.compare_digest(self.derive("state", stem).encode(), signature.encode())
        if not is_ours or not hmac.compare_digest(state.encode(), cookie.encode()):
            raise Unauthenticated("this browser did not begin this sign-in: open the page and sign in again")
        if int(stem.partition(".")[0]) < time.time():
            raise Unauthenticated(f"this sign-in took longer than {LOGIN_S} s: open the page and sign in again")

    def derive(self, purpose: str, state: str) -> str:
        """Returns a secret text of 43 letters that belongs to one sign-in."""
        return base64url(hmac.new(self._secret, f"{purpose}\0{state}".encode(), hashlib.sha256).digest())

    async def open_session(self, person: Identity) -> tuple[str, Key]:
        """Returns a new key for the page of a person, and its record. Raises PermissionDenied."""
        await self._personal_key(person)
        await self._database.write(_drop_expired)
        expires_at = time.time() + self.session_s
        return await self._keys.create(person.owner, _SESSION, person.scope, expires_at)

    async def identify(self, credential: str) -> Caller:
        """Returns the caller of an exchange, by an API key, a token of this gateway or an ID token.

        Raises Unauthenticated, PermissionDenied, Unavailable.
        """
        if self._provider is None or not is_token(credential) or self.is_own(credential):
            return self._keys.identify(credential)
        key = await self._personal_key(await self._provider.identify(credential))
        CALLER.set(key.caller)
        return key.caller

    async def close_session(self, key: str) -> None:
        """Ends a sign-in on the page. Raises InvalidInput if the key is none."""
        ended = next((each for each in self._keys.listed() if each.key_id == self._keys.identify(key).key_id), None)
        if ended is None or ended.name != _SESSION:
            raise InvalidInput("this request comes with an API key, not with the cookie of a sign-in")
        await self._keys.expire(ended.key_id, time.time())

    def exchange(self, credential: str, caller: Caller) -> str:
        """Returns a new token for the caller's key, with the claims that the SDK reads.

        Raises Unauthenticated if the credential is such a token, which would then outlive the person's groups.
        """
        if is_token(credential) and self.is_own(credential):
            raise Unauthenticated("a token of this gateway cannot be exchanged: send an ID token or an API key")
        now = int(time.time())
        claims = {"iss": _OWN_ISSUER, "aud": _OWN_ISSUER, "sub": caller.owner, "org_id": _OWN_ISSUER}
        claims |= {"email": caller.owner} if "@" in caller.owner else {}
        times = {"iat": now, "exp": now + TOKEN_S}
        return jwt.encode({**claims, **times, "key_id": caller.key_id}, self._secret, algorithm="HS256")

    def key_id_of(self, token: str) -> str:
        """Returns the id of the key that a token of this gateway names. Raises Unauthenticated."""
        if not self.is_own(token):
            raise Unauthenticated(
                "this is a token of another issuer: the SDK exchanges it at auth/token if gateway.oidc_issuer is set"
            )
        try:
            claims = jwt.decode(token, self._secret, algorithms=["HS256"], audience=_OWN_ISSUER, issuer=_OWN_ISSUER)
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"this token is not valid: {error}; exchange your credential again") from None
        return str(claims["key_id"])

    def is_own(self, token: str) -> bool:
        """Returns whether a token claims to be of this gateway. Raises Unauthenticated if it cannot be read."""
        try:
            return jwt.get_unverified_header(token[:_MOST_TOKEN]).get("alg") == "HS256"
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"this token cannot be read: {error}") from None

    async def _personal_key(self, person: Identity) -> Key:
        """Returns the key that represents a person. No caller knows its text. Raises PermissionDenied."""
        found = f"person\0{self.provider.issuer}\0{person.subject}"
        key_hash = hmac.new(self._secret, found.encode(), hashlib.sha256).hexdigest()
        expires_at = time.time() + _DORMANT_S
        key = await self._keys.keep(
            new_key(key_hash, person.owner, name=_PERSONAL, scope=person.scope, expires_at=expires_at)
        )
        if key.revoked_at is not None:
            raise PermissionDenied(f"the operator has revoked the sign-in of {person.owner} (key {key.key_id})")
        return key


class Signature(NamedTuple):
    """The query of a signed link.

    Attributes:
        expires_at: Seconds since the epoch, a whole number.
        key_id: The API key that asked for the link. The link is valid no longer than the key.
        code: HMAC-SHA256 over the link's target, its expiry and the key id, in hex.
    """

    expires_at: int
    key_id: str
    code: str

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "Signature":
        """Reads the query of a link. Raises InvalidInput if it has no expiry."""
        try:
            expires_at = int(query.get("expires", ""))
        except ValueError:
            raise InvalidInput("expires is missing from this link or is not a number", field="expires") from None
        return cls(expires_at, query.get("key", ""), query.get("signature", ""))

    def __str__(self) -> str:
        return urlencode({"expires": self.expires_at, "key": self.key_id, "signature": self.code})


class LinkSigner:
    """A signer of links. Its secret is in the database, so that links remain valid when the gateway restarts. Call
    `open` first.

    Args:
        is_valid: Returns whether the API key with this id is valid now.
    """

    def __init__(self, database: Database, is_valid: Callable[[str], bool]) -> None:
        self._database, self._is_valid = database, is_valid
        self._key = b""

    async def open(self) -> None:
        """Reads the secret, and creates it on first use."""
        self._key = await self._database.write(lambda connection: _take_secret(connection, _LINKS))

    def sign(self, expires_at: int, *target: str) -> Signature:
        """Signs a link for the caller.

        Args:
            target: The texts that identify the link's target.
        """
        key_id = CALLER.get().key_id
        return Signature(expires_at, key_id, self._code(target, expires_at, key_id))

    def check(self, signature: Signature, source: str, *target: str) -> None:
        """Checks a link. Raises PermissionDenied if its signature is wrong, its key is no longer valid, or it has
        expired.

        Args:
            source: The request that returns such links.
        """
        expected = self._code(target, signature.expires_at, signature.key_id)
        is_right = hmac.compare_digest(expected.encode(), signature.code.encode())
        if not is_right or not self._is_valid(signature.key_id):
            raise invalid_link(source)
        if signature.expires_at <= time.time():
            raise PermissionDenied(f"this link has expired; ask for {source} again")

    def _code(self, target: Iterable[str], expires_at: int, key_id: str) -> str:
        content = "\0".join((*target, str(expires_at), key_id)).encode()
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()


def invalid_link(source: str) -> PermissionDenied:
    """Returns the error for a wrong link and for a link to a deleted target. Strangers cannot tell the two apart."""
    return PermissionDenied(f"this link is not valid, or its key or target is gone; ask for {source} again")


def _take_secret(connection: sa.Connection, name: str) -> bytes:
    """Returns a secret of 32 bytes, and creates it on first use."""
    insert_new(connection, schema.secrets, {"name": name, "value": secrets.token_bytes(_SECRET_BYTES)})
    value = sa.select(schema.secrets.c.value).where(schema.secrets.c.name == name)
    return bytes(connection.execute(value).scalar_one())


def _drop_expired(connection: sa.Connection) -> None:
    """Deletes keys of earlier sign-ins, except those that an operator has revoked."""
    keys = schema.keys.c
    is_old = keys.expires_at < time.time() - _KEPT_S
    ours = keys.name.in_([_PERSONAL, _SESSION]), keys.revoked_at.is_(None)
    connection.execute(sa.delete(schema.keys).where(is_old, *ours))
