"""age encryption (age-encryption.org/v1) of exported files, by pyrage, which wraps the Rust implementation."""

from collections.abc import Iterable
from typing import Any

import pyrage

from fovea.wire.errors import InvalidInput
from gateway.checkpoints.checkpoint_storage import Storage

SUFFIX = ".age"
FIELD = "age_encryption_recipients"
_MOST_RECIPIENTS = 64

Recipient = Any
"""A public key. The extension module ships no type information."""


def parse_recipients(texts: Iterable[str]) -> list[Recipient]:
    """Public keys out of `age1...` or SSH texts.

    Raises InvalidInput that names the first wrong one but does not repeat it: it may be a secret key, sent by mistake.
    """
    listed = list(texts)
    if len(listed) > _MOST_RECIPIENTS:
        raise InvalidInput(f"{FIELD} has {len(listed)} entries; {_MOST_RECIPIENTS} is the most", field=FIELD)
    return [_parse(text.strip(), f"{FIELD}[{index}]") for index, text in enumerate(listed)]


def _parse(text: str, field: str) -> Recipient:
    if text.upper().startswith("AGE-SECRET-KEY-"):
        raise InvalidInput(f"{field} is a secret key: make a new pair, and send its public key", field=field)
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except pyrage.RecipientError as error:
        words = "expected an age public key (age1...) or an SSH one (ssh-ed25519 ... or ssh-rsa ...)"
        raise InvalidInput(f"{field} cannot be used: {error}; {words}", field=field) from None


async def encrypt_folder(files: Storage, source: str, target: str, recipients: list[Recipient]) -> None:
    """Encrypts every file of a folder into another one, names ending in `.age`, piece by piece."""

    def encrypt(reader: Any, writer: Any) -> None:
        pyrage.encrypt_io(reader, writer, recipients)

    for name in await files.sizes(source):
        await files.rewrite(source, name, target, f"{name}{SUFFIX}", encrypt)
