"""Records that administrators write for owners: each owner's share of the services, and its limits."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from fovea.wire.errors import InvalidInput, ResourceExhausted
from fovea_gateway.access.api_keys import check_owner
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import owners
from fovea_gateway.database.sql_engine import insert_new

LOOK_S = 1.0
"""Seconds between two reads of the records, which a command may have changed."""
_MOST = 2**62
_MOST_WEIGHT = 1000.0


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
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be 0 (no limit) or more", field=name)
        return self


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
    """

    def __init__(self, database: Database, limits: Mapping[str, float] | None = None) -> None:
        self._database = database
        self._limits: dict[str, Any] = dict(limits or {})
        self._owners: dict[str, Owner] = {}
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    async def read(self) -> None:
        """Reads the records. Call it again to pick up the changes that commands make."""
        self._owners = {owner.owner: owner for owner in await self._database.read(all_owners)}

    def of(self, owner: str) -> Owner:
        """Returns an owner's record, with the default limits filled in."""
        found = self._owners.get(owner) or Owner(owner)
        missing = {name: value for name, value in self._limits.items() if not getattr(found, name)}
        return dataclasses.replace(found, **missing) if missing else found

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
