"""Who waits for many samples at once: what each client of a sampling session has finished, in order.

A client names the last number that it has seen and gets what came after it. The database has the truth; what is kept
here spares reading it again and wakes those who wait.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import sqlalchemy as sa

from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import future_results, futures
from fovea_gateway.futures.future import State

CLIENT_SPAN = 1_000_000_000
"""Each client of a sampling session numbers its samples within a span of its own: tinker-contract.md, section 3."""
_PAGE = 4096


class Target(NamedTuple):
    """One client of a sampling session; 0 is the one that opened it."""

    sampling_session_id: str
    client: int

    @property
    def first_seq_id(self) -> int:
        """The first number that its samples have."""
        return self.client * CLIENT_SPAN

    @property
    def last_seq_id(self) -> int:
        """The last number that they may have; fits into 64 bits."""
        return min(self.first_seq_id + CLIENT_SPAN - 1, 2**63 - 1)


class Completion(NamedTuple):
    """A sample that ended. `number` rises from one to the next; `size_bytes` is that of the kept result."""

    number: int
    future_id: str
    is_failed: bool
    size_bytes: int


class _Log:
    """Completions of one target with a number above `since`, in order; `since` is None while nothing was read."""

    def __init__(self) -> None:
        self.since: int | None = None
        self.filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.grown = asyncio.Event()
        self._entries: dict[str, Completion] = {}

    def begin(self, after: int, reading: Coroutine[Any, Any, list[Completion]]) -> None:
        """Begins anew, with what `reading` finds after a number."""
        self.since = after
        self.filled = asyncio.create_task(self._fill(reading), name="reading completions")

    async def _fill(self, reading: Coroutine[Any, Any, list[Completion]]) -> None:
        try:
            self.add(await reading)
        except BaseException:
            self.since = None
            raise

    def add(self, entries: Sequence[Completion]) -> None:
        """Takes entries, whatever order they come in."""
        if not entries:
            return
        is_later = not self._entries or entries[0].number > next(reversed(self._entries.values())).number
        self._entries.update((entry.future_id, entry) for entry in entries)
        if not is_later:
            self._entries = {entry.future_id: entry for entry in sorted(self._entries.values())}
        self.grown.set()

    def drop(self, future_ids: Sequence[str]) -> None:
        """Forgets entries whose results are gone."""
        for future_id in future_ids:
            self._entries.pop(future_id, None)

    def trim(self, until: int) -> None:
        """Forgets what was seen."""
        if self.since is not None and until > self.since:
            self.since = until
            seen = []
            for entry in self._entries.values():
                if entry.number > until:
                    break
                seen.append(entry.future_id)
            self.drop(seen)

    def page(self, after: int) -> list[Completion]:
        """The first entries after a number."""
        found = []
        for entry in self._entries.values():
            if entry.number > after:
                found.append(entry)
                if len(found) == _PAGE:
                    break
        return found


class CompletionLogs:
    """The logs of all targets that somebody asks for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._logs: dict[Target, _Log] = {}
        self._is_closing = False

    def note(self, sampling_session_id: str, seq_id: int, completion: Completion) -> None:
        """Takes a completion that is in the database, and wakes whoever waits for it."""
        log = self._logs.get(Target(sampling_session_id, seq_id // CLIENT_SPAN))
        if log is not None:
            log.add([completion])

    async def wait(self, target: Target, after: int, timeout_s: float) -> list[Completion]:
        """Completions after a number, in order; those that come within `timeout_s` if there are none yet."""
        log = self._logs.get(target)
        if log is None:
            log = self._logs[target] = _Log()
        if log.since is None or after < log.since:
            # Through the writer: what was finished before this log was there is committed before it is read.
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
        """Forgets completions whose results the client has."""
        log = self._logs.get(target)
        if log is not None:
            log.drop(future_ids)

    def forget(self, session_id: str) -> None:
        """Drops what is in memory of a session that is over; who asks later is answered from the database."""
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
    """What a client has finished since number `after` and not acknowledged, in order."""
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
