"""Engines, errors and inserts, which differ between SQLite in a file and PostgreSQL through psycopg 3.

Beside an SQLite file, some disk space is reserved.
"""

import argparse
import logging
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from fovea.runtime.durable import is_full_disk, sync_name
from fovea.wire.errors import InvalidInput, NotFound, Unavailable

logger = logging.getLogger(__name__)

_SCHEMES = {"postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg"}
_OPTIONS = re.compile(r"\?\w+=.*$", re.DOTALL)
_FORM = "it must be postgresql://USER:PASSWORD@HOST:PORT/DATABASE or sqlite:////PATH"
_CONNECT_TIMEOUT_S = 5
_URL_VARIABLE, _FOLDER_VARIABLE = "FOVEA_GATEWAY_DATABASE_URL", "FOVEA_GATEWAY_STATE_DIR"
_DEFAULT_FOLDER = Path(".fovea")
_POSTGRESQL_SESSION = {
    # A gateway on a dead machine must not own the state for the two hours that TCP waits by default.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25000",
    "statement_timeout": "60000",
}
_POSTGRESQL_CLIENT = {
    "connect_timeout": _CONNECT_TIMEOUT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
    "target_session_attrs": "read-write",  # after a failover the old primary may still answer
    "application_name": "fovea-gateway",
}


def parse_url(url: str) -> sa.URL:
    """Parses a database URL; `postgresql://` means psycopg 3.

    Raises:
        InvalidInput: The URL cannot be parsed, or has another kind of database. The message never contains the
            password.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise InvalidInput(f"database_url cannot be read: {_FORM}", field="database_url") from None
    parsed = parsed.set(drivername=_SCHEMES.get(parsed.drivername, parsed.drivername))
    if parsed.drivername != "sqlite" and _OPTIONS.sub("", url).count("@") > 1:
        # Errors would show the end of the password as a part of the host's or the database's name.
        words = "write special characters of the password as %40 (@), %2F (/) or %3F (?)"
        raise InvalidInput(f"database_url has an '@' too many: {words}; {_FORM}", field="database_url")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise InvalidInput(f"database_url begins with {parsed.drivername!r}: {_FORM}", field="database_url")
    return parsed


def describe(url: sa.URL) -> str:
    """Returns a database's name for logs and errors, without user and password."""
    if url.get_backend_name() == "sqlite":
        return f"SQLite in {url.database}"
    host = url.host or url.query.get("host") or "the local socket"
    return f"PostgreSQL {url.database or ''} at {host}:{url.port or 5432}"


def refusal(url: sa.URL, error: sa.exc.DBAPIError) -> Unavailable:
    """Returns a database's error in one line, with the database's name."""
    said = " ".join(str(error.orig).split())
    # psycopg has no SQLSTATE for a connection that fails, so only the text tells that the server refused the user.
    way = " cannot be reached" if is_lost(error) and "FATAL" not in said else ""
    return Unavailable(f"{describe(url)}{way}: {said}")


def check_connection(url: str) -> None:
    """Connects once to a PostgreSQL; leaves other databases alone. Raises InvalidInput or Unavailable."""
    parsed = parse_url(url) if url else None
    if parsed is None or parsed.get_backend_name() == "sqlite":
        return
    engine = make_engine(parsed, 1)
    try:
        engine.connect().close()
    except sa.exc.DBAPIError as error:
        if "starting up" not in str(error.orig):  # the gateway waits for it
            raise refusal(parsed, error) from None
    finally:
        engine.dispose()


def make_engine(url: sa.URL, connections: int) -> sa.Engine:
    """Returns an engine with a pool of at most `connections`, none of them open yet.

    An SQLite file is created for its user alone (mode 0600), because it holds the requests and results of all owners.

    Raises:
        InvalidInput: The URL has an option that the driver lacks.
    """
    is_sqlite = url.get_backend_name() == "sqlite"
    if is_sqlite and url.database:
        _make_private(Path(url.database))
    client = {} if is_sqlite else _POSTGRESQL_CLIENT
    arguments = {name: value for name, value in client.items() if name not in url.query}
    try:
        engine = sa.create_engine(url, pool_size=connections, max_overflow=0, connect_args=arguments)
    except (sa.exc.ArgumentError, TypeError, ValueError):
        raise InvalidInput(f"database_url has an unknown option: {_FORM}", field="database_url") from None
    sa.event.listen(engine, "connect", _configure_sqlite if is_sqlite else _configure_postgresql)
    return engine


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the --state-dir option to a command that works on a gateway's database."""
    words = f"the gateway's state folder; default: {_FOLDER_VARIABLE}, {_DEFAULT_FOLDER} here, or the running Fovea's"
    parser.add_argument("--state-dir", type=Path, help=words)


