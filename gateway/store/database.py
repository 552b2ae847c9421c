"""One database, one writer. Writes are committed in groups, so that a thousand submissions cost a few commits.

Every write goes through a queue to the one thread that holds the write connection; SQLite therefore never sees two
writers and never answers "database is locked". Reads have threads and connections of their own and see committed state.

Jobs are plain functions that run in those threads. SQLAlchemy's asyncio engine over aiosqlite was measured first: it
changes threads for every statement and took 2.2 ms of CPU for a future where this takes 0.8.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import sqlalchemy as sa

from fovea.wire.errors import Internal
from gateway.store import migrations, schema

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Job = Callable[[sa.Connection], Result]
_GROUP_SIZE = 256
_READERS = 4


class Database:
    """Opens a database and runs jobs on it. A write job may run twice, if another one of its group fails."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._writer = ThreadPoolExecutor(1, "database-writer")
        self._readers = ThreadPoolExecutor(_READERS, "database-reader")
        self._queue: asyncio.Queue[tuple[Job[Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Makes or migrates the tables and starts the writer. Raises Internal for a schema that it does not know."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._prepare)
        self._task = asyncio.create_task(self._write_forever(), name="database writer")

    async def close(self) -> None:
        """Commits what is queued and closes."""
        if self._task:
            await self._queue.join()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._writer.shutdown()
        self._readers.shutdown()
        self._engine.dispose()

    async def write(self, job: Job[Result]) -> Result:
        """Runs a job in a transaction; returns once it is committed. Raises what the job raised."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        await self._queue.put((job, done))
        # The job itself must not be undone by a caller who stops waiting: others may rely on its effect.
        return await asyncio.shield(done)

    async def read(self, job: Job[Result]) -> Result:
        """Runs a job that only reads."""

        def run() -> Result:
            with self._engine.connect() as connection:
                return job(connection)

        return await asyncio.get_running_loop().run_in_executor(self._readers, run)

    async def _write_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            group = [await self._queue.get()]
            while len(group) < _GROUP_SIZE and not self._queue.empty():
                group.append(self._queue.get_nowait())
            outcomes = await loop.run_in_executor(self._writer, self._commit, [job for job, _ in group])
            for (_, done), outcome in zip(group, outcomes, strict=True):
                _settle(done, outcome)
                self._queue.task_done()

    def _commit(self, jobs: list[Job[Any]]) -> list[Any]:
        """Results of the jobs, or the exception of each that failed. In the writer's thread."""
        try:
            with self._engine.begin() as connection:
                return [job(connection) for job in jobs]
        except Exception as error:
            if len(jobs) == 1:
                return [error]
        # One bad job must not fail its neighbours.
        return [self._commit([job])[0] for job in jobs]

    def _prepare(self) -> None:
        with self._engine.begin() as connection:
            schema.metadata.create_all(connection)
            version = connection.execute(sa.select(schema.schema_version.c.version)).scalar()
            if version is None:
                connection.execute(sa.insert(schema.schema_version).values(version=schema.SCHEMA_VERSION))
            else:
                _migrate(connection, version)


def _migrate(connection: sa.Connection, version: int) -> None:
    found = version
    while version in migrations.STEPS:
        for statement in migrations.STEPS[version]:
            connection.execute(sa.text(statement))
        version += 1
    if version != schema.SCHEMA_VERSION:
        raise Internal(f"the database has schema {found}, this gateway needs {schema.SCHEMA_VERSION}")
    if version != found:
        logger.info("the database goes from schema %d to %d", found, version)
        connection.execute(sa.update(schema.schema_version).values(version=version))


def _settle(done: asyncio.Future[Any], outcome: Any) -> None:
    if done.done():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
        done.exception()  # a caller who went away is no reason for "exception was never retrieved"
    else:
        done.set_result(outcome)


def _engine(url: str) -> sa.Engine:
    engine = sa.create_engine(url, pool_size=_READERS + 1, max_overflow=0)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _configure_sqlite)
    return engine


def _configure_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000", "wal_autocheckpoint=4000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def insert_new(connection: sa.Connection, table: sa.Table, values: dict[str, Any]) -> bool:
    """Inserts a row unless a unique key has it already; returns whether it is new."""
    return bool(connection.execute(_insertion(connection.dialect.name, table), values).rowcount)


@cache
def _insertion(dialect: str, table: sa.Table) -> sa.Insert:
    """Made once: SQLAlchemy takes longer to build a statement than SQLite to run it."""
    if dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as postgresql_insert

        return postgresql_insert(table).on_conflict_do_nothing()
    from sqlalchemy.dialects.sqlite import insert as sqlite_insert

    return sqlite_insert(table).on_conflict_do_nothing()
