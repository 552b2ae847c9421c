"""An OpenID Connect provider: its settings, its addresses and keys, and the people that its ID tokens identify.

The owner of a person is a claim of the ID token, and the scope comes from the groups in it.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import quote, urlencode, urlsplit

import httpx
import jwt
from pydantic import BaseModel, Field, WithJsonSchema, field_validator, model_validator

from fovea.runtime.hosts import is_loopback
from fovea.wire.errors import PermissionDenied, Unauthenticated, Unavailable
from fovea_gateway.access.api_keys import CALLER, Caller, Scope, check_owner

logger = logging.getLogger(__name__)

CALLBACK = "/api/v1/auth/callback"
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signatures by a key pair. Neither `none` nor HS256, for which the provider's public key could serve as the secret."""
_CLAIMS = ["iss", "sub", "aud", "exp", "iat"]
_KINDS = frozenset({"RSA", "EC", "OKP"})
_SKEW_S = 30
_FRESH_S, _MOST_S, _AGAIN_S = 600, 3600, 5
"""Seconds after which the provider's keys are read again; seconds for which they are used without an answer; seconds
between two attempts.
"""
_TIMEOUT_S = 10.0
_MOST_ANSWER, _MOST_TOKEN = 2**20, 2**14
_NAMELESS = re.compile(r"key-[0-9a-f]{12}")
_SECURE: dict[str, Any] = {"pattern": r"^(https://.+|http://(localhost|127\.[0-9.]+|\[::1\])([:/].*)?)?$"}
"""The rule of `_is_secure`, for the schema of the chart's values."""


class OidcSettings(BaseModel):
    """The settings of sign-in."""

    oidc_issuer: str = Field(
        "",
        description="URL of an OpenID Connect provider. People sign in to the live page through it, and the SDK"
        " exchanges its ID tokens. Empty turns both off.",
        json_schema_extra=_SECURE,
    )
    oidc_client_id: str = Field("", description="Client id of the gateway at the provider.")
    oidc_client_secret: str = Field(
        "",
        description="Its secret, if it has one. `ps` shows arguments, so prefer the environment or a file.",
    )
    oidc_client_secret_file: Path | None = Field(None, description="A file with that secret.")
    oidc_audience: list[str] = Field(
        [], description="The SDK may exchange ID tokens of these client ids, besides those of oidc_client_id."
    )
    oidc_owner_claim: str = Field(
        "email",
        description="Claim with the owner's name. An e-mail address must be verified. Choose a claim that people cannot"
        " change themselves.",
    )
    oidc_groups_claim: str = Field("groups", description="Claim with a person's groups.")
    oidc_roles: dict[str, Annotated[str, WithJsonSchema({"enum": [*Scope]})]] = Field(
        {},
        description='Scope of each group, as JSON such as {"ml-admins": "admin", "*": "read"}; * means all people. The'
        " highest one applies, and a person without any is refused.",
    )
    oidc_public_url: str = Field(
        "",
        description="URL of the page, as people open it. By default the address of the request. The provider must"
        f" allow this URL with {CALLBACK} as redirect.",
        json_schema_extra=_SECURE,
    )
    oidc_session_s: float = Field(8 * 3600.0, gt=0, description="Seconds after which a sign-in on the page expires.")

    @field_validator("oidc_roles")
    @classmethod
    def _has_scopes(cls, value: dict[str, str]) -> dict[str, str]:
        for group, scope in value.items():
            if scope not in [*Scope]:
                raise ValueError(f"the group {group!r} has the scope {scope!r}; a scope is one of {', '.join(Scope)}")
        return value

    @field_validator("oidc_issuer", "oidc_public_url")
    @classmethod
    def _is_secure(cls, value: str) -> str:
        place = urlsplit(value)
        if value and place.scheme != "https" and not (place.scheme == "http" and is_loopback(place.hostname or "")):
            raise ValueError(f"{value!r} must be an https URL, or http on a loopback address")
        return value

    @model_validator(mode="after")
    def _check_sign_in(self) -> Self:
        if not self.oidc_issuer:
            return self
        if not self.oidc_client_id:
            raise ValueError("oidc_issuer needs oidc_client_id: register the gateway at the provider")
        if not self.oidc_roles:
            raise ValueError('oidc_issuer needs oidc_roles, such as {"ml-team": "train"}; otherwise nothing is allowed')
        if self.oidc_client_secret_file and not self.oidc_client_secret_file.is_file():
            raise ValueError(f"oidc_client_secret_file {self.oidc_client_secret_file} is not a file")
        return self

    @property
    def given_client_secret(self) -> str:
        """Returns the client's secret; empty for a public client."""
        file = self.oidc_client_secret_file
        return file.read_text().strip() if file else self.oidc_client_secret


