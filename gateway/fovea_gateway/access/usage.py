"""Usage of owners by key and day, and removal of old rows from the database.

Usage is added in the same transaction that stores an outcome, so that nothing is counted twice or lost.
"""

import dataclasses
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import sqlalchemy as sa

from fovea.runtime.durable import ExpiryClock
from fovea.wire.errors import InvalidInput
from fovea_gateway.access.quotas import Quota
from fovea_gateway.access.scopes import asked_owner
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import (
    checkpoints,
    copies,
    custom_losses,
    journal,
    live_curves,
    models,
    sampling_sessions,
    sessions,
    snapshots,
    usage,
)

logger = logging.getLogger(__name__)

MOST_TEXT_BYTES = 64 * 2**10
"""The limit on the total size of a client's texts that are stored with one thing, in a database row and in memory."""
_FRESH_S = 60.0
"""A session that ended less than this many seconds ago is retained: the gateway is still freeing it, and its client may
ask how it ended.
"""
_ROWS_PER_JOB = 500
_MOST_PAUSE_S = 3600.0
"""The longest pause between two searches for expired rows. Each search reads all rows of ended sessions."""
_DAY_S = 24 * 3600
_MOST_DAYS = 3660
ROW_BYTES = 1024
"""The assumed size of a row besides its texts, including its share of the indexes."""
_TEXTS: dict[sa.Table, tuple[str, ...]] = {
    sessions: ("tags", "user_metadata", "display_name", "request_key", "end_detail"),
    models: ("user_metadata",),
    sampling_sessions: ("model_path",),
    checkpoints: ("user_metadata",),
}
"""The columns that contain clients' texts, by table."""


@dataclass
class Usage:
    """The resources that a piece of work used.

    Attributes:
        trained_tokens: Tokens of losses with gradients.
        scored_tokens: Tokens of losses without gradients.
        prompt_tokens: Prompt tokens of samples, including cached ones.
        cached_tokens: Prompt tokens that a sampler had computed before.
        sampled_tokens: Generated tokens.
        gpu_seconds: The work's share, by tokens, of the time of the trainer and the samplers, times the number of their
            devices.
    """

    trained_tokens: int = 0
    scored_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    gpu_seconds: float = 0.0


FIGURES = tuple(each.name for each in dataclasses.fields(Usage))


class Used(NamedTuple):
    """Usage of one owner's key."""

    owner: str
    key_id: str
    usage: Usage


def day_of(at: float) -> str:
    """Returns a time's day in UTC, such as 2026-01-31."""
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def add_usage(connection: sa.Connection, all_used: Iterable[Used], at: float) -> None:
    """Adds usage to the rows of the UTC day that contains `at`, in seconds since the epoch."""
    sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0] * len(FIGURES))
    for owner, key_id, used in all_used:
        values = [getattr(used, name) for name in FIGURES]
        if any(values):
            sums[owner, key_id] = [a + b for a, b in zip(sums[owner, key_id], values, strict=True)]
    rows = [
        {"owner": owner, "key_id": key_id, "day": day_of(at)} | dict(zip(FIGURES, values, strict=True))
        for (owner, key_id), values in sorted(sums.items())
    ]
    if rows:
        connection.execute(_adding(connection.dialect.name), rows)


@cache
def _adding(dialect: str) -> sa.Insert:
    from sqlalchemy.dialects import postgresql, sqlite

    insert = postgresql.insert(usage) if dialect == "postgresql" else sqlite.insert(usage)
    added = {name: usage.c[name] + insert.excluded[name] for name in FIGURES}
    return insert.on_conflict_do_update(index_elements=["owner", "key_id", "day"], set_=added)


def read_usage(connection: sa.Connection, owner: str | None, days: int) -> dict[str, Any]:
    """Returns the usage of the last `days` days, including today, by owner, key and day; and each owner's stored bytes.

    Args:
        owner: None for all owners.
    """
    query = sa.select(usage).where(usage.c.day > day_of(time.time() - days * _DAY_S))
    stored = sa.select(checkpoints.c.owner, sa.func.sum(checkpoints.c.size_bytes)).group_by(checkpoints.c.owner)
    if owner is not None:
        query, stored = query.where(usage.c.owner == owner), stored.where(checkpoints.c.owner == owner)
    rows = connection.execute(query.order_by(usage.c.day, usage.c.owner, usage.c.key_id)).mappings()
    return {
        "usage": [dict(row) for row in rows],
        "stored_bytes": {name: int(size_bytes) for name, size_bytes in connection.execute(stored)},
    }


async def usage_for(database: Database, asked: str, days: int) -> dict[str, Any]:
    """Returns the usage that the caller asked for. An empty `asked` means the caller's own; `*` means all owners.

    Raises PermissionDenied for the usage of another owner if the caller lacks the scope admin.
    """
    owner = asked_owner(asked, "usage")
    return await database.read(lambda connection: read_usage(connection, owner, min(days, _MOST_DAYS)))


def stored_bytes(connection: sa.Connection, owner: str) -> int:
    """Returns the total bytes of an owner's checkpoints, and of its texts in the database."""
    found: int = read_usage(connection, owner, 0)["stored_bytes"].get(owner, 0)
    return found + row_bytes(connection, owner, overhead=0)[owner]


def row_bytes(connection: sa.Connection, owner: str | None = None, overhead: int = ROW_BYTES) -> Counter[str]:
    """Returns the bytes of rows of sessions, models, sampling sessions and checkpoints, by owner.

    Args:
        owner: Counts only this owner's rows; None for all owners.
        overhead: Bytes to add for each row besides its texts.
    """
    sums: Counter[str] = Counter()
    for table, columns in _TEXTS.items():
        size: Any = sa.literal(overhead)
        for name in columns:
            size += sa.func.coalesce(sa.func.length(sa.cast(table.c[name], sa.Text)), 0)
        query = sa.select(table.c.owner, sa.func.sum(size)).group_by(table.c.owner)
        for name, total in connection.execute(query if owner is None else query.where(table.c.owner == owner)):
            sums[name] += int(total)
    return sums


