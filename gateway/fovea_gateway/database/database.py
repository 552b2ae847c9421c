"""Runs the gateway's reads and writes on its database, outside the event loop.

All writes go through one queue to one thread, which has the only writing connection, so SQLite never answers "database
is locked". The thread commits all writes in the queue together, and writes of the same kind (`Batched`) share their
statements, so a thousand submissions take a few commits and a few statements. Reads have their own threads and
connections and see what is committed.

Jobs are plain functions that run in those threads. This takes 0.8 ms of CPU per future; SQLAlchemy's asyncio engine
over aiosqlite takes 2.2 ms, because it changes threads for every statement.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from fovea.wire.errors import Unavailable
from fovea_gateway.database.sql_engine import is_lost, make_engine, parse_url, translate
from fovea_gateway.database.writer import Job, Result, Superseded, Writer

logger = logging.getLogger(__name__)

_GROUP_SIZE = 256  # writes in one transaction
_READERS = 4  # threads, with one connection each
_READ_RETRY_S = 0.2
_START_PATIENCE_S = 30.0
_CLOSE_PATIENCE_S = 5.0


class Database:
    """One gateway's database. A write may run twice, if another one in its transaction fails.

    While the database is unavailable, reads and writes wait for it without limit. If a write gave up, it might still
    take effect later without the caller's knowledge. If a read gave up, work that was accepted would fail.

    Args:
        url: A SQLAlchemy URL; `postgresql://` means psycopg 3.
        on_superseded: Called once another gateway has taken over the state, which makes this process's memory stale.
        patience_s: Seconds that the first connection may take.

    Raises:
        InvalidInput: The URL cannot be used.
    """

    def __init__(
        self, url: str, on_superseded: Callable[[], None] = lambda: None, patience_s: float = _START_PATIENCE_S
    ) -> None:
        self._engine = make_engine(parse_url(url), _READERS + 1)
        self._reading = self._engine
        if self._engine.dialect.name == "postgresql":  # saves two round trips per read
            self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._stopped = threading.Event()
        self._writer = Writer(self._engine, patience_s, self._stopped)
        self._writer_thread = ThreadPoolExecutor(1, "database-writer")
        self._reader_threads = ThreadPoolExecutor(_READERS, "database-reader")
        self._queue: asyncio.Queue[tuple[Job[Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._on_superseded = on_superseded

    async def open(self) -> None:
        """Waits until this gateway owns the state, creates or migrates the tables and starts the writer.

        Raises:
            Unavailable: The database does not answer.
            Internal: Its schema is unknown, or its folder belongs to another gateway.
        """
        await asyncio.get_running_loop().run_in_executor(self._writer_thread, self._writer.open)
        self._task = asyncio.create_task(self._write_forever(), name="database writer")

    async def close(self) -> None:
        """Commits queued writes, releases the state and closes. Waits a few seconds for a database that is
        unavailable.
        """
        if self._task:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._queue.join(), _CLOSE_PATIENCE_S)
        self._stopped.set()
        if self._task:
            await self._queue.join()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._writer_thread, self._writer.close)
        self._writer_thread.shutdown()
        self._reader_threads.shutdown()
        self._engine.dispose()

    def abandon(self) -> None:
        """Drops connections and locks at once, as the end of the process does. Queued writes are lost."""
        self._writer.close()
        self._engine.dispose()

    def check_room(self) -> None:
        """Raises Unavailable while the disk is so full that nothing new should be accepted."""
        if self._writer.reserve.is_spent:
            raise Unavailable(
                "the disk of the gateway's state is full: end sessions or delete checkpoints, then send this again"
            )

    async def look_for_room(self) -> None:
        """Restores the disk reserve once there is room for it. Call this periodically."""
        await asyncio.get_running_loop().run_in_executor(self._writer_thread, self._writer.reserve.take)

    async def write(self, job: Job[Result]) -> Result:
        """Runs a job in a transaction; returns its result once it is committed.

        Raises:
            InvalidInput: The database cannot store a value.
            Unavailable: The database could not run the job, or another gateway owns the state.
            Exception: The error that the job raised.
        """
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        await self._queue.put((job, done))
        # A cancelled caller does not undo the job: others may rely on its effect.
        return await asyncio.shield(done)

    async def read(self, job: Job[Result]) -> Result:
        """Runs a job that only reads. Raises the same errors as `write`."""
        return await asyncio.get_running_loop().run_in_executor(self._reader_threads, self._read, job)

    def _read(self, job: Job[Result]) -> Result:
        while True:
            try:
                with self._reading.connect() as connection:
                    return job(connection)
            except sa.exc.DBAPIError as error:
                if not is_lost(error) or self._stopped.wait(_READ_RETRY_S):
                    raise translate(error, self._engine.url) from error

    async def _write_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            group = [await self._queue.get()]
            while len(group) < _GROUP_SIZE and not self._queue.empty():
                group.append(self._queue.get_nowait())
            jobs = [job for job, _ in group]
            try:
                outcomes = await loop.run_in_executor(self._writer_thread, self._writer.commit, jobs)
            except Superseded:
                logger.critical("another gateway has taken over the state: this one exits")
                self._on_superseded()
                outcomes = [Unavailable("another gateway has taken over: send this request again")] * len(jobs)
            for (_, done), outcome in zip(group, outcomes, strict=True):
                _settle(done, outcome)
                self._queue.task_done()


def _settle(done: asyncio.Future[Any], outcome: Any) -> None:
    if done.done():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
        done.exception()  # without a caller asyncio would log "exception was never retrieved"
    else:
        done.set_result(outcome)
