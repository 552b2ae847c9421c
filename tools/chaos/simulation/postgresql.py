"""A PostgreSQL for gateways in the plural: schemas in SQLite files, with advisory locks, search paths and connections
that can be lost.

Transactions of different connections never overlap, since each takes one step of the event loop. A change of the search
path commits the transaction.
"""

import json
import random
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from chaos.simulation import surroundings
from chaos.simulation.database_files import DatabaseFiles
from chaos.simulation.event_loop import PROCESS, Process, VirtualLoop
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import COMMON, metadata

URL = "postgresql://simulated/fovea"
_BASE = "public"
_OWN = [table.name for table in metadata.sorted_tables if table not in COMMON]
_PRAGMAS = ("journal_mode=WAL", "synchronous=OFF")


class Lost(sqlite3.OperationalError):
    """The connection to the server has ended, as psycopg reports it."""

    sqlstate = None


class Postgresql:
    """The server.

    Args:
        folder: Contains a file for each schema.

    Attributes:
        schemas: The names of all schemas.
        catalogue: A query for each of the server's own tables, of the time when it started.
        is_down: Whether the server does not run.
        cut: Processes that cannot reach it, by address without port.
        sessions: The open sessions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.schemas = sorted(path.stem for path in folder.glob("*.db"))
        columns = [[name, *row] for name in self.schemas for row in _read_columns(folder / f"{name}.db")]
        self.catalogue = {
            "pg_namespace": _selection(("nspname",), [[name] for name in self.schemas]),
            "information_schema.columns": _selection(("table_schema", "table_name", "column_name"), columns),
        }
        self.is_down = False
        self.cut: set[str] = set()
        self.sessions: list[Session] = []
        self._locks: dict[tuple[int, int], Session] = {}

    def connect(self) -> "Session":
        """Returns a new session. Raises Lost if the server cannot be reached."""
        process = PROCESS.get()
        if self.is_down or _host(process) in self.cut:
            raise Lost("connection to server failed")
        session = Session(self, process)
        self.sessions.append(session)
        return session

    def lock(self, session: "Session", key: tuple[int, int]) -> bool:
        """Gives a session a lock, unless another session has it."""
        return self._locks.setdefault(key, session) is session

    def end(self, session: "Session") -> None:
        """Releases what an ended session had."""
        if session in self.sessions:
            self.sessions.remove(session)
        self._locks = {key: holder for key, holder in self._locks.items() if holder is not session}

    def sessions_of(self, host: str) -> list["Session"]:
        """Returns the sessions of a process, by its address without port."""
        return [session for session in self.sessions if _host(session.process) == host]

    def end_all(self, process: Process | None = None) -> None:
        """Ends all sessions, or those of a process."""
        for session in list(self.sessions):
            if process in (None, session.process):
                session.lose()
                self.end(session)


class Session:
    """A session of the server, and a connection for SQLAlchemy.

    Attributes:
        process: The client.
        last_commit: Decides the fate of the next commit of changes: None for success; otherwise the connection is lost,
            after the commit for True, and before it for False.
    """

    def __init__(self, server: Postgresql, process: Process | None) -> None:
        self._server, self.process = server, process
        self.last_commit: bool | None = None
        self._is_lost = False
        self._session_path = self._path = [_BASE]
        self._files = self._open()

    def cursor(self, *_: Any) -> "_Cursor":
        """Returns a cursor."""
        return _Cursor(self)

    def execute(self, statement: str, values: Sequence[Any] = ()) -> "_Cursor":
        """Runs a statement with psycopg's placeholders."""
        return self.cursor().execute(statement.replace("%s", "?"), values)

    def commit(self) -> None:
        """Commits. Raises Lost if the connection is lost, before or after the commit."""
        self._check()
        is_decided = self._files.in_transaction and self.last_commit is not None
        if is_decided and not self.last_commit:
            self._files.rollback()
        self._files.commit()
        if is_decided:
            self.lose()
            self._server.end(self)
            self._check()
        self._follow(self._session_path)

    def rollback(self) -> None:
        """Rolls back. Raises Lost if the connection is lost."""
        self._check()
        self._files.rollback()
        self._follow(self._session_path)

    def close(self) -> None:
        """Ends the session."""
        self._files.close()
        if not self._is_lost:
            self._server.end(self)

    def lose(self) -> None:
        """Loses the connection. The session ends once the server notices."""
        if not self._is_lost:
            self._is_lost = True
            self._files.rollback()

    def run(self, statement: str, values: Any, is_many: bool) -> "_Ran":
        """Runs a statement."""
        self._check()
        if statement.startswith("CREATE SCHEMA "):
            self._create(statement.split()[-1].strip('"'))
            statement = "SELECT 1"
        self._attach(name for name in self._server.schemas if f"{name}." in statement or f'"{name}".' in statement)
        for name, rows in self._server.catalogue.items():
            statement = statement.replace(f"FROM {name}", f"FROM ({rows})")
        cursor = self._files.cursor()
        (cursor.executemany if is_many else cursor.execute)(statement, values)
        ran = _Ran(cursor.fetchall(), cursor.description, cursor.rowcount, cursor.lastrowid)
        cursor.close()
        self._follow(self._path)
        return ran

    def _check(self) -> None:
        if self._is_lost:
            raise Lost("server closed the connection unexpectedly")

    def _create(self, schema: str) -> None:
        sqlite3.connect(self._file(schema)).close()
        self._server.schemas.append(schema)

    def _file(self, schema: str) -> Path:
        return self._server.folder / f"{schema}.db"

    def _follow(self, path: list[str]) -> None:
        """Opens the files of another search path."""
        self._path = path
        if path == self._opened:
            return
        self._files.commit()
        self._files.close()
        self._files = self._open()

    def _open(self) -> sqlite3.Connection:
        self._opened = self._path
        files = sqlite3.connect(self._file(self._path[0]), check_same_thread=False)
        for pragma in _PRAGMAS:
            files.execute(f"PRAGMA {pragma}")
        self._files, self._attached = files, set[str]()
        self._attach(self._path[1:])
        functions: dict[str, tuple[int, Callable[..., Any]]] = {
            "set_config": (3, self._set), "current_schema": (0, lambda: self._path[0]),
            "hashtext": (1, lambda text: zlib.crc32(text.encode())),
            "starts_with": (2, lambda text, start: text.startswith(start)),
            "pg_try_advisory_lock": (2, lambda lock, key: self._server.lock(self, (lock, key))),
            "pg_advisory_xact_lock": (2, lambda lock, key: None), "pg_try_advisory_xact_lock": (2, lambda lock, key: 1),
            "lower": (1, lambda text: text and text.lower()),
        }  # fmt: skip
        for name, (count, function) in functions.items():
            files.create_function(name, count, function, deterministic=name == "lower")
        return files

    def _attach(self, schemas: Iterable[str]) -> None:
        for schema in schemas:
            if schema not in self._attached:
                self._files.execute(f'ATTACH ? AS "{schema}"', (str(self._file(schema)),))
                self._attached.add(schema)

    def _set(self, name: str, value: str, is_local: int) -> str:
        if name == "search_path":
            self._path = [schema.strip('"') for schema in value.split(", ")]
            if not is_local:
                self._session_path = self._path
        return value


