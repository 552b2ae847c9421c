"""One gateway owns the state: two that run what is queued would run it twice.

SQLite: a lock on a file beside the database; a second gateway is refused. PostgreSQL: an advisory lock of the session
that writes; a second gateway waits, which is how one takes over from another.
"""

import fcntl
import uuid
import zlib
from pathlib import Path
from typing import IO, Protocol

import sqlalchemy as sa

from fovea.wire.errors import Internal
from gateway.database.schema import owner

_LOCK = zlib.crc32(b"fovea gateway") - 2**31
_TAKE = sa.text("SELECT pg_try_advisory_lock(:lock, hashtext(coalesce(current_schema(), '')))")


class Superseded(Exception):
    """Another gateway has taken over the state: what this one has in memory is no longer true."""


class Ownership(Protocol):
    """What makes one gateway the only one. Called by the one thread that writes."""

    def take(self, connection: sa.Connection) -> bool:
        """Takes the state, or takes it again on a new connection; False while somebody else has it."""
        ...

    def begin(self, connection: sa.Connection) -> None:
        """Writes down whose the state is, once the tables are there."""
        ...

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Numbers a transaction. Raises Superseded if the state is somebody else's."""
        ...

    def last_mark(self, connection: sa.Connection) -> int:
        """The number of the last transaction that was committed. Raises Superseded as above."""
        ...

    def release(self) -> None:
        """Gives the state free, unless closing the connection does."""
        ...


class FileOwnership:
    """A lock on a file. The connection to a file is never lost, so that nothing needs a mark."""

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}.lock")
        self._file: IO[str] | None = None

    def take(self, connection: sa.Connection) -> bool:
        """Locks the file. Raises Internal if another process has it."""
        if self._file is None:
            self._file = self._path.open("w")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                self._file = None
                folder = self._path.parent
                raise Internal(f"another gateway uses {folder}; give each its own --state-dir") from None
        return True

    def begin(self, connection: sa.Connection) -> None:
        """Nothing: the lock says it all."""

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Nothing."""

    def last_mark(self, connection: sa.Connection) -> int:
        """Nothing was ever committed unnoticed."""
        return 0

    def release(self) -> None:
        """Unlocks the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SessionOwnership:
    """An advisory lock, and a row that every transaction of its holder writes.

    The lock ends with the session, so that the next gateway can begin. The row fences off one that lost its session and
    does not know yet, and tells whether a commit whose answer never came took place: whoever has the lock again knows
    that its earlier session does nothing any more.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._has_begun = False
        self._mine = owner.c.name == self._name
        self._numbered = sa.update(owner).where(self._mine).values(last_mark=sa.bindparam("number"))

    def take(self, connection: sa.Connection) -> bool:
        """Tries the lock. Raises Superseded if somebody else has had it since."""
        if self._has_begun:
            self.last_mark(connection)
        is_taken: bool = connection.execute(_TAKE, {"lock": _LOCK}).scalar_one()
        return is_taken

    def begin(self, connection: sa.Connection) -> None:
        """Replaces the row of whoever had the state before."""
        connection.execute(sa.delete(owner))
        connection.execute(sa.insert(owner).values(name=self._name, last_mark=0))
        self._has_begun = True

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Writes the row."""
        if connection.execute(self._numbered, {"number": number}).rowcount == 0:
            raise Superseded

    def last_mark(self, connection: sa.Connection) -> int:
        """Reads the row."""
        number: int | None = connection.execute(sa.select(owner.c.last_mark).where(self._mine)).scalar()
        if number is None:
            raise Superseded
        return number

    def release(self) -> None:
        """Nothing: the lock ends with its session."""


def make_ownership(url: sa.URL) -> Ownership:
    """The ownership that fits a database."""
    if url.get_backend_name() != "sqlite":
        return SessionOwnership()
    return FileOwnership(url.database or "")
