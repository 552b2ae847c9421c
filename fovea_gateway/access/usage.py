"""What owners have used, by key and day: added in the transactions that keep outcomes, so that nothing counts twice or
is forgotten.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import checkpoints, usage
from fovea_gateway.scopes import asked_owner

_DAY_S = 24 * 3600
_MOST_DAYS = 3660


@dataclass
class Usage:
    """What work used.

    Attributes:
        trained_tokens: Of losses with gradients.
        scored_tokens: Of losses without.
        prompt_tokens: Of samples, cached ones among them.
        cached_tokens: Those that a sampler had computed before.
        sampled_tokens: New ones.
        gpu_seconds: The work's part of the time of trainer and samplers, by tokens, for each of their devices.
    """

    trained_tokens: int = 0
    scored_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    gpu_seconds: float = 0.0


FIGURES = tuple(each.name for each in dataclasses.fields(Usage))


class Used(NamedTuple):
    """Who used what."""

    owner: str
    key_id: str
    usage: Usage


def day_of(at: float) -> str:
    """A day in UTC, such as 2026-01-31."""
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def add_usage(connection: sa.Connection, all_used: Iterable[Used], at: float) -> None:
    """Adds to the rows of a day."""
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
    """Usage of the last days, today among them, by owner, key and day; and the bytes that each owner has stored.

    Args:
        owner: None for all.
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
    """What the caller is told who asked about an owner: nobody named is the caller, `*` is everybody.

    Raises PermissionDenied for somebody else's without the scope admin.
    """
    owner = asked_owner(asked, "usage")
    return await database.read(lambda connection: read_usage(connection, owner, min(days, _MOST_DAYS)))


def stored_bytes(connection: sa.Connection, owner: str) -> int:
    """The bytes of an owner's checkpoints together."""
    found: int = read_usage(connection, owner, 0)["stored_bytes"].get(owner, 0)
    return found
