"""The audit log: which key did what to which object, when, and how that ended.

Every REST route and every gRPC method that changes something has an event in `EVENTS`. Entries of `_EVENTS_AT_ONCE`
are in the database before the answer is sent. Repeated work and refused requests are counted: requests with the same
key, object and outcome share one entry an hour, which is written within seconds.
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, date, datetime, timedelta
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import sqlalchemy as sa

from fovea.runtime.durable import ExpiryClock
from fovea.wire.errors import FoveaError, Internal, InvalidInput, similar
from fovea_gateway.access.api_keys import Key
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import audit_entries as entries

logger = logging.getLogger(__name__)

OK = "ok"
"""The outcome of a request that was accepted. Otherwise the outcome is the reason of its error."""
ENTRY_BYTES = 512
"""The assumed size of an entry, including its share of the indexes."""
MOST_LISTED = 10_000
_TTL_S = 90 * 86400.0
_HOUR_S = 3600
_MOST_PENDING = 10_000
_MOST_OBJECT_LETTERS = 200
_MOST_VALUE_LETTERS = 100
_ROWS_PER_JOB = 5000
_UNPRINTABLE = re.compile(r"[^ -~]")
_CHECKPOINT = "training_runs/{run}/checkpoints/{segment}/{name}"
_UNTYPED = "training_runs/{run}/checkpoints/{name}"

_EVENTS_AT_ONCE: dict[str, tuple[str, ...]] = {
    "session_create": ("POST create_session", "CreateSession"),
    "session_finish": ("POST sessions/{session_id}/finish", "FinishSession"),
    "project_assign": ("PUT sessions/{session_id}/project",),
    "run_label_set": ("PUT live/runs/{run}",),
    "checkpoint_delete": (f"DELETE {_CHECKPOINT}", f"DELETE {_UNTYPED}"),
    "checkpoint_ttl_set": (f"PUT {_CHECKPOINT}/ttl", f"PUT {_UNTYPED}/ttl"),
    "checkpoint_publish": (f"POST {_CHECKPOINT}/publish", f"POST {_UNTYPED}/publish"),
    "checkpoint_unpublish": (f"DELETE {_CHECKPOINT}/publish",),
    "checkpoint_copy": ("POST copy_weights",),
    "checkpoint_read": (f"GET {_CHECKPOINT}/external_weights_urls",),
    "checkpoint_upload_start": ("POST external_weights_upload_start",),
    "checkpoint_upload": ("PUT uploads/{upload}/{file}",),
    "checkpoint_upload_finish": ("POST external_weights_upload_finish",),
    "key_create": ("POST keys", "CreateKey"),
    "key_revoke": ("DELETE keys/{key_id}", "RevokeKey"),
    "key_expiry_set": ("PUT keys/{key_id}/expiry", "ExpireKey"),
    "owner_set": ("PUT owners/{owner}", "PutOwner"),
    "sign_in": ("GET auth/callback",),
    "sign_out": ("POST auth/logout",),
}
_WORK: dict[str, tuple[str, ...]] = {
    "model_create": ("POST create_model", "SubmitCreateModel"),
    "model_forward_backward": ("POST forward_backward", "SubmitForwardBackward"),
    "model_optim_step": ("POST optim_step", "SubmitOptimStep"),
    "model_report": ("POST live/reports",),
    "checkpoint_save": ("POST save_weights", "SubmitSaveState"),
    "checkpoint_save_for_sampler": ("POST save_weights_for_sampler", "SubmitSaveForSampler"),
    "checkpoint_save_external": ("POST save_weights_external", "SubmitSaveExternal"),
    "checkpoint_load": ("POST load_weights", "SubmitLoadState"),
    "loss_create": ("POST create_custom_loss", "CreateCustomLoss"),
    "image_upload": ("UploadImage",),
    "sampler_create": ("POST create_sampling_session", "CreateSamplingSession"),
    "sampler_join": ("POST join_sampling_session",),
    "sample_create": (
        "POST asample", "SampleTokens", "POST chat/completions", "POST completions", "POST responses", "POST messages"
    ),
    "sample_cancel": ("POST cancel_future",),
    "token_create": ("POST auth/token",),
}  # fmt: skip
"""Events that clients cause again and again."""

EVENTS: dict[str, str] = {
    route: event for events in (_EVENTS_AT_ONCE, _WORK) for event, routes in events.items() for route in routes
}
"""The event of each REST route ("METHOD path") and gRPC method."""
DRAIN = "trainer_drain"
"""The event of `fovea drain`, which has no route."""
_NAMES = sorted({*EVENTS.values(), DRAIN})
SINGLE = frozenset((event, OK) for event in (*_EVENTS_AT_ONCE, DRAIN))
"""Pairs of event and outcome with an entry for each action. Other actions share one entry an hour, with a count."""
UNLOGGED = frozenset(
    "POST retrieve_future,POST retrieve_futures,POST session_heartbeat,POST telemetry,POST client/config,"
    "POST client/dynamic_config,POST get_info,POST weights_info,POST checkpoints/search,POST sessions/search,"
    "DELETE auth/apikey/me,"
    "GetCapabilities,Heartbeat,GetModel,WaitFuture,GetUsage,ListParkedSessions,ListKeys,ListOwners".split(",")
)
"""Routes and methods without an entry although they are not GET: they look things up, or clients repeat them by
themselves.
"""
_RESOURCES = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    "teams": (),
    "organizations": ("key_", "owner_", "sign_", "token_", "trainer_"),
}
"""The prefixes of events by the `event_type` of the SDK. Fovea has no teams."""
SEARCHED = ("owner", "key_id", "event", "object_id", "outcome")
VALUES: ContextVar[Mapping[str, Any]] = ContextVar("new_values", default=MappingProxyType({}))
"""The values that the object of this request has now, for the entry of a change that succeeds."""


class Action(NamedTuple):
    """Something that a key did.

    Attributes:
        object_id: The object's id, or the names in the request that lead to it.
        outcome: `ok`, or the reason of the error.
        new_values: The object's values after the change, as `encode` returns them; empty without any.
    """

    owner: str
    key_id: str
    event: str
    route: str
    object_id: str
    outcome: str
    new_values: str = ""

    def row(self, at: float, count: int) -> dict[str, Any]:
        """Returns a database row for `count` such actions."""
        object_id = _UNPRINTABLE.sub("?", self.object_id)[:_MOST_OBJECT_LETTERS]
        values = self._replace(object_id=object_id)._asdict()
        name = secrets.token_hex(12)
        if (self.event, self.outcome) not in SINGLE:
            name = hashlib.sha256("\0".join((str(int(at) // _HOUR_S), *values.values())).encode()).hexdigest()[:24]
        return values | {"entry_id": name, "at": at, "until": at, "count": count}


class Question(NamedTuple):
    """A search of the log.

    Attributes:
        first, last: UTC days, both included.
        event_type: A key of `_RESOURCES`.
        values: The exact values of columns in `SEARCHED`.
    """

    first: date
    last: date
    event_type: str
    values: Mapping[str, str]


def key_values(key: Key) -> dict[str, Any]:
    """Returns the values that an entry has of a key."""
    return {"owner": key.owner, "name": key.name, "scope": key.scope.value, "expires_at": key.expires_at}


def note_key(key: Key) -> Key:
    """Notes a key's values for the entry of this request; returns the key."""
    VALUES.set(key_values(key))
    return key