class Identity(NamedTuple):
    """A person, as a checked ID token describes it."""

    subject: str
    owner: str
    scope: Scope


class OidcProvider:
    """The provider: its addresses, its public keys, and the check of its ID tokens.

    Its metadata and keys are read when they are first needed, so a provider that is down delays no start.
    """

    def __init__(self, settings: OidcSettings) -> None:
        self._settings, self.issuer = settings, settings.oidc_issuer.rstrip("/")
        self._reading = asyncio.Lock()
        self._metadata: dict[str, Any] = {}
        self._keys: dict[str, jwt.PyJWK] = {}
        self._read_at = self._tried_at = float("-inf")

    async def login_url(self, redirect_uri: str, state: str, nonce: str, verifier: str) -> str:
        """Returns the address at which a person signs in. Raises Unavailable."""
        await self._refresh(_FRESH_S)
        offered = self._metadata.get("scopes_supported") or ["email", "profile"]
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(["openid", *(name for name in ("email", "profile", "groups") if name in offered)]),
            "state": state,
            "nonce": nonce,
            "code_challenge": base64url(hashlib.sha256(verifier.encode()).digest()),
            "code_challenge_method": "S256",
        }
        address = str(self._metadata["authorization_endpoint"])
        return f"{address}{'&' if '?' in address else '?'}{urlencode(query)}"

    async def redeem(self, code: str, redirect_uri: str, nonce: str, verifier: str) -> Identity:
        """Returns the person that an authorization code stands for. Raises Unauthenticated, PermissionDenied."""
        await self._refresh(_FRESH_S)
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri}
        form |= {"client_id": self._settings.oidc_client_id, "code_verifier": verifier}
        secret, client = self._settings.given_client_secret, None
        if "client_secret_post" in self._metadata.get("token_endpoint_auth_methods_supported", []) and secret:
            form["client_secret"] = secret
        elif secret:
            client = httpx.BasicAuth(quote(self._settings.oidc_client_id, safe=""), quote(secret, safe=""))
        try:
            answer = await _ask("POST", str(self._metadata["token_endpoint"]), form, client)
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"the provider {self.issuer} does not answer: {error!r}; sign in again later") from None
        if "id_token" not in answer:
            told = answer.get("error_description") or answer.get("error") or "there is no id_token in its answer"
            raise Unauthenticated(f"the provider {self.issuer} refused the sign-in: {str(told)[:200]}; sign in again")
        claims = await self._claims(str(answer["id_token"]), [self._settings.oidc_client_id])
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise Unauthenticated("the ID token has another nonce than this sign-in: sign in again")
        return self._identity(claims)

    async def identify(self, token: str) -> Identity:
        """Returns the person that an ID token stands for. Raises Unauthenticated, PermissionDenied, Unavailable."""
        return self._identity(await self._claims(token, [self._settings.oidc_client_id, *self._settings.oidc_audience]))

    async def _claims(self, token: str, audience: list[str]) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(token[:_MOST_TOKEN])
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"the ID token cannot be read: {error}") from None
        if header.get("alg") not in _ALGORITHMS:
            raise Unauthenticated(f"the ID token is signed with {str(header.get('alg'))[:20]!r}, which is not accepted")
        key = await self._key(str(header.get("kid", "")))
        try:
            claims: dict[str, Any] = jwt.decode(
                token, key, algorithms=_ALGORITHMS, audience=audience, issuer=self._settings.oidc_issuer,
                leeway=_SKEW_S, options={"require": _CLAIMS},
            )  # fmt: skip
        except (jwt.InvalidTokenError, jwt.InvalidKeyError) as error:
            raise Unauthenticated(f"the ID token of {self.issuer} is not valid: {error}") from None
        if not isinstance(claims["aud"], str) and len(claims["aud"]) > 1 and claims.get("azp") not in audience:
            raise Unauthenticated("the ID token is for several clients, and azp names none of this gateway's")
        return claims

    async def _key(self, key_id: str) -> jwt.PyJWK:
        """Returns a public key of the provider, which may have replaced its keys since they were read."""
        await self._refresh(_FRESH_S)
        if key_id not in self._keys:
            await self._refresh(_AGAIN_S)
        if key_id not in self._keys:
            raise Unauthenticated(f"the ID token is signed with the key {key_id[:40]!r}, which {self.issuer} lacks")
        return self._keys[key_id]

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        named, settings = self._settings.oidc_owner_claim, self._settings
        if named == "email" and claims.get("email_verified") not in (True, "true"):
            raise PermissionDenied(
                "the ID token does not say that the e-mail address is verified: verify it at the provider, or set"
                " gateway.oidc_owner_claim to another claim"
            )
        try:
            owner = check_owner(str(claims.get(named, "")))
        except ValueError as error:
            raise PermissionDenied(f"the claim {named} (gateway.oidc_owner_claim) names no owner: {error}") from None
        if _NAMELESS.fullmatch(owner):
            raise PermissionDenied(f"the owner {owner} belongs to an API key; sign-ins cannot use it")
        CALLER.set(Caller(owner))  # so that the audit log names it, even if the next line refuses it
        found = claims.get(settings.oidc_groups_claim) or []
        groups = [found] if isinstance(found, str) else list(map(str, found))
        scopes = [Scope(settings.oidc_roles[group]) for group in (*groups, "*") if group in settings.oidc_roles]
        if not scopes:
            raise PermissionDenied(
                f"{owner} is in no group of gateway.oidc_roles; its groups are {', '.join(groups)[:200] or 'none'}"
            )
        return Identity(str(claims["sub"]), owner, max(scopes, key=list(Scope).index))

    async def _refresh(self, older_than_s: float) -> None:
        """Reads metadata and keys again if they are older. Raises Unavailable without an answer and recent keys."""
        async with self._reading:
            now = time.monotonic()
            if now - self._read_at < older_than_s:
                return
            if now - self._tried_at >= _AGAIN_S:
                self._tried_at = now
                try:
                    await self._read()
                except (httpx.HTTPError, jwt.PyJWTError, KeyError, ValueError, TypeError, Unavailable) as error:
                    logger.warning("the OpenID Connect provider %s cannot be read: %r", self.issuer, error)
                else:
                    self._read_at = time.monotonic()
            if time.monotonic() - self._read_at > _MOST_S:
                raise Unavailable(
                    f"the OpenID Connect provider {self.issuer} (gateway.oidc_issuer) does not answer as it should;"
                    " the gateway's log says why. API keys work meanwhile"
                )

    async def _read(self) -> None:
        metadata = await _ask("GET", f"{self.issuer}/.well-known/openid-configuration")
        if metadata.get("issuer") != self._settings.oidc_issuer:
            raise ValueError(f"its issuer is {metadata.get('issuer')!r}, not {self._settings.oidc_issuer!r}")
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            if urlsplit(str(metadata[name])).scheme not in ("https", urlsplit(self.issuer).scheme):
                raise ValueError(f"its {name} is {metadata[name]!r}; it must be an https URL")
        listed = (await _ask("GET", str(metadata["jwks_uri"])))["keys"]
        usable = [one for one in listed if one.get("kty") in _KINDS and one.get("use", "sig") == "sig"]
        self._keys = {str(one.key_id or ""): one for one in jwt.PyJWKSet.from_dict({"keys": usable}).keys}
        self._metadata = metadata


async def _ask(
    method: str, address: str, form: Mapping[str, str] | None = None, client: httpx.BasicAuth | None = None
) -> dict[str, Any]:
    """Returns a JSON object of the provider. Raises httpx.HTTPError, ValueError."""
    async with (
        httpx.AsyncClient(timeout=_TIMEOUT_S, auth=client) as http,
        http.stream(method, address, data=form) as answer,
    ):
        body = b""
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > _MOST_ANSWER:
                raise ValueError(f"{address} sends more than {_MOST_ANSWER} bytes")
    if form is None:
        answer.raise_for_status()
    found = httpx.Response(answer.status_code, content=body).json()
    if not isinstance(found, dict):
        raise ValueError(f"{address} sends no JSON object")
    return found


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
