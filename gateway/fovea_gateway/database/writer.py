"""The only connection that writes, while this gateway owns the state. Everything here runs in one thread.

One gateway at a time owns the state, because two would both run the queued work. With SQLite, ownership is a lock on a
file beside the database, and a second gateway is refused. With PostgreSQL, it is an advisory lock of the session that
writes; a second gateway waits for the lock and takes over when the first one ends.
"""

import fcntl
import logging
import math
import os
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

import sqlalchemy as sa

from fovea.runtime.durable import is_full_disk
from fovea.wire.errors import Internal, Unavailable
from fovea_gateway.database import migrations
from fovea_gateway.database.schema import owner
from fovea_gateway.database.sql_engine import describe, is_lost, translate

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Job = Callable[[sa.Connection], Result]
_RETRY_S = 0.2
_LOCK = zlib.crc32(b"fovea gateway") - 2**31
_TAKE = sa.text("SELECT pg_try_advisory_lock(:lock, hashtext(coalesce(current_schema(), '')))")


class Superseded(Exception):
    """Another gateway has taken over the state, so this process's memory is stale."""


class Stopped(Exception):
    """The process is ending before the database has come back."""


@dataclass(frozen=True)
class Batched(Generic[Item, Result]):
    """A job on one item. Adjacent jobs in the queue with the same `run` share one call of it.

    Args:
        run: Does the job for several items; returns one result per item, in their order.
        item: The item of this job.
    """

    run: Callable[[sa.Connection, list[Item]], list[Result]]
    item: Item

    def __call__(self, connection: sa.Connection) -> Result:
        """Runs only this job."""
        return self.run(connection, [self.item])[0]


class Writer:
    """The writer of the database. It commits groups of jobs; a lost connection neither loses a group nor applies it
    twice.

    Args:
        engine: The engine of the database; its URL selects the kind of ownership.
        patience_s: Seconds that the first connection may take; later ones have no limit.
        stopped: Once it is set, every wait ends with Stopped.
    """

    def __init__(self, engine: sa.Engine, patience_s: float, stopped: threading.Event) -> None:
        self._engine, self._patience_s = engine, patience_s
        self._ownership = make_ownership(engine.url)
        self.reserve = DiskReserve(engine.url.database or "" if engine.dialect.name == "sqlite" else "")
        self._connection: sa.Connection | None = None
        self._last_mark = 0
        self._stopped = stopped

    def open(self) -> None:
        """Waits until this gateway owns the state, then creates or migrates the tables.

        Raises:
            Unavailable: The database does not answer, or rejects the user or the tables.
            Internal: Its schema is unknown, or another gateway uses its folder.
        """
        connection = self._connect(time.monotonic() + self._patience_s)
        try:
            with connection.begin():
                migrations.upgrade(connection)
                self._ownership.begin(connection)
        except sa.exc.DBAPIError as error:
            raise Unavailable(f"{self._name} rejects Fovea's tables: {str(error.orig).strip()}") from None
        self.reserve.take()

    def commit(self, jobs: list[Job[Any]]) -> list[Any]:
        """Returns the result of each job, or its exception if it failed. Raises Superseded."""
        try:
            return self._transact(jobs)
        except Superseded:
            raise
        except Stopped:
            return [
                Unavailable("the gateway is stopping and its database is unavailable: send this request again later")
            ] * len(jobs)
        except Exception as error:
            if len(jobs) == 1:
                return [translate(error, self._engine.url)]
        # A failed job must not fail its neighbours, so run each on its own.
        return [self.commit([job])[0] for job in jobs]

    def close(self) -> None:
        """Closes the connection and releases the state."""
        self._drop()
        self._ownership.release()

    def _transact(self, jobs: list[Job[Any]]) -> list[Any]:
        number, results, is_repeated = self._last_mark + 1, [], False
        while True:
            try:
                connection = self._connection or self._connect()
                if is_repeated and self._is_committed(connection, number):
                    break
                with connection.begin():
                    self._ownership.mark(connection, number)
                    results = _run(connection, jobs)
                break
            except sa.exc.DBAPIError as error:
                if self.reserve.is_full(error) and self.reserve.give_up():
                    continue
                if not is_lost(error):
                    raise
                logger.warning("%s: connection lost with %d writes pending: %s", self._name, len(jobs), error.orig)
                self._drop()
                is_repeated = True
        self._last_mark = number
        return results

    def _is_committed(self, connection: sa.Connection, number: int) -> bool:
        """Returns whether the transaction was committed even though the answer to its commit was lost."""
        with connection.begin():
            return self._ownership.last_mark(connection) == number

    def _connect(self, give_up_at: float = math.inf) -> sa.Connection:
        """Connects and acquires the state; waits without limit while another gateway owns it."""
        said = ""
        while not self._stopped.is_set():
            try:
                connection = self._connection = self._connection or self._engine.connect()
                give_up_at = math.inf
                with connection.begin():
                    is_taken = self._ownership.take(connection)
                if is_taken:
                    if said:
                        logger.info("%s: this gateway owns it now", self._name)
                    return connection
                reason = "waiting until the gateway that owns it exits"
            except sa.exc.DBAPIError as error:
                self._drop()
                reason = str(error.orig).strip()
                if not is_lost(error) or time.monotonic() > give_up_at:
                    raise Unavailable(f"{self._name} rejects the connection: {reason}") from None
            if reason != said:
                logger.info("%s: %s", self._name, reason)
                said = reason
            self._stopped.wait(_RETRY_S)
        raise Stopped

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None

    @property
    def _name(self) -> str:
        return describe(self._engine.url)