def encode(values: Mapping[str, Any]) -> str:
    """Returns values as JSON: numbers and None as they are, anything else as a text that is cut to 100 letters."""

    def short(value: Any) -> Any:
        text = ", ".join(value) if isinstance(value, list) else str(value)
        is_number = isinstance(value, int | float) and abs(value) < math.inf
        return value if value is None or is_number else text[:_MOST_VALUE_LETTERS]

    return json.dumps({name: short(value) for name, value in values.items()}) if values else ""


def show_values(text: str) -> str:
    """Returns such values as a line of `name=value`."""
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in json.loads(text or "{}").items())


def check_event(route: str) -> None:
    """Raises Internal if a route or method has neither an event nor a place in `UNLOGGED`."""
    if route not in EVENTS and route not in UNLOGGED:
        raise Internal(f"{route} has no event: add it to EVENTS or UNLOGGED of fovea_gateway/access/audit_log.py")


def question_of(query: Mapping[str, str], days: int) -> Question:
    """Reads a search from a query string; the days end with `day`, which is today by default. Raises InvalidInput."""
    event_type, day = query.get("event_type", "all"), query.get("day", "")
    if event_type not in _RESOURCES:
        raise InvalidInput(
            f"event_type is {event_type[:40]!r}; it must be one of {', '.join(_RESOURCES)}", field="event_type"
        )
    if (event := query.get("event")) is not None and event not in _NAMES:
        words = similar(event, _NAMES) or f"; the events are {', '.join(_NAMES)}"
        raise InvalidInput(f"there is no event {event[:40]!r}{words}", field="event")
    most = int(_TTL_S / 86400)
    if not 1 <= days <= most:
        raise InvalidInput(f"days is {days}; it must be 1 .. {most}", field="days")
    try:
        last = date.fromisoformat(day) if day else datetime.now(UTC).date()
        first = last - timedelta(days - 1)
        _midnight(last + timedelta(1))
    except (ValueError, OverflowError):
        raise InvalidInput(f"day is {day[:40]!r}; it must be a date such as 2026-01-31", field="day") from None
    return Question(first, last, event_type, {name: query[name] for name in SEARCHED if name in query})


