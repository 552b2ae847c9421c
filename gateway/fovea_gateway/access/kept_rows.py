"""The bytes of database rows: of clients' texts, and of results. Old rows are removed."""

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import sqlalchemy as sa

from fovea.runtime.durable import ExpiryClock
from fovea.wire.errors import InvalidInput
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.access.owners import Quota, read_usage
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import (
    checkpoints,
    copies,
    custom_losses,
    future_results,
    futures,
    journal,
    live_curves,
    models,
    recorded_sequences,
    recordings,
    run_labels,
    sampling_sessions,
    session_projects,
    sessions,
    snapshots,
)

logger = logging.getLogger(__name__)

MOST_TEXT_BYTES = 64 * 2**10
"""The limit on the total size of a client's texts that are stored with one thing, in a database row and in memory."""
_FRESH_S = 60.0
"""A session that ended less than this many seconds ago is retained: the gateway is still freeing it, and its client may
ask how it ended.
"""
_ROWS_PER_JOB = 500
_RESULTS_PER_JOB = 5000
_MOST_PAUSE_S = 3600.0
"""The longest pause between two searches for expired rows. Each search reads all rows of ended sessions."""
ROW_BYTES = 1024
"""The assumed size of a row besides its texts, including its share of the indexes."""
_TEXTS: dict[sa.Table, tuple[str, ...]] = {
    sessions: ("tags", "user_metadata", "display_name", "request_key", "end_detail"),
    session_projects: ("project_id",),
    models: ("user_metadata",),
    run_labels: ("name", "notes", "tags"),
    sampling_sessions: ("model_path",),
    checkpoints: ("user_metadata",),
}
"""The columns that contain clients' texts, by table."""


def stored_bytes(connection: sa.Connection, owner: str) -> int:
    """Returns the total bytes of an owner's checkpoints, and of its texts and recorded samples in the database."""
    found: int = read_usage(connection, owner, 0)["stored_bytes"].get(owner, 0)
    return found + row_bytes(connection, owner, overhead=0)[owner] + recorded_bytes(connection, owner)[owner]


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


def recorded_bytes(connection: sa.Connection, owner: str | None = None) -> Counter[str]:
    """Returns the bytes of recorded samples, by owner. None counts those of all owners."""
    query = sa.select(recordings.c.owner, sa.func.sum(recordings.c.size_bytes)).group_by(recordings.c.owner)
    rows = connection.execute(query if owner is None else query.where(recordings.c.owner == owner))
    return Counter({name: int(total) for name, total in rows})


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
                "owner %s has more rows than are left of max_row_bytes: %d of its ended sessions and models "
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
    for table in (snapshots, copies, live_curves, run_labels, models):
        connection.execute(sa.delete(table).where(table.c.model_id.in_(model_ids)))
    recorded = sa.select(recordings.c.future_id).where(recordings.c.session_id.in_(gone))
    connection.execute(sa.delete(recorded_sequences).where(recorded_sequences.c.future_id.in_(recorded)))
    for table in (recordings, sampling_sessions, session_projects, sessions):
        connection.execute(sa.delete(table).where(table.c.session_id.in_(gone)))
    return model_ids, len(model_ids) + len(gone)


class ResultRoom:
    """The limit of stored results. If an owner exceeds its share, its oldest results expire early.

    No request is refused for this reason: waiting clients receive a result when it arrives, and older results have been
    fetched already, except those of clients that are away.

    Args:
        capacity_bytes: The limit for all stored results together.
    """

    def __init__(self, database: Database, capacity_bytes: int) -> None:
        self._database, self._capacity_bytes = database, capacity_bytes
        self._counted_bytes, self._counted_at = capacity_bytes, 0  # Assume a full store until the first count.

    async def bound(self, kept_bytes: int) -> list[str]:
        """Deletes results above the owners' shares and returns the ids of their futures.

        Counts the stored bytes only if enough results may have accumulated since the last count.

        Args:
            kept_bytes: The bytes of all results that this process has ever stored.
        """
        if self._counted_bytes + kept_bytes - self._counted_at <= self._capacity_bytes // 2:
            return []  # No owner can have more than is free.
        held = Counter(await self._database.read(result_bytes))
        dropped: list[str] = []
        for owner, size_bytes in held.most_common():
            total_bytes = held.total()
            surplus = (size_bytes + total_bytes - self._capacity_bytes + 1) // 2
            if surplus <= 0:
                break
            found = await self._database.write(partial(drop_oldest, owner=owner, least_bytes=surplus))
            held[owner] -= sum(found.values())
            dropped += found
            logger.warning(
                "owner %s stored %d bytes of results, more than are left of max_result_bytes (%d): its oldest %d "
                "are deleted",
                owner,
                size_bytes,
                max(self._capacity_bytes - total_bytes, 0),
                len(found),
            )
        self._counted_bytes, self._counted_at = held.total(), kept_bytes
        metrics.RESULT_BYTES.set(held.total())
        return dropped


def result_bytes(connection: sa.Connection) -> dict[str, int]:
    """Returns the bytes of stored results by owner."""
    joined = futures.join(future_results, futures.c.future_id == future_results.c.future_id)
    query = sa.select(futures.c.owner, sa.func.sum(sa.func.length(future_results.c.result))).select_from(joined)
    return {owner: int(size) for owner, size in connection.execute(query.group_by(futures.c.owner))}


def drop_oldest(connection: sa.Connection, owner: str, least_bytes: int) -> dict[str, int]:
    """Deletes an owner's oldest results until `least_bytes` are free or a limited number is deleted.

    Returns the sizes of the deleted results by future id.
    """
    joined = futures.join(future_results, futures.c.future_id == future_results.c.future_id)
    query = sa.select(futures.c.future_id, sa.func.length(future_results.c.result)).select_from(joined)
    oldest = query.where(futures.c.owner == owner).order_by(futures.c.finish_number).limit(_RESULTS_PER_JOB)
    found: dict[str, int] = {}
    for future_id, size_bytes in connection.execute(oldest):
        if least_bytes <= 0:
            break
        found[future_id] = size_bytes
        least_bytes -= size_bytes
    named = list(found)
    for start in range(0, len(named), _ROWS_PER_JOB):
        part = future_results.c.future_id.in_(named[start : start + _ROWS_PER_JOB])
        connection.execute(sa.delete(future_results).where(part))
    return found