class _Ran(NamedTuple):
    """The result of a statement."""

    rows: list[Any]
    description: Any
    rowcount: int
    lastrowid: int | None


class _Cursor:
    """A cursor that has fetched all rows."""

    arraysize = 1

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ran = _Ran([], None, -1, None)

    @property
    def description(self) -> Any:
        return self._ran.description

    @property
    def rowcount(self) -> int:
        return self._ran.rowcount

    @property
    def lastrowid(self) -> int | None:
        return self._ran.lastrowid

    def execute(self, statement: str, values: Any = (), is_many: bool = False) -> "_Cursor":
        self._ran = self._session.run(statement, values, is_many)
        return self

    def executemany(self, statement: str, values: Any) -> "_Cursor":
        return self.execute(statement, values, is_many=True)

    def fetchone(self) -> Any:
        return next(iter(self.fetchmany()), None)

    def fetchmany(self, size: int = 1) -> list[Any]:
        fetched = self._ran.rows[:size]
        del self._ran.rows[:size]
        return fetched

    def fetchall(self) -> list[Any]:
        return self.fetchmany(len(self._ran.rows))

    def __iter__(self) -> Any:
        return iter(self.fetchall())

    def close(self) -> None:
        """Does nothing: nothing is open."""


class Dialect(SQLiteDialect_pysqlite):
    """SQLAlchemy's dialect for the server of the current world."""

    supports_statement_cache = True

    def create_connect_args(self, url: sa.URL) -> Any:
        return [], {}

    def connect(self, *_: Any, **__: Any) -> Any:
        return surroundings.connect_database()

    @classmethod
    def get_pool_class(cls, url: sa.URL) -> type[sa.Pool]:
        return sa.QueuePool

    def on_connect(self) -> Any:
        return None

    def is_disconnect(self, e: Exception, connection: Any, cursor: Any) -> bool:
        return isinstance(e, Lost)

    def has_schema(self, connection: sa.Connection, schema_name: str, **_: Any) -> bool:
        found: Any = connection.exec_driver_sql("SELECT nspname FROM pg_namespace").scalars()
        return schema_name in list(found)

    def get_isolation_level(self, dbapi_connection: Any) -> Any:
        return "SERIALIZABLE"

    def set_isolation_level(self, dbapi_connection: Any, level: Any) -> None:
        """Does nothing: reads begin no transaction."""


