"""Database rows of futures, their requests and their results; and logs of finished samples."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.sql.dml import ReturningInsert

from fovea_gateway.access.owners import Used, add_usage
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import future_requests, future_results, futures
from fovea_gateway.database.sql_engine import insertion
from fovea_gateway.sessions.future import UNFINISHED, Kind, Outcome, Pending, State, Submission, error_from_blob

_IDS_PER_STATEMENT = 500
_ROWS_PER_DROP = 5000
# Built once, because every request runs them: SQLAlchemy builds a statement more slowly than SQLite runs it.
_UPDATE = sa.update(futures).where(futures.c.future_id == sa.bindparam("key"))
_KEEP_REQUEST = sa.insert(future_requests)
_DROP_REQUEST = sa.delete(future_requests).where(future_requests.c.future_id == sa.bindparam("key"))


class StoredFuture(NamedTuple):
    """A row of a future, with its outcome unless the result has been dropped."""

    owner: str
    state: State
    outcome: Outcome | None


class Accepted(NamedTuple):
    """Work to be stored. `request` contains the status if the work is rejected."""

    submission: Submission
    state: State
    request: bytes


class Finished(NamedTuple):
    """An ended future. `number` increases from one ended future to the next."""

    future_id: str
    outcome: Outcome
    finished_at: float
    number: int
    used: Used | None = None


def insert(connection: sa.Connection, accepted: list[Accepted]) -> list[bool]:
    """Inserts submissions. Returns False for each id that was in use; such a submission changes nothing."""
    ids = [one.submission.future_id for one in accepted]
    new = set(connection.scalars(_adding(connection.dialect.name), [_row(one) for one in accepted]))
    requests = [
        {"future_id": future_id, "request": one.request}
        for future_id, one in zip(ids, accepted, strict=True)
        if future_id in new
    ]
    if requests:
        connection.execute(_KEEP_REQUEST, requests)
    return [future_id in new for future_id in ids]


@cache
def _adding(dialect: str) -> ReturningInsert[Any]:
    return insertion(dialect, futures).returning(futures.c.future_id)


def _row(accepted: Accepted) -> dict[str, Any]:
    submission = accepted.submission
    return {
        "future_id": submission.future_id,
        "kind": submission.kind.value,
        "owner": submission.owner,
        "session_id": submission.session_id,
        "scope": submission.scope,
        "seq_id": submission.seq_id,
        "state": accepted.state.value,
        "created_at": submission.created_at,
        "key_id": submission.key_id,
        "token_count": submission.token_count,
    }


def set_running(connection: sa.Connection, future_id: str) -> None:
    """Records the start of work that must not run twice."""
    connection.execute(_UPDATE, {"key": future_id, "state": State.RUNNING.value})


def finish(connection: sa.Connection, finished: list[Finished]) -> list[None]:
    """Stores outcomes and deletes the requests."""
    keeping = insertion(connection.dialect.name, future_results)
    ends = [
        {"key": future_id, "state": outcome.state.value, "finished_at": finished_at, "finish_number": number}
        for future_id, outcome, finished_at, number, _ in finished
    ]
    connection.execute(_UPDATE, ends)
    connection.execute(keeping, [{"future_id": one.future_id, "result": one.outcome.to_blob()} for one in finished])
    connection.execute(_DROP_REQUEST, [{"key": one.future_id} for one in finished])
    add_usage(connection, [one.used for one in finished if one.used is not None], finished[-1].finished_at)
    return [None] * len(finished)


def get(connection: sa.Connection, future_id: str) -> StoredFuture | None:
    """Returns a future by id, finished or not, or None."""
    row = (connection.execute(sa.select(futures).where(futures.c.future_id == future_id))).first()
    if row is None:
        return None
    state = State(row.state)
    if state in UNFINISHED:
        return StoredFuture(row.owner, state, None)
    query = sa.select(future_results.c.result).where(future_results.c.future_id == future_id)
    blob = (connection.execute(query)).scalar()
    outcome = None if blob is None else Outcome.from_blob(Kind(row.kind), state, blob)
    return StoredFuture(row.owner, state, outcome)


def get_request(connection: sa.Connection, future_id: str) -> bytes:
    """Returns the request of an unfinished future."""
    query = sa.select(future_requests.c.request).where(future_requests.c.future_id == future_id)
    blob: bytes = (connection.execute(query)).scalar_one()
    return blob


def unfinished(connection: sa.Connection) -> list[Pending]:
    """Returns all unfinished futures, oldest first. Their requests stay in the database."""
    states = [state.value for state in UNFINISHED]
    query = sa.select(futures).where(futures.c.state.in_(states)).order_by(futures.c.created_at)
    pendings = []
    for row in connection.execute(query):
        state = State(row.state)
        rejection = error_from_blob(get_request(connection, row.future_id)) if state is State.REJECTED else None
        submission = Submission(
            row.future_id, Kind(row.kind), row.owner, row.session_id, row.scope, row.seq_id,
            rejection=rejection, created_at=row.created_at, traceparent="", token_count=row.token_count,
            key_id=row.key_id,
        )  # fmt: skip
        pendings.append(Pending(submission, request=None, state=state))
    return pendings


def last_number(connection: sa.Connection) -> int:
    """Returns the highest number of a finished future, or 0."""
    return connection.execute(sa.select(sa.func.max(futures.c.finish_number))).scalar() or 0


def drop_fetched(connection: sa.Connection, scope: str, future_ids: list[str]) -> None:
    """Deletes acknowledged results of one scope. A later request for one of them is answered with "expired"."""
    ours = sa.select(futures.c.future_id).where(futures.c.scope == scope)
    for start in range(0, len(future_ids), _IDS_PER_STATEMENT):
        named = future_results.c.future_id.in_(future_ids[start : start + _IDS_PER_STATEMENT])
        connection.execute(sa.delete(future_results).where(named & future_results.c.future_id.in_(ours)))


def drop_results(connection: sa.Connection, since: float, before: float) -> tuple[float, int]:
    """Deletes results of futures that finished in a span of time, so that later requests are answered with "expired".

    Deletes a limited number per call. Returns the end of the span that was handled, at most `before`, and the count.
    """
    until = _part(connection, since, before)
    return until, connection.execute(_dropping(since, until)).rowcount


def drop_rows(connection: sa.Connection, since: float, before: float) -> tuple[float, int]:
    """Deletes futures that finished in a span of time with all their data. Returns as `drop_results` does."""
    until = _part(connection, since, before)
    connection.execute(_dropping(since, until))
    return until, connection.execute(sa.delete(futures).where(_finished(since, until))).rowcount


def _finished(since: float, until: float) -> sa.ColumnElement[bool]:
    return (futures.c.finished_at >= since) & (futures.c.finished_at < until)


def _dropping(since: float, until: float) -> sa.Delete:
    old = sa.select(futures.c.future_id).where(_finished(since, until))
    return sa.delete(future_results).where(future_results.c.future_id.in_(old))


def _part(connection: sa.Connection, since: float, before: float) -> float:
    """Returns the end of a span with about _ROWS_PER_DROP futures, since other writes wait for the same connection."""
    query = sa.select(futures.c.finished_at).where(_finished(since, before)).order_by(futures.c.finished_at)
    last: float | None = connection.execute(query.offset(_ROWS_PER_DROP).limit(1)).scalar()
    return before if last is None or last <= since else last


CLIENT_SPAN = 1_000_000_000
"""The number of seq_ids that each client of a sampling session has for its samples, by Tinker's protocol."""
_PAGE = 4096


