"""One database, one writer. Writes are committed in groups, so that a thousand submissions cost a few commits.

Every write goes through a queue to the single task that holds the write connection; SQLite therefore never sees two
writers and never answers "database is locked". Reads have connections of their own and see committed state only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from fovea.wire.errors import Internal
from gateway.store import schema

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Job = Callable[[AsyncConnection], Awaitable[Result]]
_GROUP_SIZE = 256


class Database:
    """Opens a database and runs jobs on it: functions of a connection. A write job may run twice if its group fails."""

    def __init__(self, url: str) -> None:
        self._writer_engine = _engine(url, pool_size=1)
        self._reader_engine = _engine(url, pool_size=4)
        self._queue: asyncio.Queue[tuple[Job[Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Makes missing tables and starts the writer. Raises Internal for a schema of another version."""
        async with self._writer_engine.begin() as connection:
            await connection.run_sync(schema.metadata.create_all)
            version = (await connection.execute(sa.select(schema.schema_version.c.version))).scalar()
            if version is None:
                await connection.execute(sa.insert(schema.schema_version).values(version=schema.SCHEMA_VERSION))
            elif version != schema.SCHEMA_VERSION:
                raise Internal(f"the database has schema {version}, this gateway needs {schema.SCHEMA_VERSION}")
        self._task = asyncio.create_task(self._write_forever(), name="database writer")

    async def close(self) -> None:
        """Commits what is queued and closes."""
        if self._task:
            await self._queue.join()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._writer_engine.dispose()
        await self._reader_engine.dispose()

    async def write(self, job: Job[Result]) -> Result:
        """Runs a job in a transaction; returns once it is committed. Raises what the job raised."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        await self._queue.put((job, done))
        # The job itself must not be undone by a caller who stops waiting: others may rely on its effect.
        return await asyncio.shield(done)

    async def read(self, job: Job[Result]) -> Result:
        """Runs a job that only reads."""
        async with self._reader_engine.connect() as connection:
            return await job(connection)

    async def _write_forever(self) -> None:
        while True:
            group = [await self._queue.get()]
            while len(group) < _GROUP_SIZE and not self._queue.empty():
                group.append(self._queue.get_nowait())
            try:
                await self._commit(group)
            finally:
                for _ in group:
                    self._queue.task_done()

    async def _commit(self, group: list[tuple[Job[Any], asyncio.Future[Any]]]) -> None:
        try:
            async with self._writer_engine.begin() as connection:
                results = [await job(connection) for job, _ in group]
        except Exception as error:
            if len(group) == 1:
                _reject(group[0][1], error)
                return
            for item in group:  # one bad job must not fail its neighbours
                await self._commit([item])
            return
        for (_, done), result in zip(group, results, strict=True):
            if not done.done():
                done.set_result(result)


def _reject(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # a caller who went away is no reason for "exception was never retrieved"


def _engine(url: str, pool_size: int) -> AsyncEngine:
    engine = create_async_engine(url, pool_size=pool_size, max_overflow=0)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine.sync_engine, "connect", _configure_sqlite)
    return engine


def _configure_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000", "wal_autocheckpoint=4000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


async def insert_new(connection: AsyncConnection, table: sa.Table, values: dict[str, Any]) -> bool:
    """Inserts a row unless a unique key has it already; returns whether it is new."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as postgresql_insert

        statement: Any = postgresql_insert(table).values(**values).on_conflict_do_nothing()
    else:
        from sqlalchemy.dialects.sqlite import insert as sqlite_insert

        statement = sqlite_insert(table).values(**values).on_conflict_do_nothing()
    return bool((await connection.execute(statement)).rowcount)
