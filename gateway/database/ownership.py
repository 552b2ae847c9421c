"""One gateway at a time owns the state: two would both run what is queued.

SQLite: a lock on a file beside the database; a second gateway is refused. PostgreSQL: an advisory lock, held by the
session that writes; a second gateway waits for it, which is how one takes over from another.
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
    """Another gateway has taken over the state: what this one has in memory is out of date."""


class Ownership(Protocol):
    """The right to write. Used by the one thread that writes."""

    def take(self, connection: sa.Connection) -> bool:
        """Takes the state, also again on a new connection; False while another gateway has it."""
        ...

    def begin(self, connection: sa.Connection) -> None:
        """Records the new owner, once the tables exist."""
        ...

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Records a transaction's number in it. Raises Superseded if another gateway owns the state."""
        ...

    def last_mark(self, connection: sa.Connection) -> int:
        """The number of the last transaction that was committed. Raises Superseded as `mark` does."""
        ...

    def release(self) -> None:
        """Releases the state, where closing the connection does not."""
        ...


class FileOwnership:
    """A lock on a file. A connection to a file is never lost, so transactions need no numbers."""

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
        """Does nothing: the lock is enough."""

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Does nothing."""

    def last_mark(self, connection: sa.Connection) -> int:
        """Always 0: no commit goes unnoticed."""
        return 0

    def release(self) -> None:
        """Unlocks the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SessionOwnership:
    """An advisory lock, and a row that every transaction of its holder updates.

    The lock ends with the session, and the next gateway takes it. The row fences off a gateway that lost its session
    and does not know yet: its updates find no row of its name. The row also holds the last transaction's number, which
    tells whether a commit whose answer got lost took place: once a gateway has the lock again, its earlier session has
    ended, and the number is final.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._has_begun = False
        self._mine = owner.c.name == self._name
        self._numbered = sa.update(owner).where(self._mine).values(last_mark=sa.bindparam("number"))

    def take(self, connection: sa.Connection) -> bool:
        """Tries the lock. Raises Superseded if another gateway has had it since."""
        if self._has_begun:
            self.last_mark(connection)
        is_taken: bool = connection.execute(_TAKE, {"lock": _LOCK}).scalar_one()
        return is_taken

    def begin(self, connection: sa.Connection) -> None:
        """Replaces the row of the last owner."""
        connection.execute(sa.delete(owner))
        connection.execute(sa.insert(owner).values(name=self._name, last_mark=0))
        self._has_begun = True

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Updates the row."""
        if connection.execute(self._numbered, {"number": number}).rowcount == 0:
            raise Superseded

    def last_mark(self, connection: sa.Connection) -> int:
        """Reads the row."""
        number: int | None = connection.execute(sa.select(owner.c.last_mark).where(self._mine)).scalar()
        if number is None:
            raise Superseded
        return number

    def release(self) -> None:
        """Does nothing: the lock ends with its session."""


def make_ownership(url: sa.URL) -> Ownership:
    """A lock on a file for SQLite, an advisory lock for PostgreSQL."""
    if url.get_backend_name() != "sqlite":
        return SessionOwnership()
    return FileOwnership(url.database or "")
