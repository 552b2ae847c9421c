"""Logs of finished samples, in order, for clients that wait for many samples at once.

A client sends the last number that it has seen and receives the later completions. The database is authoritative; the
logs in memory avoid repeated reads and wake waiting clients.
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
"""The number of seq_ids that each client of a sampling session has for its samples: tinker-contract.md, section 3."""
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
    """The logs of all targets for which a client has asked."""

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
