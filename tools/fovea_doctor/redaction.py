"""Removes secrets from texts: those that this machine's settings contain, and everything that looks like one."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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
            r"([\w-]*(?:signature|secret|password|passwd|credential|api[_-]?key|access[_-]?key|authorization|cookie"
            r"|fovea_session|fovea_login|token(?![a-z_])|\bsig|\bcode_verifier|\bnonce)[\w-]*[\"']?\s*[=:]\s*[\"']?)"
            r"(?!\[removed\])(?:(?:bearer|basic)\s+)?[^\s\"'&,;}]{4,}",
            re.I,
        ),
        rf"\1{REMOVED}",
    ),
)


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


def machine_secrets(state: Mapping[str, Any]) -> list[str]:
    """Returns the secrets of this process's environment and of `up.json`."""
    return list(known_secrets(os.environ, state))


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
    elif isinstance(value, str):
        yield from (_texts_of(value) if is_secret_name(name) else _password_of(value))
