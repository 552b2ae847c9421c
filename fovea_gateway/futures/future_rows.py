"""Rows of futures and their blobs."""

from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.sql.dml import ReturningInsert

from fovea_gateway.access.usage import Used, add_usage
from fovea_gateway.database.schema import future_requests, future_results, futures
from fovea_gateway.database.sql_engine import insertion
from fovea_gateway.futures.future import UNFINISHED, Kind, Outcome, Pending, State, Submission, error_from_blob

_IDS_PER_STATEMENT = 500
_ROWS_PER_DROP = 5000
# Built once: building one takes SQLAlchemy longer than SQLite takes to run it, and every request runs these.
_UPDATE = sa.update(futures).where(futures.c.future_id == sa.bindparam("key"))
_KEEP_REQUEST = sa.insert(future_requests)
_DROP_REQUEST = sa.delete(future_requests).where(future_requests.c.future_id == sa.bindparam("key"))


class StoredFuture(NamedTuple):
    """A row, with its outcome if that is still kept."""

    owner: str
    state: State
    outcome: Outcome | None


class Accepted(NamedTuple):
    """Work to be kept; of a rejected one `request` holds the status."""

    submission: Submission
    state: State
    request: bytes


class Finished(NamedTuple):
    """How a future ended. `number` rises from one finished future to the next."""

    future_id: str
    outcome: Outcome
    finished_at: float
    number: int
    used: Used | None = None


def insert(connection: sa.Connection, accepted: list[Accepted]) -> list[bool]:
    """Keeps submissions; False for one whose id is taken, which leaves everything as it was."""
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
    """Notes that work began whose effect cannot be undone by running it again."""
    connection.execute(_UPDATE, {"key": future_id, "state": State.RUNNING.value})


def finish(connection: sa.Connection, finished: list[Finished]) -> list[None]:
    """Keeps outcomes and drops the requests."""
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
    """A finished or unfinished future by id."""
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
    """The request of an unfinished future."""
    query = sa.select(future_requests.c.request).where(future_requests.c.future_id == future_id)
    blob: bytes = (connection.execute(query)).scalar_one()
    return blob


def unfinished(connection: sa.Connection) -> list[Pending]:
    """Everything that has not ended, oldest first, requests left in the database."""
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
    """The highest number of a finished future, 0 if there is none."""
    return connection.execute(sa.select(sa.func.max(futures.c.finish_number))).scalar() or 0


def drop_fetched(connection: sa.Connection, scope: str, future_ids: list[str]) -> None:
    """Drops results of one scope that were fetched for good, so that fetching them again answers 'expired'."""
    ours = sa.select(futures.c.future_id).where(futures.c.scope == scope)
    for start in range(0, len(future_ids), _IDS_PER_STATEMENT):
        named = future_results.c.future_id.in_(future_ids[start : start + _IDS_PER_STATEMENT])
        connection.execute(sa.delete(future_results).where(named & future_results.c.future_id.in_(ours)))


def drop_results(connection: sa.Connection, since: float, before: float) -> tuple[float, int]:
    """Drops results of futures that finished in a span of time, so that fetching them answers 'expired'.

    Returns until when, which is earlier than `before` if there are many, and how many.
    """
    until = _part(connection, since, before)
    return until, connection.execute(_dropping(since, until)).rowcount


def result_bytes(connection: sa.Connection) -> dict[str, int]:
    """What is kept of results, by owner."""
    joined = futures.join(future_results, futures.c.future_id == future_results.c.future_id)
    query = sa.select(futures.c.owner, sa.func.sum(sa.func.length(future_results.c.result))).select_from(joined)
    return {owner: int(size) for owner, size in connection.execute(query.group_by(futures.c.owner))}


def drop_oldest(connection: sa.Connection, owner: str, least_bytes: int) -> dict[str, int]:
    """Drops results of an owner, those that finished first, until they come to so many bytes, or to a part of them;
    returns their sizes by future id.
    """
    joined = futures.join(future_results, futures.c.future_id == future_results.c.future_id)
    query = sa.select(futures.c.future_id, sa.func.length(future_results.c.result)).select_from(joined)
    oldest = query.where(futures.c.owner == owner).order_by(futures.c.finish_number).limit(_ROWS_PER_DROP)
    found: dict[str, int] = {}
    for future_id, size_bytes in connection.execute(oldest):
        if least_bytes <= 0:
            break
        found[future_id] = size_bytes
        least_bytes -= size_bytes
    named = list(found)
    for start in range(0, len(named), _IDS_PER_STATEMENT):
        part = future_results.c.future_id.in_(named[start : start + _IDS_PER_STATEMENT])
        connection.execute(sa.delete(future_results).where(part))
    return found


def drop_rows(connection: sa.Connection, since: float, before: float) -> tuple[float, int]:
    """Forgets that futures which finished in a span of time ever were. Returns as above."""
    until = _part(connection, since, before)
    connection.execute(_dropping(since, until))
    return until, connection.execute(sa.delete(futures).where(_finished(since, until))).rowcount


def _finished(since: float, until: float) -> sa.ColumnElement[bool]:
    return (futures.c.finished_at >= since) & (futures.c.finished_at < until)


def _dropping(since: float, until: float) -> sa.Delete:
    old = sa.select(futures.c.future_id).where(_finished(since, until))
    return sa.delete(future_results).where(future_results.c.future_id.in_(old))


def _part(connection: sa.Connection, since: float, before: float) -> float:
    """The end of a span with about _ROWS_PER_DROP futures: others wait for the one connection that writes."""
    query = sa.select(futures.c.finished_at).where(_finished(since, before)).order_by(futures.c.finished_at)
    last: float | None = connection.execute(query.offset(_ROWS_PER_DROP).limit(1)).scalar()
    return before if last is None or last <= since else last