class AuditLog:
    """The entries of all owners.

    An entry is deleted after 90 days. When the entries of an owner exceed its share of `capacity_bytes`, its oldest
    ones are deleted.

    Attributes:
        pending: Counted actions that are not in the database yet.
    """

    def __init__(self, database: Database, capacity_bytes: int, clock: ExpiryClock) -> None:
        self._database, self._clock, self._most = database, clock, capacity_bytes // ENTRY_BYTES
        self._held: Counter[str] | None = None  # entries by owner, and repeated work counts again
        self._flushing = asyncio.Lock()
        self.pending: Counter[Action] = Counter()

    async def write(self, action: Action) -> None:
        """Writes an entry at once; if the database cannot take it, the next `flush` does."""
        try:
            await self._write(Counter({action: 1}))
        except FoveaError as error:
            logger.warning("the audit entry of %s by %s is written later: %s", action.event, action.owner, error)
            self.pending[action] += 1

    async def flush(self) -> None:
        """Writes the counted actions."""
        async with self._flushing:
            taken, self.pending = self.pending, Counter()
            try:
                if taken:
                    await self._write(taken)
            except BaseException:
                for action, count in taken.items():
                    # Without their objects, actions are few.
                    kept = action if len(self.pending) < _MOST_PENDING else action._replace(object_id="", new_values="")
                    self.pending[kept] += count
                raise

    async def _write(self, actions: Counter[Action]) -> None:
        at = time.time()
        rows = [action.row(at, count) for action, count in actions.items()]
        await self._database.write(lambda connection: put_entries(connection, rows))
        if self._held is not None:
            self._held.update(row["owner"] for row in rows)

    async def sweep(self) -> None:
        """Deletes expired entries, and the oldest ones of owners above their share."""
        before = self._clock.now() - _TTL_S
        while await self._database.write(lambda connection: delete_oldest(connection, None, before)):
            self._held = None
        if self._held is None or self._held.total() > self._most // 2:  # otherwise no owner has more than is free
            self._held = await self._database.read(entry_counts)
        held = self._held
        for owner, count in held.most_common():
            surplus = (count + held.total() - self._most + 1) // 2
            if surplus <= 0:
                return
            held[owner] -= await self._database.write(partial(delete_oldest, owner=owner, before=None, count=surplus))
            logger.warning(
                "owner %s has more audit entries than are left of max_row_bytes: its oldest %d are deleted",
                owner,
                surplus,
            )

    async def count(self, question: Question) -> int:
        """Returns the number of entries that match."""
        query = sa.select(sa.func.count()).select_from(entries).where(_where(question))
        return await self._database.read_whole(lambda connection: int(connection.execute(query).scalar_one()))

    async def page(self, question: Question, limit: int, offset: int) -> list[dict[str, Any]]:
        """Returns a page of the entries that match, oldest first, as the SDK reads them."""
        query = _oldest_first(question).limit(limit).offset(offset)
        return await self._database.read_whole(
            lambda connection: [entry_of(row) for row in connection.execute(query).mappings()]
        )


