"""The one connection that writes, while this gateway owns the state. Everything here runs in one thread."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from fovea.wire.errors import Unavailable
from gateway.database import migrations
from gateway.database.disk_reserve import DiskReserve, is_full
from gateway.database.ownership import Superseded, make_ownership
from gateway.database.sql_engine import describe, is_lost, translate

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Job = Callable[[sa.Connection], Result]
_RETRY_S = 0.2


class Stopped(Exception):
    """The process ends, and the database has not come back."""


@dataclass(frozen=True)
class Batched(Generic[Item, Result]):
    """A job on one item. Neighbours in the queue with the same `run` are run by one call of it.

    Args:
        run: Does the job for several items; returns one result per item, in their order.
        item: This job's own.
    """

    run: Callable[[sa.Connection, list[Item]], list[Result]]
    item: Item

    def __call__(self, connection: sa.Connection) -> Result:
        """Runs this job alone."""
        return self.run(connection, [self.item])[0]


class Writer:
    """Commits groups of jobs. It survives the loss of its connection: no group is lost, none is applied twice.

    Args:
        engine: Its URL says which database this is.
        patience_s: How long the first connection may take, in seconds; later ones may take forever.
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
        """Waits until this gateway owns the state, then makes or migrates the tables.

        Raises:
            Unavailable: The database does not answer, or refuses the user or the tables.
            Internal: Its schema is unknown, or another gateway uses its folder.
        """
        connection = self._connect(time.monotonic() + self._patience_s)
        try:
            with connection.begin():
                migrations.upgrade(connection)
                self._ownership.begin(connection)
        except sa.exc.DBAPIError as error:
            raise Unavailable(f"{self._name} does not take our tables: {str(error.orig).strip()}") from None
        self.reserve.take()

    def commit(self, jobs: list[Job[Any]]) -> list[Any]:
        """Results of the jobs, or the exception of each that failed. Raises Superseded."""
        try:
            return self._transact(jobs)
        except Superseded:
            raise
        except Stopped:
            return [Unavailable("the gateway stops, and its database is away: send this again later")] * len(jobs)
        except Exception as error:
            if len(jobs) == 1:
                return [translate(error, self._engine.url)]
        # One bad job must not fail its neighbours.
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
                if is_full(error) and self.reserve.give_up():
                    continue
                if not is_lost(error):
                    raise
                logger.warning("%s is gone while %d writes wait: %s", self._name, len(jobs), error.orig)
                self._drop()
                is_repeated = True
        self._last_mark = number
        return results

    def _is_committed(self, connection: sa.Connection, number: int) -> bool:
        """Whether the transaction whose answer got lost was committed."""
        with connection.begin():
            return self._ownership.last_mark(connection) == number

    def _connect(self, give_up_at: float = math.inf) -> sa.Connection:
        """Connects and takes the state; waits without limit while another gateway has it."""
        said = ""
        while not self._stopped.is_set():
            try:
                connection = self._connection = self._connection or self._engine.connect()
                give_up_at = math.inf
                with connection.begin():
                    is_taken = self._ownership.take(connection)
                if is_taken:
                    if said:
                        logger.info("%s is ours", self._name)
                    return connection
                reason = "waiting until the gateway that has it ends"
            except sa.exc.DBAPIError as error:
                self._drop()
                reason = str(error.orig).strip()
                if not is_lost(error) or time.monotonic() > give_up_at:
                    raise Unavailable(f"{self._name} does not let us in: {reason}") from None
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
    """Runs jobs in their order: a future's outcome may come right behind its submission."""
    results: list[Any] = []
    for run, alike in groupby(jobs, lambda job: job.run if isinstance(job, Batched) else None):
        if run is None:
            results += [job(connection) for job in alike]
        else:
            results += run(connection, [job.item for job in alike if isinstance(job, Batched)])
    return results