class SharedDatabase(DatabaseFiles):
    """The database of gateways in the plural; its files are never full.

    Args:
        folder: An empty folder.
        template: A folder with the file of each schema.
    """

    def __init__(self, folder: Path, template: Path) -> None:
        super().__init__(folder, template / f"{_BASE}.db")
        self.path.unlink()
        self.path = folder / f"{_BASE}.db"
        for path in template.glob("*.db"):
            shutil.copy(path, folder)
        self.server = Postgresql(folder)

    def limit(self, connection: sa.Connection) -> None:
        """Does nothing."""

    def read(self, query: str, *values: str) -> list[Any]:
        """Returns the rows of a query of the checker, on all shards as one."""
        with closing(sqlite3.connect(self.path)) as database:
            others = [schema for schema in self.server.schemas if schema != _BASE]
            for schema in others:
                database.execute(f'ATTACH ? AS "{schema}"', (str(self.folder / f"{schema}.db"),))
            for table in _OWN:
                union = " UNION ALL ".join(f'SELECT * FROM "{schema}"."{table}"' for schema in ("main", *others))
                database.execute(f'CREATE TEMP VIEW "{table}" AS {union}')
            return database.execute(query, values).fetchall()


def make_shared_template(folder: Path, shard_count: int) -> Path:
    """Creates the tables of all shards."""
    folder.mkdir()
    sqlite3.connect(folder / f"{_BASE}.db").close()
    server = Postgresql(folder)
    loop = VirtualLoop(lambda: 0.0, has_threads=True)  # type: ignore[abstract]  # sockets and the like

    async def make() -> None:
        database = Database(URL, shard_count=shard_count)
        await database.open()
        await database.close()

    with surroundings.inside(_Making(loop, server)):
        loop.run(make())
    return folder


class _Making:
    """The surroundings in which the template is made."""

    def __init__(self, loop: VirtualLoop, server: Postgresql) -> None:
        self._loop = loop
        self._entropy = random.Random(0)
        self.connect_database = server.connect

    def now(self) -> float:
        return self._loop.time()

    def entropy(self, count: int) -> bytes:
        return self._entropy.randbytes(count)

    def open_channel(self, address: str) -> Any:
        raise AssertionError(address)

    def free_bytes(self) -> int:
        return 2**34

    def limit(self, connection: sa.Connection) -> None:
        """Does nothing."""


def _read_columns(path: Path) -> list[tuple[str, str]]:
    """Returns table and column for all columns in a file."""
    query = "SELECT t.name, c.name FROM sqlite_master AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table'"
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def _selection(names: Sequence[str], rows: list[list[str]]) -> str:
    columns = ", ".join(f"value ->> {number} AS {name}" for number, name in enumerate(names))
    return f"SELECT {columns} FROM json_each('{json.dumps(rows)}')"


def _host(process: Process | None) -> str:
    return process.name.partition("#")[0] if process is not None else ""
