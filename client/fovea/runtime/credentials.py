"""Credentials between the services of one Fovea: a shared secret, and certificates for mutual TLS.

Callers of renderer, sampler and trainer must send the secret with every call. It keeps out other programs that can
connect. It does not protect against readers of the network; mutual TLS does.

With TLS, both ends of a connection must show a certificate. A folder contains `ca.crt`, `tls.crt` and `tls.key` (PEM),
as cert-manager's secrets do. The CA belongs to this Fovea alone. A process with a certificate from it for the name
`fovea` is trusted at any address, because pods get a new address each time.

A redactor removes secrets from texts for people: those that settings contain, and everything that looks like one.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import grpc

SECRET_VARIABLE = "FOVEA_SERVICE_SECRET"
SECRET_FILE_VARIABLE = "FOVEA_SERVICE_SECRET_FILE"
"""Variables with the secret, or with a file that contains it.

Unlike other settings, they have the same name for every service and client. There is no option, because other users can
read command lines.
"""

SECRET_KEY = "fovea-service-secret"
"""Metadata key that carries the secret."""

_LEAST_SECRET = 16

REMOVED = "[removed]"
PUBLISHED = "tml-local"
_SECRET_NAME = re.compile(r"secret|password|passwd|token|credential|webhook|api_?key|access_?key|private|_key$", re.I)
_INNOCENT = re.compile(r"tokenizer|tokens?_in|max_.*tokens|_file$", re.I)
_LEAST = 6
_PATTERNS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), REMOVED),
    (re.compile(r"\btml-(?!local\b)[!-~]{4,}?(?=[\s\"',;)\]}]|$)"), REMOVED),
    (re.compile(r"\beyJ[\w-]{4,}\.[\w-]+(\.[\w-]*)?"), REMOVED),
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[abp]-|AKIA|ASIA)[\w-]{8,}"), REMOVED),
    (re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"), REMOVED),
    (re.compile(r"(https?://hooks\.[^/\s]+)/[^\s\"']+"), rf"\1/{REMOVED}"),
    (re.compile(r"\b(bearer|basic)\s+[\w+/.=~-]{6,}", re.I), rf"\1 {REMOVED}"),
    (
        re.compile(
            # The lookbehind tries each word once; without it, a word of 4096 characters took 2.5 s.
            r"((?<![\w-])[\w-]*(?:signature|secret|password|passwd|credential|api[_-]?key|access[_-]?key|authorization"
            r"|cookie|fovea_session|fovea_login|token(?![a-z_])|\bsig|\bcode_verifier|\bnonce)[\w-]*[\"']?\s*[=:]\s*[\"']?)"
            r"(?!\[removed\])(?:(?:bearer|basic)\s+)?[^\s\"'&,;}]{4,}",
            re.I,
        ),
        rf"\1{REMOVED}",
    ),
)


def service_secret() -> str:
    """Returns the secret of this process, from its environment or a file; empty if there is none.

    Raises ValueError if the secret is too short or not printable ASCII, or the file cannot be read.
    """
    name = SECRET_VARIABLE if os.environ.get(SECRET_VARIABLE) else SECRET_FILE_VARIABLE
    found = os.environ.get(name, "")
    if found and name == SECRET_FILE_VARIABLE:
        try:
            found = Path(found).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{SECRET_FILE_VARIABLE}: {error}") from None
    if found and (len(found) < _LEAST_SECRET or not found.isascii() or not found.isprintable()):
        raise ValueError(f"{name} must have at least {_LEAST_SECRET} printable ASCII characters")
    return found


def metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that a client of a service sends with every call."""
    secret = service_secret()
    return ((SECRET_KEY, secret),) if secret else ()


TLS_VARIABLE = "FOVEA_TLS_DIR"
"""Variable with the folder of certificates. The same for every service and client, unlike other settings; unset turns
TLS off.
"""

TLS_NAME = "fovea"
"""The DNS name in every certificate."""

CA, CERTIFICATE, PRIVATE_KEY = "ca.crt", "tls.crt", "tls.key"