class Target(NamedTuple):
    """One client of a sampling session. Client 0 is the one that opened the session."""

    sampling_session_id: str
    client: int

    @property
    def first_seq_id(self) -> int:
        """The first seq_id of the client's samples."""
        return self.client * CLIENT_SPAN

    @property
    def last_seq_id(self) -> int:
        """The last possible seq_id of the client's samples; fits into 64 bits."""
        return min(self.first_seq_id + CLIENT_SPAN - 1, 2**63 - 1)


class Completion(NamedTuple):
    """A sample that has ended. Completions are ordered by `number`; `size_bytes` is the size of the stored result."""

    number: int
    future_id: str
    is_failed: bool
    size_bytes: int


class _Log:
    """The completions of one target with numbers above `since`, in order. `since` is None until they have been read."""

    def __init__(self) -> None:
        self.since: int | None = None
        self.filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.grown = asyncio.Event()
        self._entries: dict[str, Completion] = {}

    def begin(self, after: int, reading: Coroutine[Any, Any, list[Completion]]) -> None:
        """Starts the log again with the completions that `reading` finds after a number."""
        self.since = after
        self.filled = asyncio.create_task(self._fill(reading), name="reading completions")

    async def _fill(self, reading: Coroutine[Any, Any, list[Completion]]) -> None:
        try:
            self.add(await reading)
        except BaseException:
            self.since = None
            raise

    def add(self, entries: Sequence[Completion]) -> None:
        """Adds entries, in any order."""
        if not entries:
            return
        is_later = not self._entries or entries[0].number > next(reversed(self._entries.values())).number
        self._entries.update((entry.future_id, entry) for entry in entries)
        if not is_later:
            self._entries = {entry.future_id: entry for entry in sorted(self._entries.values())}
        self.grown.set()

    def drop(self, future_ids: Sequence[str]) -> None:
        """Drops entries of deleted results."""
        for future_id in future_ids:
            self._entries.pop(future_id, None)

    def trim(self, until: int) -> None:
        """Drops the entries that the client has seen."""
        if self.since is not None and until > self.since:
            self.since = until
            seen = []
            for entry in self._entries.values():
                if entry.number > until:
                    break
                seen.append(entry.future_id)
            self.drop(seen)

    def page(self, after: int) -> list[Completion]:
        """Returns the first entries after a number, at most `_PAGE`."""
        found = []
        for entry in self._entries.values():
            if entry.number > after:
                found.append(entry)
                if len(found) == _PAGE:
                    break
        return found


