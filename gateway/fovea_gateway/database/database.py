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
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from fovea.wire.errors import Unavailable
from fovea_gateway.database import migrations
from fovea_gateway.database.ownership import SessionOwnership, Shards, Superseded, make_ownership, see_whole
from fovea_gateway.database.sql_engine import DiskReserve, describe, is_lost, make_engine, parse_url, refusal, translate

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Job = Callable[[sa.Connection], Result]
_GROUP_SIZE = 256  # writes in one transaction
_READERS = 4  # threads, with one connection each
_READ_RETRY_S = 0.2
_START_PATIENCE_S = 30.0
_CLOSE_PATIENCE_S = 5.0
_RETRY_S = 0.2
SOON_S = 5.0
_COMMIT_S = 1.0


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
    """The only connection that writes, in a thread of its own. It commits groups of jobs; a lost connection neither
    loses a group nor applies it twice.

    Args:
        engine: The engine of the database; its URL selects the kind of ownership.
        shards: The shards of the sessions; the writer owns one.
        patience_s: Seconds that the first connection may take; later ones have no limit.
        stopped: Once it is set, every wait ends with Stopped.
    """

    def __init__(self, engine: sa.Engine, shards: Shards, patience_s: float, stopped: threading.Event) -> None:
        self._engine, self._shards, self._patience_s = engine, shards, patience_s
        self._ownership = make_ownership(engine.url, shards)
        self._session = self._ownership if isinstance(self._ownership, SessionOwnership) else None
        self.reserve = DiskReserve(engine.url.database or "" if engine.url.get_backend_name() == "sqlite" else "")
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
            while not self._upgrade(connection):
                if self._stopped.wait(_RETRY_S):
                    raise Stopped
        except sa.exc.DBAPIError as error:
            raise Unavailable(f"{self._name} rejects Fovea's tables: {str(error.orig).strip()}") from None
        self.reserve.take()

    def _upgrade(self, connection: sa.Connection) -> bool:
        with connection.begin():
            is_done = migrations.upgrade(connection, self._shards)
            if is_done and self._session is not None:
                self._session.begin(connection)
        return is_done

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
                    if self._session is not None:
                        self._session.mark(connection, number)
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
            return self._session is not None and self._session.last_mark(connection) == number

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
                        logger.info("%s: this gateway owns %s now", self._name, self._shards.mine)
                    return connection
                reason = "waiting until the gateway that owns it exits"
            except sa.exc.DBAPIError as error:
                self._drop()
                reason = str(error.orig).strip()
                if not is_lost(error) or time.monotonic() > give_up_at:
                    raise refusal(self._engine.url, error) from None
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


class Database:
    """One gateway's database. A write may run twice, if another one in its transaction fails.

    While the database is unavailable, reads and writes wait for it without limit. If a write gave up, it might still
    take effect later without the caller's knowledge. If a read gave up, work that was accepted would fail.

    Args:
        url: A SQLAlchemy URL; `postgresql://` means psycopg 3.
        on_superseded: Called once another gateway has taken over the state, which makes this process's memory stale.
        patience_s: Seconds that the first connection may take.
        shard_count: The number of gateways that share the database; each owns one shard of the sessions.

    Raises:
        InvalidInput: The URL cannot be used.

    Attributes:
        shards: The shards, and the one that this gateway owns once the database is open.
    """

    def __init__(
        self,
        url: str,
        on_superseded: Callable[[], None] = lambda: None,
        patience_s: float = _START_PATIENCE_S,
        shard_count: int = 1,
    ) -> None:
        self.shards = Shards(shard_count)
        self._engine = make_engine(parse_url(url), _READERS + 1)
        self._reading = self._whole = self._engine
        if self._engine.dialect.name == "postgresql":  # saves two round trips per read
            self._reading = self._whole = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        if shard_count > 1:
            sa.event.listen(self._engine, "connect", self.shards.enter)
            self._whole = make_engine(parse_url(url), 1)
            sa.event.listen(self._whole, "connect", see_whole)
        self._stopped = threading.Event()
        self._writer = Writer(self._engine, self.shards, patience_s, self._stopped)
        self._writer_thread = ThreadPoolExecutor(1, "database-writer")
        self._reader_threads = self._whole_threads = ThreadPoolExecutor(_READERS, "database-reader")
        if shard_count > 1:  # A read over all shards waits while one is upgraded. Other reads must not wait behind it.
            self._whole_threads = ThreadPoolExecutor(1, "database-whole-reader")
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
        self._whole_threads.shutdown()
        self._dispose()

    def abandon(self) -> None:
        """Drops connections and locks at once, as the end of the process does. Queued writes are lost."""
        self._writer.close()
        self._dispose()

    def _dispose(self) -> None:
        for engine in (self._engine, self._whole):
            engine.dispose()

    def check_room(self) -> None:
        """Raises Unavailable while the disk is so full that nothing new should be accepted."""
        if self._writer.reserve.is_spent or self._writer.reserve.is_low:
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

    async def write_soon(self, job: Job[Result]) -> Result:
        """Like `write`, but a job that does not begin within `SOON_S` has no effect.

        For changes that are of no use to a caller that no longer waits. A job that began in time may take effect
        although this raises Unavailable, if its commit takes long or the connection breaks; the message then says so.
        """
        give_up_at, began = time.monotonic() + SOON_S, threading.Event()

        def timely(connection: sa.Connection) -> Result:
            if time.monotonic() > give_up_at:
                raise Unavailable("the database was unavailable for too long")
            began.set()
            return job(connection)

        try:
            async with asyncio.timeout(SOON_S + _COMMIT_S):
                return await self.write(timely)
        except TimeoutError:
            what = "the change may still take effect: look before you try again"
            if not began.is_set():
                what = "so nothing is changed: try again later"
            raise Unavailable(f"the gateway's database has not answered for {SOON_S:.0f} s, {what}") from None

    async def read(self, job: Job[Result]) -> Result:
        """Runs a job that only reads. Raises the same errors as `write`."""
        return await asyncio.get_running_loop().run_in_executor(self._reader_threads, self._read, job, self._reading)

    async def read_whole(self, job: Job[Result]) -> Result:
        """Runs a job that only reads common tables and those in `SEEN_WHOLE`, the rows of all shards as one. Raises the
        same errors as `write`.
        """
        return await asyncio.get_running_loop().run_in_executor(self._whole_threads, self._read, job, self._whole)

    def _read(self, job: Job[Result], engine: sa.Engine) -> Result:
        while True:
            try:
                with engine.connect() as connection:
                    return job(connection)
            except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
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
