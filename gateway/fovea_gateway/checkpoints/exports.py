"""Exports: files of weights, served to any holder of a signed link.

Files may be encrypted with age (age-encryption.org/v1) through pyrage, which wraps the Rust implementation.
"""

import re
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

import pyrage

from fovea.wire.errors import Internal, InvalidInput
from fovea_gateway.access.sign_ins import LinkSigner, Signature, invalid_link
from fovea_gateway.checkpoints.checkpoint import TRAINING, Checkpoint, CheckpointPath, Storage
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, get_row
from fovea_gateway.database.database import Database

_AGE_SUFFIX = ".age"
_RECIPIENTS = "age_encryption_recipients"
_MOST_RECIPIENTS = 64
_LINK_TTL_S = 3600
_SOURCE = "external_weights_urls"
_PRIVATE = "fovea_"
"""Prefix of the names of files that only trainers read."""


Recipient = Any
"""A public key. The extension module ships no type information."""


class Link(NamedTuple):
    """A link that permits its holder to fetch one file."""

    run: str
    segment: str
    name: str
    file: str
    signature: Signature


class ExportedFile(NamedTuple):
    """A file that may be fetched."""

    uri: str
    name: str
    size_bytes: int


class Exports:
    """The files of external weights, and of weights to sample from, which have the same formats."""

    def __init__(self, database: Database, checkpoints: Checkpoints, signer: LinkSigner) -> None:
        self._database, self._checkpoints, self._signer = database, checkpoints, signer

    @property
    def _storage(self) -> Storage:
        return self._checkpoints.storage

    async def links(self, owner: str, path: str) -> tuple[list[Link], int]:
        """Returns a link to each file of weights that the caller may read, and when the links expire.

        Raises NotFound, InvalidInput for a training checkpoint.
        """
        checkpoint = await self._checkpoints.find(owner, path)
        if checkpoint.segment == TRAINING:
            raise InvalidInput(f"{path} is not an export; create one with save_weights_external", field="path")
        expires_at = int(time.time()) + _LINK_TTL_S
        if checkpoint.expires_at is not None:
            expires_at = min(expires_at, int(checkpoint.expires_at))
        files = await self._storage.sizes(checkpoint.uri)
        # An export has lost its private files already; weights to sample from keep them.
        public = [file for file in files if not file.startswith(_PRIVATE)]
        return [self._link(checkpoint, file, expires_at) for file in public], expires_at

    async def follow(self, link: Link) -> ExportedFile:
        """Returns the file that a link leads to. Raises PermissionDenied if the link is wrong or expired or its file is
        gone.
        """
        path = str(CheckpointPath(link.run, link.segment, link.name))
        checkpoint = await self._database.read(lambda connection: get_row(connection, path))
        if checkpoint is None:
            raise invalid_link(_SOURCE)
        self._signer.check(link.signature, _SOURCE, checkpoint.uri, link.file)
        if checkpoint.expires_at is not None and checkpoint.expires_at <= time.time():
            raise invalid_link(_SOURCE)
        size_bytes = (await self._storage.sizes(checkpoint.uri)).get(link.file)
        if size_bytes is None:
            raise invalid_link(_SOURCE)
        return ExportedFile(checkpoint.uri, link.file, size_bytes)

    async def read(self, file: ExportedFile, start: int, length: int) -> AsyncIterator[bytes]:
        """Returns `length` bytes of a file from `start` on, in chunks. Raises NotFound."""
        return await self._storage.stream(file.uri, file.name, start, length)

    def _link(self, checkpoint: Checkpoint, file: str, expires_at: int) -> Link:
        # Every export has a new folder, so a link never leads to a later export of the same name.
        signature = self._signer.sign(expires_at, checkpoint.uri, file)
        return Link(checkpoint.model_id, checkpoint.segment, checkpoint.name, file, signature)


async def complete_export(storage: Storage, written: str, target: str, recipients: list[Recipient]) -> int:
    """Completes an export from the folder that the trainer wrote; returns its size in bytes.

    Args:
        written: The folder that the trainer wrote.
        target: The same folder, or another one if the files are to be encrypted; then `written` is removed.
        recipients: Public keys to encrypt for; empty for no encryption.

    Raises:
        Internal: The gateway does not see what the trainer wrote.
    """
    names = await storage.sizes(written)
    if not names:
        raise Internal(
            f"the trainer wrote {written}, but the gateway finds no file there: checkpoint_dir must be on storage "
            "that both can access"
        )
    for name in names:
        if name.startswith(_PRIVATE):
            await storage.remove_file(written, name)
    if recipients:
        await _encrypt_folder(storage, written, target, recipients)
        await storage.remove(written)
    await storage.sync(target)
    return sum((await storage.sizes(target)).values())


def parse_recipients(texts: Iterable[str]) -> list[Recipient]:
    """Parses public keys, each an `age1...` or SSH text.

    Raises InvalidInput with the index of the first wrong text. The message does not repeat the text, which may be a
    secret key that was sent by mistake.
    """
    listed = list(texts)
    if len(listed) > _MOST_RECIPIENTS:
        raise InvalidInput(
            f"{_RECIPIENTS} has {len(listed)} entries; {_MOST_RECIPIENTS} is the maximum", field=_RECIPIENTS
        )
    return [_parse_recipient(text.strip(), f"{_RECIPIENTS}[{index}]") for index, text in enumerate(listed)]


def _parse_recipient(text: str, field: str) -> Recipient:
    if text.upper().startswith("AGE-SECRET-KEY-"):
        raise InvalidInput(f"{field} is a secret key: create a new key pair, and send its public key", field=field)
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except pyrage.RecipientError as error:
        words = "expected an age public key (age1...) or an SSH one (ssh-ed25519 ... or ssh-rsa ...)"
        raise InvalidInput(f"{field} cannot be used: {error}; {words}", field=field) from None


async def _encrypt_folder(files: Storage, source: str, target: str, recipients: list[Recipient]) -> None:
    """Encrypts every file of a folder into another one, chunk by chunk; the names get the suffix `.age`."""

    def encrypt(reader: Any, writer: Any) -> None:
        try:
            pyrage.encrypt_io(reader, writer, recipients)
        except pyrage.EncryptError as error:
            if found := re.search(r"\[Errno (\d+)\]", str(error)):  # pyrage passes on only the text of an OSError
                raise OSError(int(found[1]), str(error)) from error
            raise

    for name in await files.sizes(source):
        await files.rewrite(source, name, target, f"{name}{_AGE_SUFFIX}", encrypt)