class KeptRows:
    """Accounting and removal of the rows of sessions, models, sampling sessions and checkpoints.

    The bytes of the rows count against their owners. Rows of ended sessions and failed models that hold no checkpoint
    are deleted after `ttl_s`, or at once if their owner has more than its share.

    Args:
        capacity_bytes: The limit for the rows of all owners; one owner may have as much as is free.
        ttl_s: Seconds for which the rows of an ended session or a failed model are retained.
        remove_folder: Removes the folder of a deleted model, which has no checkpoint any more.
    """

    def __init__(
        self,
        database: Database,
        capacity_bytes: int,
        ttl_s: float,
        clock: ExpiryClock,
        remove_folder: Callable[[str], Awaitable[None]],
    ) -> None:
        self._database, self._ttl_s, self._clock, self._remove_folder = database, ttl_s, clock, remove_folder
        self._quota = Quota("max_row_bytes", capacity_bytes, "bytes of rows")
        self._is_counted, self._next_at = False, 0.0

    def take(self, owner: str, texts: Mapping[str, Any]) -> None:
        """Counts a row that is about to be written.

        Raises InvalidInput for too much text, ResourceExhausted if the owner has no room left in its share of rows.
        """
        size_bytes = ROW_BYTES + check_text(texts)
        self._quota.check(owner, size_bytes)
        self._quota.take(owner, size_bytes)

    async def sweep(self) -> None:
        """Deletes expired rows, and ended ones of owners above their share. Recounts all rows if more than half is
        used.
        """
        if (now := self._clock.now()) >= self._next_at:
            while await self._forget(now - self._ttl_s):
                pass
            self._next_at = now + min(self._ttl_s / 10, _MOST_PAUSE_S)
        while not (self._is_counted and self._quota.is_half_free):
            held = await self._database.read(row_bytes)
            self._quota.reset(held)
            self._is_counted = True
            above = [owner for owner in held if self._quota.surplus(owner) > 0]
            before = self._clock.now() - _FRESH_S
            if not sum([await self._forget(before, owner) for owner in above]):
                return

    async def _forget(self, before: float, owner: str | None = None) -> int:
        """Deletes a batch of rows that ended before a time, of one owner or of all; returns the number of rows."""
        model_ids, count = await self._database.write(partial(forget_over, before=before, owner=owner))
        for model_id in model_ids:
            await self._remove_folder(model_id)
        if owner is not None:
            logger.warning(
                "owner %s has more bytes of rows than are free of max_row_bytes: %d of its ended sessions and models "
                "were deleted early",
                owner,
                count,
            )
        return count


def check_text(texts: Mapping[str, Any]) -> int:
    """Returns the total bytes, as JSON, of texts that a client stores with one record. Raises InvalidInput for too
    many.

    Args:
        texts: The texts by field name; empty ones count 0.
    """
    sizes = {field: len(json.dumps(value)) for field, value in texts.items() if value}
    if (total := sum(sizes.values())) > MOST_TEXT_BYTES:
        field = max(sizes, key=lambda name: sizes[name])
        others = f", {total} with {', '.join(name for name in sizes if name != field)}" if len(sizes) > 1 else ""
        raise InvalidInput(
            f"{field} has {sizes[field]} bytes as JSON{others}; at most {MOST_TEXT_BYTES} are stored: shorten it",
            field=field,
        )
    return total


def forget_over(connection: sa.Connection, before: float, owner: str | None) -> tuple[list[str], int]:
    """Deletes a batch of ended sessions and failed models, the oldest first.

    A session is deleted if it ended before the time `before` and has no checkpoint, no model that is ready or being
    created, no journal entry and no custom loss. A failed model is deleted if its last request came before that time
    and it has no checkpoint. All that belongs to them is deleted too.

    Returns the ids of the models, and how many rows of sessions and models were deleted.
    """
    has_checkpoint = sa.exists().where(checkpoints.c.model_id == models.c.model_id)
    of_session = models.c.session_id == sessions.c.session_id
    is_in_use = sa.exists().where(of_session & (models.c.state.in_(["creating", "ready"]) | has_checkpoint))
    keeps = [sa.exists().where(table.c.session_id == sessions.c.session_id) for table in (journal, custom_losses)]
    ended = sa.select(sessions.c.session_id).where(sessions.c.ended_at < before, ~sa.or_(is_in_use, *keeps))
    failed = sa.select(models.c.model_id).where(
        models.c.state == "failed", models.c.last_request_at < before, ~has_checkpoint
    )
    if owner is not None:
        ended, failed = ended.where(sessions.c.owner == owner), failed.where(models.c.owner == owner)
    gone = list(connection.scalars(ended.order_by(sessions.c.ended_at).limit(_ROWS_PER_JOB)))
    own = sa.select(models.c.model_id).where(models.c.session_id.in_(gone))
    model_ids = list(connection.scalars(failed.order_by(models.c.last_request_at).limit(_ROWS_PER_JOB)))
    model_ids += [model_id for model_id in connection.scalars(own) if model_id not in model_ids]
    for table in (snapshots, copies, live_curves, models):
        connection.execute(sa.delete(table).where(table.c.model_id.in_(model_ids)))
    for table in (sampling_sessions, sessions):
        connection.execute(sa.delete(table).where(table.c.session_id.in_(gone)))
    return model_ids, len(model_ids) + len(gone)