def _run(connection: sa.Connection, jobs: list[Job[Any]]) -> list[Any]:
    """Runs jobs in their order, since the outcome of a future may directly follow its submission."""
    results: list[Any] = []
    for run, alike in groupby(jobs, lambda job: job.run if isinstance(job, Batched) else None):
        if run is None:
            results += [job(connection) for job in alike]
        else:
            results += run(connection, [job.item for job in alike if isinstance(job, Batched)])
    return results


class Ownership(Protocol):
    """The right to write. Only the writer's thread uses it."""

    def take(self, connection: sa.Connection) -> bool:
        """Acquires the state, and does so again on each new connection. Returns False while another gateway owns it."""
        ...

    def begin(self, connection: sa.Connection) -> None:
        """Records the new owner, once the tables exist."""
        ...

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Records a transaction's number within that transaction. Raises Superseded if another gateway owns the
        state.
        """
        ...

    def last_mark(self, connection: sa.Connection) -> int:
        """Returns the number of the last committed transaction. Raises Superseded like `mark`."""
        ...

    def release(self) -> None:
        """Releases the state, unless closing the connection releases it."""
        ...


class FileOwnership:
    """A lock on a file. A connection to a file is never lost, so transactions need no numbers."""

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

    def begin(self, connection: sa.Connection) -> None:
        """Does nothing: the lock suffices."""

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Does nothing."""

    def last_mark(self, connection: sa.Connection) -> int:
        """Returns 0: the outcome of a commit is always known."""
        return 0

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
        """Tries to acquire the lock. Raises Superseded if another gateway has owned the state since `begin`."""
        if self._has_begun:
            self.last_mark(connection)
        is_taken: bool = connection.execute(_TAKE, {"lock": _LOCK}).scalar_one()
        return is_taken

    def begin(self, connection: sa.Connection) -> None:
        """Replaces the previous owner's row."""
        connection.execute(sa.delete(owner))
        connection.execute(sa.insert(owner).values(name=self._name, last_mark=0))
        self._has_begun = True

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Updates the row of this owner."""
        if connection.execute(self._numbered, {"number": number}).rowcount == 0:
            raise Superseded

    def last_mark(self, connection: sa.Connection) -> int:
        """Reads the row of this owner."""
        number: int | None = connection.execute(sa.select(owner.c.last_mark).where(self._mine)).scalar()
        if number is None:
            raise Superseded
        return number

    def release(self) -> None:
        """Does nothing: the lock ends with its session."""


def make_ownership(url: sa.URL) -> Ownership:
    """Returns a file lock for SQLite, an advisory lock for PostgreSQL."""
    if url.get_backend_name() != "sqlite":
        return SessionOwnership()
    return FileOwnership(url.database or "")


RESERVE_BYTES = 16 * 2**20
_SQLITE_IOERR, _SQLITE_FULL = 10, 13
_LEAST_BYTES = 2**20


class DiskReserve:
    """A file that reserves some room on the disk of an SQLite database.

    Ending sessions and deleting checkpoints frees room, but needs some room itself. The file is deleted when the disk
    is full, and created again once there is room; in between, the gateway accepts no new work. Any thread may read
    `is_spent`; only the thread that writes the database may call the methods.

    Args:
        database: The path of the database; empty for PostgreSQL, which has no reserve.
    """

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}.reserve") if database else None
        self.is_spent = False

    def take(self) -> None:
        """Creates the file if twice its size is free. A full disk is not an error, but is logged."""
        if self._path is None or (self._path.exists() and not self.is_spent):
            return
        if self._free_bytes() < 2 * RESERVE_BYTES or not self._make():
            if not self.is_spent:
                logger.error("the disk of %s is full: no new work is accepted", self._path.parent)
            self.is_spent = True
            return
        if self.is_spent:
            logger.info("there is room again on the disk of %s", self._path.parent)
        self.is_spent = False

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