@dataclass(frozen=True)
class Certificates:
    """Certificate and key of a process, and the CA that it trusts, as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    def for_server(self) -> grpc.ServerCredentials:
        """Returns server credentials that reject clients without a certificate of the CA before reading any data."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.ca, require_client_auth=True)

    def for_client(self) -> grpc.ChannelCredentials:
        """Returns client credentials."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


CLIENT_OPTIONS: list[tuple[str, object]] = [("grpc.ssl_target_name_override", TLS_NAME)]
"""Channel options: the name that the service's certificate must have."""


def certificates() -> Certificates | None:
    """Returns the certificates of this process, from the folder in its environment; None if the variable is not set.

    Raises ValueError for a file that cannot be read or is not PEM.
    """
    folder = os.environ.get(TLS_VARIABLE, "")
    return Certificates(*(_read(Path(folder, name)) for name in (CA, CERTIFICATE, PRIVATE_KEY))) if folder else None


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{TLS_VARIABLE}: {error}; the folder must contain {CA}, {CERTIFICATE} and {PRIVATE_KEY}"
        ) from None
    # Check here, because gRPC would report an unusable file only at the first handshake and in its own log.
    if b"-----BEGIN " not in content:
        raise ValueError(f"{TLS_VARIABLE}: {path} is not a PEM file")
    return content


def is_secret_name(name: str) -> bool:
    """Returns whether a setting or field with this name contains a secret."""
    return bool(_SECRET_NAME.search(name)) and not _INNOCENT.search(name)


class Redactor:
    """Removes secrets from texts and values.

    Args:
        known: Secrets that are removed wherever they stand.
    """

    def __init__(self, known: Iterable[str]) -> None:
        found = {text for text in known if len(text) >= _LEAST and text != PUBLISHED}
        # The longest first, so that no secret that contains another one leaves a rest.
        self.known = sorted(found, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Returns a text without secrets."""
        for secret in self.known:
            text = text.replace(secret, REMOVED)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """Returns a JSON value without secrets; fields with the name of a secret are emptied."""
        if isinstance(value, Mapping):
            return {key: self.value(one, str(key)) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(one, name) for one in value]
        if value and is_secret_name(name) and isinstance(value, str):
            return REMOVED
        return self.text(value) if isinstance(value, str) else value


def known_secrets(environment: Mapping[str, str], state: Mapping[str, Any]) -> Iterator[str]:
    """Yields the secrets in the environment, in the files that it names, and in `up.json`."""
    for name, value in environment.items():
        if name.upper().endswith("_FILE") and is_secret_name(name[: -len("_FILE")]):
            yield from _lines_of(Path(value))
        elif is_secret_name(name):
            yield from _texts_of(value)
        elif "://" in value:
            yield from _password_of(value)
    yield from _fields_of(state, "")


def redactor_of(settings: Mapping[str, Any]) -> Redactor:
    """Returns a redactor that knows the secrets of this process's environment and of JSON values: a service's settings,
    or `up.json`.
    """
    return Redactor(known_secrets(os.environ, settings))


def _lines_of(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text().split()
    except (OSError, UnicodeError):
        return
    for line in lines:
        yield from _texts_of(line)


def _texts_of(value: str) -> Iterator[str]:
    """Yields a value itself and, for lists of keys and OWNER=KEY, its parts."""
    yield value
    try:
        found = json.loads(value)
    except ValueError:
        found = value.split()
    for one in map(str, found) if isinstance(found, list) else ():
        yield from [one] if one.startswith("tml-") else []
        yield from [f"tml-{one.partition('=tml-')[2]}"] if "=tml-" in one else []


def _password_of(address: str) -> Iterator[str]:
    try:
        password = urlsplit(address).password
    except ValueError:
        return
    if password:
        yield from {password, unquote(password)}


def _fields_of(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _fields_of(one, str(key))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _fields_of(one, name)
    elif isinstance(value, str) and name.endswith("_file") and is_secret_name(name.removesuffix("_file")):
        yield from _lines_of(Path(value))
    elif isinstance(value, str):
        yield from (_texts_of(value) if is_secret_name(name) else _password_of(value))
