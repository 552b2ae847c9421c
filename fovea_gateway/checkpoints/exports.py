"""Exports: files of weights, served to whoever has a link to one. Links are signed, and expire.

Files may be encrypted by age (age-encryption.org/v1), by pyrage, which wraps the Rust implementation.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

import pyrage
import sqlalchemy as sa

from fovea.wire.errors import Internal, InvalidInput, PermissionDenied
from fovea_gateway.checkpoints.checkpoint import TRAINING, Checkpoint, CheckpointPath
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints, get_row
from fovea_gateway.checkpoints.checkpoint_storage import Storage
from fovea_gateway.database import schema
from fovea_gateway.database.database import Database
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.scopes import CALLER

_AGE_SUFFIX = ".age"
_RECIPIENTS = "age_encryption_recipients"
_MOST_RECIPIENTS = 64
_SECRET = "export links"
_SECRET_BYTES = 32
_LINK_TTL_S = 3600
_PRIVATE = "fovea_"
"""Prefix of the names of files that only trainers read."""


Recipient = Any
"""A public key. The extension module ships no type information."""


class Link(NamedTuple):
    """What lets its holder fetch one file.

    Attributes:
        expires_at: Seconds since the epoch, whole.
        key_id: The API key that asked for the link, which is good no longer than the key.
        signature: HMAC-SHA256 over folder, file, expiry and key id, in hex.
    """

    run: str
    segment: str
    name: str
    file: str
    expires_at: int
    key_id: str
    signature: str


class ExportedFile(NamedTuple):
    """A file that may be fetched."""

    uri: str
    name: str
    size_bytes: int


class LinkSigner:
    """Signs links with a secret of the database, so that they stay good when the gateway restarts. Call `open` first.

    Args:
        is_valid: Tells whether the API key with an id is valid now.
    """

    def __init__(self, database: Database, is_valid: Callable[[str], bool]) -> None:
        self._database, self._is_valid = database, is_valid
        self._key = b""

    async def open(self) -> None:
        """Reads the key."""
        self._key = await self._database.write(_take_secret)

    def sign(self, *parts: str) -> str:
        """Returns HMAC-SHA256 over what a link leads to, when it expires and which key asked for it, in hex."""
        return hmac.new(self._key, "\0".join(parts).encode(), hashlib.sha256).hexdigest()

    def check(self, shown: str, key_id: str, *parts: str) -> bool:
        """Returns whether a link shows the right signature and its key is still valid."""
        expected = self.sign(*parts, key_id)
        return hmac.compare_digest(expected.encode(), shown.encode()) and self._is_valid(key_id)


class Exports:
    """External weights, and weights to sample from, which lie in the same formats."""

    def __init__(self, database: Database, checkpoints: Checkpoints, signer: LinkSigner) -> None:
        self._database, self._checkpoints, self._signer = database, checkpoints, signer

    @property
    def _storage(self) -> Storage:
        return self._checkpoints.storage

    async def links(self, owner: str, path: str) -> tuple[list[Link], int]:
        """A link to each file of weights that the caller may read, and when they expire.

        Raises NotFound, InvalidInput for a training checkpoint.
        """
        checkpoint = await self._checkpoints.find(owner, path)
        if checkpoint.segment == TRAINING:
            raise InvalidInput(f"{path} is no export; make one with save_weights_external", field="path")
        expires_at = int(time.time()) + _LINK_TTL_S
        if checkpoint.expires_at is not None:
            expires_at = min(expires_at, int(checkpoint.expires_at))
        files = await self._storage.sizes(checkpoint.uri)
        # Of an export they are gone; weights to sample from keep them.
        public = [file for file in files if not file.startswith(_PRIVATE)]
        return [self._link(checkpoint, file, expires_at) for file in public], expires_at

    async def follow(self, link: Link) -> ExportedFile:
        """The file that a link leads to. Raises PermissionDenied for a link that is wrong, old, or to nothing."""
        path = str(CheckpointPath(link.run, link.segment, link.name))
        checkpoint = await self._database.read(lambda connection: get_row(connection, path))
        # One answer for a wrong link and for one to nothing: it must not tell strangers which exports exist.
        wrong = PermissionDenied(
            "this link is not valid, or its key or export is gone; ask for external_weights_urls again"
        )
        if checkpoint is None or not self._signer.check(
            link.signature, link.key_id, checkpoint.uri, link.file, str(link.expires_at)
        ):
            raise wrong
        if min(link.expires_at, checkpoint.expires_at or link.expires_at) <= time.time():
            raise PermissionDenied("this link has expired; ask for external_weights_urls again")
        size_bytes = (await self._storage.sizes(checkpoint.uri)).get(link.file)
        if size_bytes is None:
            raise wrong
        return ExportedFile(checkpoint.uri, link.file, size_bytes)

    async def read(self, file: ExportedFile, start: int, length: int) -> AsyncIterator[bytes]:
        """`length` bytes from `start` on, in pieces. Raises NotFound."""
        return await self._storage.stream(file.uri, file.name, start, length)

    def _link(self, checkpoint: Checkpoint, file: str, expires_at: int) -> Link:
        # The folder is new with every export: a link never leads to what later took the same name.
        key_id = CALLER.get().key_id
        signature = self._signer.sign(checkpoint.uri, file, str(expires_at), key_id)
        return Link(checkpoint.model_id, checkpoint.segment, checkpoint.name, file, expires_at, key_id, signature)


async def complete_export(storage: Storage, written: str, target: str, recipients: list[Recipient]) -> int:
    """Makes an export out of the folder that the trainer wrote; returns its size in bytes.

    Args:
        target: The same folder, or another one if the files are to be encrypted; then `written` is removed.
        recipients: To whom, or empty.

    Raises:
        Internal: The gateway does not see what the trainer wrote.
    """
    names = await storage.sizes(written)
    if not names:
        raise Internal(
            f"the trainer wrote {written}, where the gateway sees nothing: checkpoint_dir must be on storage "
            "that both see"
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
    """Public keys out of `age1...` or SSH texts.

    Raises InvalidInput that names the first wrong one but does not repeat it: it may be a secret key, sent by mistake.
    """
    listed = list(texts)
    if len(listed) > _MOST_RECIPIENTS:
        raise InvalidInput(
            f"{_RECIPIENTS} has {len(listed)} entries; {_MOST_RECIPIENTS} is the most", field=_RECIPIENTS
        )
    return [_parse_recipient(text.strip(), f"{_RECIPIENTS}[{index}]") for index, text in enumerate(listed)]


def _parse_recipient(text: str, field: str) -> Recipient:
    if text.upper().startswith("AGE-SECRET-KEY-"):
        raise InvalidInput(f"{field} is a secret key: make a new pair, and send its public key", field=field)
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except pyrage.RecipientError as error:
        words = "expected an age public key (age1...) or an SSH one (ssh-ed25519 ... or ssh-rsa ...)"
        raise InvalidInput(f"{field} cannot be used: {error}; {words}", field=field) from None


async def _encrypt_folder(files: Storage, source: str, target: str, recipients: list[Recipient]) -> None:
    """Encrypts every file of a folder into another one, names ending in `.age`, piece by piece."""

    def encrypt(reader: Any, writer: Any) -> None:
        try:
            pyrage.encrypt_io(reader, writer, recipients)
        except pyrage.EncryptError as error:
            if found := re.search(r"\[Errno (\d+)\]", str(error)):  # of an OSError it hands on the text alone
                raise OSError(int(found[1]), str(error)) from error
            raise

    for name in await files.sizes(source):
        await files.rewrite(source, name, target, f"{name}{_AGE_SUFFIX}", encrypt)


def _take_secret(connection: sa.Connection) -> bytes:
    """The key that signs links (32 bytes), made when it is asked for the first time."""
    table = schema.secrets
    insert_new(connection, table, {"name": _SECRET, "value": secrets.token_bytes(_SECRET_BYTES)})
    value: bytes = connection.execute(sa.select(table.c.value).where(table.c.name == _SECRET)).scalar_one()
    return value
