"""Ownership of the gateway's state, and a reserve of the disk that it needs.

One gateway at a time owns the state, because two would both run the queued work. With SQLite, ownership is a lock on a
file beside the database, and a second gateway is refused. With PostgreSQL, it is an advisory lock of the session that
writes; a second gateway waits for the lock and takes over when the first one ends.
"""

import fcntl
import logging
import os
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

import sqlalchemy as sa

from fovea.runtime.durable import is_full_disk
from fovea.wire.errors import Internal
from fovea_gateway.database.schema import owner

logger = logging.getLogger(__name__)

_LOCK = zlib.crc32(b"fovea gateway") - 2**31
_TAKE = sa.text("SELECT pg_try_advisory_lock(:lock, hashtext(coalesce(current_schema(), '')))")


class Superseded(Exception):
    """Another gateway has taken over the state, so this process's memory is stale."""


class FileOwnership:
    """A lock on a file beside an SQLite database. The connection to such a database is never lost."""

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}.lock")
        self._file: IO[str] | None = None

    def take(self, connection: sa.Connection) -> bool:
        """Locks the file. Raises Internal if another process holds the lock."""
        if self._file is None:
            self._file = self._path.open("w")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                self._file = None
                folder = self._path.parent
                raise Internal(f"another gateway uses {folder}; give each gateway its own --state-dir") from None
        return True

    def release(self) -> None:
        """Unlocks the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SessionOwnership:
    """An advisory lock, and a row that every transaction of its holder updates.

    The lock ends with the database session, and the next gateway acquires it. The row stops a gateway that has lost its
    session without noticing: its updates find no row with its name. The row also contains the number of the last
    transaction. If the answer to a commit was lost, that number shows whether the commit took place: once the gateway
    has the lock again, its earlier session has ended, and the number is final.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._has_begun = False
        self._mine = owner.c.name == self._name
        self._numbered = sa.update(owner).where(self._mine).values(last_mark=sa.bindparam("number"))

    def take(self, connection: sa.Connection) -> bool:
        """Tries to acquire the lock, again on each new connection. Raises Superseded if another gateway has owned the
        state since `begin`.
        """
        if self._has_begun:
            self.last_mark(connection)
        is_taken: bool = connection.execute(_TAKE, {"lock": _LOCK}).scalar_one()
        return is_taken

    def begin(self, connection: sa.Connection) -> None:
        """Replaces the previous owner's row, once the tables exist."""
        connection.execute(sa.delete(owner))
        connection.execute(sa.insert(owner).values(name=self._name, last_mark=0))
        self._has_begun = True

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Records a transaction's number within it. Raises Superseded if another gateway owns the state."""
        if connection.execute(self._numbered, {"number": number}).rowcount == 0:
            raise Superseded

    def last_mark(self, connection: sa.Connection) -> int:
        """Returns the number of the last committed transaction. Raises Superseded like `mark`."""
        number: int | None = connection.execute(sa.select(owner.c.last_mark).where(self._mine)).scalar()
        if number is None:
            raise Superseded
        return number

    def release(self) -> None:
        """Does nothing: the lock ends with its session."""


def make_ownership(url: sa.URL) -> FileOwnership | SessionOwnership:
    """Returns a file lock for SQLite, an advisory lock for PostgreSQL."""
    if url.get_backend_name() != "sqlite":
        return SessionOwnership()
    return FileOwnership(url.database or "")


RESERVE_BYTES = 16 * 2**20
_SQLITE_IOERR, _SQLITE_FULL = 10, 13
_LEAST_BYTES = 2**20
_MOST_MARGIN_BYTES = 256 * 2**20


class DiskReserve:
    """A file that reserves some room on the disk of an SQLite database.

    Ending sessions and deleting checkpoints frees room, but needs some room itself. The file is deleted when the disk
    is full, and created again once there is room; in between, the gateway accepts no new work. It also accepts none
    while the disk is nearly full, so that outcomes of accepted work still fit. Any thread may read the attributes; only
    the thread that writes the database may call the methods.

    Args:
        database: The path of the database; empty for PostgreSQL, which has no reserve.

    Attributes:
        is_spent: Whether the file was deleted because the disk was full.
        is_low: Whether less than a fiftieth of the disk, 16 .. 256 MiB, was free beside the file. It stays set until
            twice as much is free.
    """

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}.reserve") if database else None
        self.is_spent = self.is_low = False

    def take(self) -> None:
        """Creates the file if twice its size is free, and updates the attributes. A full disk is not an error, but is
        logged.
        """
        if self._path is None:
            return
        if self.is_spent or not self._path.exists():
            self._refill(self._path)
        disk = os.statvfs(self._path.parent)
        margin = min(max(disk.f_blocks * disk.f_frsize // 50, RESERVE_BYTES), _MOST_MARGIN_BYTES)
        is_low = self._free_bytes() < margin * (2 if self.is_low else 1)
        if is_low and not self.is_low:
            logger.error("the disk of %s is nearly full: no new work is accepted", self._path.parent)
        self.is_low = is_low

    def is_full(self, error: sa.exc.DBAPIError) -> bool:
        """Returns whether SQLite found no room. It reports a full quota, or no room for its shared-memory index, as an
        I/O error.
        """
        code = getattr(error.orig, "sqlite_errorcode", 0)
        return code == _SQLITE_FULL or (code & 0xFF == _SQLITE_IOERR and self._free_bytes() < _LEAST_BYTES)

    def give_up(self) -> bool:
        """Deletes the file. Returns False if it was deleted before, or if there is no reserve."""
        if self._path is None or self.is_spent:
            return False
        logger.error("the disk of %s is full: the reserve is deleted, and no new work is accepted", self._path.parent)
        with suppress(FileNotFoundError):
            self._path.unlink()
        self.is_spent = True
        return True

    def _refill(self, path: Path) -> None:
        if self._free_bytes() < 2 * RESERVE_BYTES or not self._make():
            if not self.is_spent:
                logger.error("the disk of %s is full: no new work is accepted", path.parent)
            self.is_spent = True
            return
        if self.is_spent:
            logger.info("there is room again on the disk of %s", path.parent)
        self.is_spent = False

    def _free_bytes(self) -> int:
        assert self._path is not None
        free = os.statvfs(self._path.parent)
        return free.f_bavail * free.f_frsize

    def _make(self) -> bool:
        assert self._path is not None
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
        except OSError as error:  # a quota may leave less room than statvfs reports
            if not is_full_disk(error):
                raise
            self._path.unlink()
            return False
        finally:
            os.close(descriptor)
        return True