def read_entries(connection: sa.Connection, question: Question, most: int) -> list[sa.RowMapping]:
    """Returns the newest `most` entries that match, oldest first."""
    count = connection.scalar(sa.select(sa.func.count()).select_from(entries).where(_where(question))) or 0
    query = _oldest_first(question).offset(max(0, count - most))
    return list(connection.execute(query).mappings())


def put_entries(connection: sa.Connection, rows: list[dict[str, Any]], schema: str | None = None) -> None:
    """Writes entries, into the table of this schema; one that exists already counts more."""
    options = {"schema_translate_map": {None: schema}}
    connection.execute(_adding(connection.dialect.name), rows, execution_options=options)


def delete_oldest(
    connection: sa.Connection, owner: str | None, before: float | None, count: int = _ROWS_PER_JOB
) -> int:
    """Deletes at most `count` entries, the oldest first; returns their number.

    Args:
        owner: Deletes only this owner's; None for all.
        before: Deletes only entries from before this time, in seconds since the epoch; None for all.
    """
    found = sa.select(entries.c.entry_id).order_by(entries.c.at).limit(count)
    if owner is not None:
        found = found.where(entries.c.owner == owner)
    if before is not None:
        found = found.where(entries.c.at < before)
    return connection.execute(sa.delete(entries).where(entries.c.entry_id.in_(found.scalar_subquery()))).rowcount


def entry_counts(connection: sa.Connection) -> Counter[str]:
    """Returns the number of entries by owner."""
    rows = connection.execute(sa.select(entries.c.owner, sa.func.count()).group_by(entries.c.owner))
    return Counter({owner: int(count) for owner, count in rows})


@cache
def _adding(dialect: str) -> sa.Insert:
    from sqlalchemy.dialects import postgresql, sqlite

    insert = postgresql.insert(entries) if dialect == "postgresql" else sqlite.insert(entries)
    more = {"count": entries.c.count + insert.excluded.count, "until": insert.excluded.until}
    return insert.on_conflict_do_update(index_elements=["entry_id"], set_=more)


def _oldest_first(question: Question) -> sa.Select[Any]:
    return sa.select(entries).where(_where(question)).order_by(entries.c.at, entries.c.entry_id)


def _where(question: Question) -> sa.ColumnElement[bool]:
    found = [
        entries.c.at >= _midnight(question.first),
        entries.c.at < _midnight(question.last + timedelta(1)),
        *(_is(name, value) for name, value in question.values.items()),
    ]
    prefixes = _RESOURCES[question.event_type]
    of_type = [entries.c.event.startswith(prefix, autoescape=True) for prefix in prefixes]
    return sa.and_(*found, sa.or_(sa.false(), *of_type))


def _is(name: str, value: str) -> sa.ColumnElement[bool]:
    """Returns the condition on a column. An object is found with what lies below it, as a run with its checkpoints."""
    column, is_equal = entries.c[name], entries.c[name] == value
    return sa.or_(is_equal, column.startswith(f"{value}/", autoescape=True)) if name == "object_id" else is_equal


def _midnight(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def entry_of(row: sa.RowMapping) -> dict[str, Any]:
    """Returns a row as an entry of `GET audit`."""
    details = {name: row[name] for name in ("owner", "key_id", "route", "object_id", "outcome", "count")}
    times = {name: datetime.fromtimestamp(row[name], UTC).isoformat() for name in ("at", "until")}
    values = {"new_values": json.loads(row["new_values"])} if row["new_values"] else {}
    return {
        "timestamp": times["at"],
        "event": row["event"],
        "event_details": details | {"until": times["until"]} | values,
    }