def command_url(state_dir: Path | None, *, may_create: bool = False) -> sa.URL:
    """Returns the URL of the database that a command works on.

    Args:
        state_dir: The folder that the command line names; None if it names none.
        may_create: Whether a new database may be created in a folder that the command line or the environment names.

    Raises:
        NotFound: There is no database. A new one would be useless without a name, because no gateway would read it.
        InvalidInput: The URL in the environment cannot be parsed.
    """
    if url := os.environ.get(_URL_VARIABLE):
        return parse_url(url)
    named = state_dir or (Path(os.environ[_FOLDER_VARIABLE]) if os.environ.get(_FOLDER_VARIABLE) else None)
    file = ((named or _DEFAULT_FOLDER) / "gateway.db").absolute()
    if not file.exists() and not (named and may_create):
        hint = "name the gateway's folder with --state-dir" if named is None else "name another folder"
        raise NotFound(f"{file.parent} contains no gateway database: {hint}", field="--state-dir")
    return parse_url(f"sqlite:///{file}")


def is_lost(error: BaseException) -> bool:
    """Returns whether the connection failed, so that the same work may succeed on another one."""
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", "")  # only psycopg's errors have it; None if the error is not from a server
    if state is None:
        return isinstance(error, sa.exc.OperationalError)
    # 08: connection exceptions; 57P: the server is stopping or starting; 25006: it is no longer the primary.
    return state.startswith(("08", "57P")) or state == "25006"


def translate(error: Exception, url: sa.URL) -> Exception:
    """Converts a database failure to an error for the client, if the client can do something about it.

    Returns:
        InvalidInput for values that the database cannot store, Unavailable if it could not run the statement (which is
        also logged), any other error unchanged.
    """
    if isinstance(error, sa.exc.DataError):
        return InvalidInput(f"the database cannot store this: {error.orig}")
    if isinstance(error, sa.exc.OperationalError | sa.exc.TimeoutError):
        cause = getattr(error, "orig", error)  # SQLAlchemy's own error if no connection became free
        logger.warning("%s: %s", describe(url), cause)
        # PostgreSQL's messages contain hosts, users and files, so clients do not get them.
        words = str(cause) if url.get_backend_name() == "sqlite" else "see the gateway's log"
        return Unavailable(f"the database could not run this now: {words}")
    return error


def insert_new(connection: sa.Connection, table: sa.Table, values: dict[str, Any]) -> bool:
    """Inserts a row unless its unique key exists already; returns whether it is new."""
    return connection.execute(insertion(connection.dialect.name, table), values).rowcount == 1


@cache
def insertion(dialect: str, table: sa.Table) -> sa.Insert:
    """Returns a statement that inserts rows, except those whose unique key exists already.

    It is cached, because SQLAlchemy takes longer to build the statement than SQLite to run it.
    """
    if dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as postgresql_insert

        # Without the option SQLAlchemy discards the row count of an INSERT, and `rowcount` is -1.
        return postgresql_insert(table).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    from sqlalchemy.dialects.sqlite import insert as sqlite_insert

    return sqlite_insert(table).on_conflict_do_nothing()


def _make_private(file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    # SQLite creates its other files with the mode of the first; an earlier version may have left them open to all.
    for each in (file, *(Path(f"{file}-{suffix}") for suffix in ("wal", "shm"))):
        with suppress(FileNotFoundError, PermissionError):
            each.chmod(0o600)
    sync_name(str(file.absolute()))  # SQLite syncs only the folder of its files, not the folders above it


def _configure_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    # FULL: an answer to a client means that the data is on the disk. NORMAL can lose the last commits in a power cut.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "wal_autocheckpoint=4000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
    # SQLite's own function changes ASCII letters only.
    connection.create_function("lower", 1, lambda text: text and text.lower(), deterministic=True)


def _configure_postgresql(connection: Any, _: object) -> None:
    # Set by a statement, not by start-up options: poolers reject those, and the URL may have its own.
    calls = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _POSTGRESQL_SESSION.items())
    connection.execute(f"SELECT {calls}")
    connection.commit()


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