class CompletionLogs:
    """The logs of all targets for which a client has asked.

    A client sends the last number that it has seen and receives the later completions. The database is authoritative;
    the logs in memory avoid repeated reads and wake waiting clients.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._logs: dict[Target, _Log] = {}
        self._is_closing = False

    def note(self, sampling_session_id: str, seq_id: int, completion: Completion) -> None:
        """Adds a completion that is in the database, and wakes the clients that wait for it."""
        log = self._logs.get(Target(sampling_session_id, seq_id // CLIENT_SPAN))
        if log is not None:
            log.add([completion])

    async def wait(self, target: Target, after: int, timeout_s: float) -> list[Completion]:
        """Returns the completions after a number, in order. If there are none, waits up to `timeout_s` for some."""
        log = self._logs.get(target)
        if log is None:
            log = self._logs[target] = _Log()
        if log.since is None or after < log.since:
            # Read through the writer: everything that finished before this log existed is then committed before the
            # read.
            log.begin(after, self._database.write(lambda connection: read_completions(connection, target, after)))
        await asyncio.shield(log.filled)
        log.trim(after)
        found = log.page(after)
        if not found and timeout_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not found and not self._is_closing:
                        log.grown.clear()
                        await log.grown.wait()
                        found = log.page(after)
        return found

    def drop(self, target: Target, future_ids: Sequence[str]) -> None:
        """Drops completions of results that the client has received."""
        log = self._logs.get(target)
        if log is not None:
            log.drop(future_ids)

    def forget(self, session_id: str) -> None:
        """Drops the logs of an ended session. Later requests are answered from the database."""
        self._logs = {
            target: log
            for target, log in self._logs.items()
            if not target.sampling_session_id.startswith(f"{session_id}:")
        }

    def release(self) -> None:
        self._is_closing = True
        for log in self._logs.values():
            log.grown.set()


def read_completions(connection: sa.Connection, target: Target, after: int) -> list[Completion]:
    """Returns the completions of a client after number `after` that it has not acknowledged, in order."""
    seq_id = futures.c.seq_id
    where = (futures.c.scope == target.sampling_session_id) & (futures.c.finish_number > after)
    where &= (seq_id >= target.first_seq_id) & (seq_id <= target.last_seq_id)
    columns = (futures.c.finish_number, futures.c.future_id, futures.c.state, sa.func.length(future_results.c.result))
    joined = futures.join(future_results, futures.c.future_id == future_results.c.future_id)
    query = sa.select(*columns).select_from(joined).where(where).order_by(futures.c.finish_number)
    return [
        Completion(number, future_id, state == State.FAILED.value, size)
        for number, future_id, state, size in connection.execute(query)
    ]
