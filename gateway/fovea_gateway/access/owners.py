"""Owners: the records that administrators write for them, their projects, their shares of what all owners use, and
their usage.

A project is a name for some of an owner's sessions, with their models and checkpoints. Its first session creates it.
Usage is added in the same transaction that stores an outcome, so that nothing is counted twice or lost.
"""

import asyncio
import dataclasses
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple

import sqlalchemy as sa

from fovea.wire.errors import InvalidInput, NotFound, ResourceExhausted
from fovea_gateway.access.api_keys import asked_owner, check_owner
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import checkpoints, models, owners, session_projects, usage
from fovea_gateway.database.sql_engine import insert_new

LOOK_S = 1.0
"""Seconds between two reads of the records, which a command may have changed."""
_MOST = 2**62
_DAY_S = 24 * 3600
_MOST_DAYS = 3660
_MOST_WEIGHT = 1000.0
DEFAULT_PROJECT = "default"
"""The project of sessions that name none."""
_PROJECT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


@dataclass(frozen=True)
class Owner:
    """One owner's record. An owner without a record has these defaults.

    A limit of 0 means that the owner has no limit of its own; the setting `default_limits` then applies.

    Attributes:
        weight: Its share of trainer, samplers and renderers, relative to the weights of all owners that use them at the
            same time.
        max_models: The maximum number of its models in the trainer at once.
        max_stored_bytes: The maximum total bytes of its checkpoints, unfinished uploads and stored texts. Once it is
            reached, nothing more is saved.
        max_tokens_in_flight: The maximum total of the tokens of its unfinished samples and losses.
        max_requests_per_s: The maximum average of requests per second; a burst may be as large as one second's worth.
            Polls and heartbeats do not count.
    """

    owner: str
    weight: float = 1.0
    max_models: int = 0
    max_stored_bytes: int = 0
    max_tokens_in_flight: int = 0
    max_requests_per_s: float = 0.0

    def checked(self) -> "Owner":
        """Returns the record itself. Raises InvalidInput if the name is invalid or a value is out of range."""
        try:
            check_owner(self.owner)
        except ValueError as error:
            raise InvalidInput(str(error), field="owner") from None
        if not 1 / _MOST_WEIGHT <= self.weight <= _MOST_WEIGHT:
            raise InvalidInput(f"weight is {self.weight}; it must be 0.001 .. 1000", field="weight")
        for name in LIMITS:
            if not 0 <= getattr(self, name) <= _MOST:
                raise InvalidInput(
                    f"{name} is {getattr(self, name)}; it must be 0 (the gateway's default limit) or more", field=name
                )
        return self

    def part(self, count: int) -> "Owner":
        """Returns the limits for the owner's work in one of `count` shards. Checkpoints are counted over all shards."""
        tokens, rate = -(-self.max_tokens_in_flight // count), self.max_requests_per_s / count
        return dataclasses.replace(self, max_tokens_in_flight=tokens, max_requests_per_s=rate)


FIELDS = tuple(each.name for each in dataclasses.fields(Owner) if each.name != "owner")
LIMITS = FIELDS[1:]


class _Bucket:
    """A token bucket of requests. It fills at the owner's rate and holds the requests of one second, at least one."""

    def __init__(self) -> None:
        self._level, self._at = float("inf"), 0.0

    def take(self, rate: float, now: float) -> bool:
        """Takes one request out of the bucket; returns False if it is empty."""
        self._level = min(self._level + (now - self._at) * rate, max(rate, 1.0))
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


class Owners:
    """The records of all owners, and the request rate of each.

    Args:
        limits: The limits for owners that have none of their own, keyed by the names in `LIMITS`.
        spread: Returns the number of shards in which an owner has work. None without shards.
    """

    def __init__(
        self,
        database: Database,
        limits: Mapping[str, float] | None = None,
        spread: Callable[[str], int] | None = None,
    ) -> None:
        self._database, self._spread = database, spread
        self._limits: dict[str, Any] = dict(limits or {})
        self._owners: dict[str, Owner] = {}
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Reads the records. Call it again to pick up the changes that commands make."""
        async with self._reading:  # because an earlier read that returns last would undo a change
            self._owners = {owner.owner: owner for owner in await self._database.read(all_owners)}

    def of(self, owner: str) -> Owner:
        """Returns an owner's record, with the default limits filled in, for this gateway's part of its work."""
        found = self._owners.get(owner) or Owner(owner)
        missing = {name: value for name, value in self._limits.items() if not getattr(found, name)}
        found = dataclasses.replace(found, **missing) if missing else found
        return found.part(self._spread(owner)) if self._spread is not None else found

    def weight(self, owner: str) -> float:
        """Returns an owner's weight."""
        found = self._owners.get(owner)
        return 1.0 if found is None else found.weight

    def listed(self) -> list[Owner]:
        """Returns all records, sorted by owner."""
        return sorted(self._owners.values(), key=lambda owner: owner.owner)

    async def put(self, owner: Owner) -> None:
        """Writes a record, which takes effect at once. Raises InvalidInput."""
        owner.checked()
        await self._database.write(lambda connection: put_owner(connection, owner))
        await self.read()

    def check_rate(self, owner: str, use: str = "") -> None:
        """Counts a request. Raises ResourceExhausted above the owner's rate; clients then send the request again.

        Args:
            use: The name of a separate bucket, so that requests of the live page do not use up the rate of training.
        """
        rate = self.of(owner).max_requests_per_s
        if rate and not self._buckets.setdefault((owner, use), _Bucket()).take(rate, time.monotonic()):
            raise exceeded("max_requests_per_s", rate, "it sent more requests")


class Quota:
    """A limit on things that all owners share. Each owner may hold at most as many as are still free.

    A single owner can therefore take half, and two owners a third each, so that some are always free for the next
    owner. This is the dynamic threshold by which switches share their buffers (Choudhury and Hahne, 1998). Nothing is
    reserved for owners that are absent.

    Args:
        setting: The name of the setting that contains the capacity.
        capacity: The total number of things.
        what: A plural noun for the things, for the error message.
    """

    def __init__(self, setting: str, capacity: int, what: str) -> None:
        self._setting, self._capacity, self._what = setting, capacity, what
        self._held: Counter[str] = Counter()
        self._total = 0

    def check(self, owner: str, count: int = 1) -> None:
        """Raises ResourceExhausted if the owner may not take `count` more."""
        free = self._capacity - self._total - (count - 1)
        if self._held[owner] + count > free:
            raise ResourceExhausted(
                f"this owner has {self._held[owner]} {self._what}, and all have {self._total} of {self._setting} "
                f"{self._capacity}: an owner may have as many as are free; send this request again later",
                limit=self._setting,
            )

    def take(self, owner: str, count: int = 1) -> None:
        """Records that the owner holds `count` more, without a check."""
        self._held[owner] += count
        self._total += count

    def give(self, owner: str, count: int = 1) -> None:
        """Records that the owner holds `count` less."""
        self._held[owner] -= count
        self._total -= count
        if not self._held[owner]:
            del self._held[owner]

    def reset(self, held: Mapping[str, int]) -> None:
        """Replaces all recorded counts."""
        self._held = Counter(held)
        self._total = sum(held.values())

    @property
    def is_half_free(self) -> bool:
        """Returns whether at most half of the capacity is in use, so that no owner can exceed its share."""
        return self._total <= self._capacity // 2

    def surplus(self, owner: str) -> int:
        """Returns the amount that an owner must give back to hold no more than is free then; 0 or less means none."""
        return (self._held[owner] + self._total - self._capacity + 1) // 2

    def holding(self, owner: str) -> "QuotaUse":
        """Returns a context manager. When it ends, it gives back the amount that `QuotaUse.take` took."""
        return QuotaUse(self, owner)


class QuotaUse:
    """The amount that one request of an owner holds."""

    def __init__(self, quota: Quota, owner: str) -> None:
        self._quota, self._owner, self._count = quota, owner, 0

    def take(self, count: int) -> None:
        """Takes `count` more. Raises ResourceExhausted if the owner may not have them."""
        self._quota.check(self._owner, count)
        self._quota.take(self._owner, count)
        self._count += count

    def __enter__(self) -> "QuotaUse":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._quota.give(self._owner, self._count)


def exceeded(limit: str, most: float, what: str) -> ResourceExhausted:
    """Returns the error for an owner that has reached a limit of its own."""
    return ResourceExhausted(
        f"this owner's {limit} is {most:g}, and {what}; send this request again later", limit=limit
    )


def all_owners(connection: sa.Connection) -> list[Owner]:
    """Returns all records."""
    return [Owner(**row) for row in connection.execute(sa.select(owners)).mappings()]


def put_owner(connection: sa.Connection, owner: Owner) -> None:
    """Writes a record, replacing the owner's earlier one."""
    values: dict[str, Any] = dataclasses.asdict(owner)
    if not insert_new(connection, owners, values):
        connection.execute(sa.update(owners).where(owners.c.owner == owner.owner).values(values))


def check_project(project_id: str, field: str = "project_id") -> str:
    """Returns the name of a project. Raises InvalidInput if it is not a valid name."""
    if not _PROJECT.fullmatch(project_id):
        raise InvalidInput(
            f"{field} is {project_id[:40]!r}; a project has 1 to 100 letters, digits or _ . -", field=field
        )
    return project_id


def put_project(connection: sa.Connection, owner: str, session_id: str, project_id: str) -> None:
    """Moves a session into a project."""
    own = session_projects.c.session_id == session_id
    connection.execute(sa.delete(session_projects).where(own))
    if project_id != DEFAULT_PROJECT:
        values = {"session_id": session_id, "owner": owner, "project_id": project_id}
        connection.execute(sa.insert(session_projects).values(values))


def in_projects(session_id: sa.ColumnElement[str], project_ids: Collection[str]) -> sa.ColumnElement[bool]:
    """Returns the condition that a session is in one of the projects."""
    own = session_projects.c.session_id == session_id
    found = sa.exists().where(own, session_projects.c.project_id.in_(project_ids))
    return found | ~sa.exists().where(own) if DEFAULT_PROJECT in project_ids else found


def require_projects(connection: sa.Connection, owner: str | None, project_ids: Collection[str], field: str) -> None:
    """Raises NotFound if an owner has no session in one of the projects, InvalidInput for a name that none can have.

    Args:
        owner: None for all owners.
    """
    query = sa.select(session_projects.c.project_id).distinct()
    query = query.where(session_projects.c.project_id.in_([check_project(name, field) for name in project_ids]))
    found = connection.scalars(query if owner is None else query.where(session_projects.c.owner == owner))
    if missing := sorted(set(project_ids) - {*found, DEFAULT_PROJECT}):
        raise NotFound(f"there is no project {missing[0]!r}: create a session with this project_id first", field=field)


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
            GPUs; 0 for those that compute on the CPU.
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


def stored_checkpoints(connection: sa.Connection, project_id: str | None) -> list[dict[str, Any]]:
    """Returns the number and the bytes of checkpoints by project and owner, of one project or of all.

    Raises NotFound for an unknown project.
    """
    if project_id is not None:
        require_projects(connection, None, [project_id], "project_id")
    project = sa.func.coalesce(session_projects.c.project_id, DEFAULT_PROJECT)
    joined = checkpoints.outerjoin(models, checkpoints.c.model_id == models.c.model_id)
    joined = joined.outerjoin(session_projects, session_projects.c.session_id == models.c.session_id)
    query = sa.select(project, checkpoints.c.owner, sa.func.count(), sa.func.sum(checkpoints.c.size_bytes))
    query = query.select_from(joined).group_by(project, checkpoints.c.owner).order_by(project, checkpoints.c.owner)
    rows = connection.execute(query if project_id is None else query.where(project == project_id))
    names = ("project_id", "org_user_urn", "checkpoint_count", "size_bytes", "size_gigabytes")
    return [dict(zip(names, (*row[:3], int(row[3]), int(row[3]) / 1e9), strict=True)) for row in rows]


async def usage_for(database: Database, asked: str, days: int) -> dict[str, Any]:
    """Returns the usage that the caller asked for. An empty `asked` means the caller's own; `*` means all owners.

    Raises PermissionDenied for the usage of another owner if the caller lacks the scope admin.
    """
    owner = asked_owner(asked, "usage")
    return await database.read_whole(lambda connection: read_usage(connection, owner, min(days, _MOST_DAYS)))
