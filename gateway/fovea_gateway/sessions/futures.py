"""The registry of futures. It accepts each submission once, stores it, wakes waiting clients and repeats results.

A submission is in the database before its id is returned. Waiting clients are woken in memory, without database polls.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from cachetools import LRUCache

from fovea.runtime.durable import ExpiryClock
from fovea.wire.errors import Cancelled, Expired, FoveaError, NotFound, to_status
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.access.kept_rows import ResultRoom
from fovea_gateway.access.owners import Owners, Quota, Used, add_usage, exceeded
from fovea_gateway.database.database import Batched, Database, Job
from fovea_gateway.sessions import future_rows as rows
from fovea_gateway.sessions.future import Kind, Outcome, Pending, State, Submission, note_usage
from fovea_gateway.sessions.future_rows import Completion, CompletionLogs, Target

logger = logging.getLogger(__name__)

_RECENT_BYTES = 64 * 2**20
_HELD_REQUEST_BYTES = 256 * 2**20
_ROW_TTL_FACTOR = 8


class Futures:
    """All futures of this gateway. The registry does not know which component runs the work.

    Args:
        database: Stores the futures.
        result_ttl_s: Seconds for which a result can be fetched again.
        quota: Limits the number of unfinished futures per owner.
        owners: Limits the tokens of an owner's unfinished futures.
        result_room: Limits the bytes of stored results per owner.
        on_end: Called with each future that has ended; must not block.
        on_ask: Called with the session of each future for which a client waits; must not block.
        as_reported: Converts an error before it is stored and sent to the client.
    """

    def __init__(
        self,
        database: Database,
        result_ttl_s: float,
        quota: Quota,
        owners: Owners,
        clock: ExpiryClock,
        result_room: ResultRoom,
        on_end: Callable[[Pending, Outcome], None] = lambda pending, outcome: None,
        on_ask: Callable[[str], None] = lambda session_id: None,
        as_reported: Callable[[FoveaError], FoveaError] = lambda error: error,
    ) -> None:
        self._database = database
        self._result_ttl_s = result_ttl_s
        self._quota, self._owners, self._clock, self._result_room = quota, owners, clock, result_room
        self._on_end, self._on_ask, self._as_reported = on_end, on_ask, as_reported
        self._tokens: Counter[str] = Counter()
        self._pending: dict[str, Pending] = {}
        # Owner and outcome by future id.
        self._recent: LRUCache[str, tuple[str, Outcome]] = LRUCache(_RECENT_BYTES, lambda kept: kept[1].held_bytes)
        self._held_bytes = self._stored_bytes = 0
        self._is_closing = False
        self._last_number = 0
        # By scope: the seq_ids of failed commands for which a client has received the error.
        self._reported_failures: defaultdict[str, set[int]] = defaultdict(set)
        # Rows that finished before these times are already deleted. Scanning them again would take longer every day.
        self._results_until = self._rows_until = 0.0
        self._completions = CompletionLogs(database)

    @property
    def pending_count(self) -> int:
        """The number of unfinished futures."""
        return len(self._pending)

    def check_quota(self, owner: str) -> None:
        """Raises ResourceExhausted if an owner has as many unfinished futures as it may."""
        self._quota.check(owner)

    def unfinished_kind(self, future_id: str) -> Kind | None:
        """Returns the kind of an unfinished future, or None."""
        pending = self._pending.get(future_id)
        return None if pending is None else pending.submission.kind

    def unfinished(self) -> list[Pending]:
        """Returns the unfinished futures, oldest first."""
        return list(self._pending.values())

    async def submit(
        self,
        submission: Submission,
        request: bytes,
        start: Callable[[Pending], None],
        others_wait_for_it: bool = False,
    ) -> bool:
        """Accepts work. Returns False, and changes nothing, if work with the same id was accepted before.

        Args:
            start: Called once the work is stored, even if the caller was cancelled meanwhile. Must not block.
            others_wait_for_it: Whether accepted work of the owner must wait for this work. Such work is never refused
                for lack of a share.

        Raises ResourceExhausted above the owner's share. Raises Unavailable while the disk is full; clients then repeat
        the request.
        """
        known = self._pending.get(submission.future_id)
        if known is not None:
            await known.accepted.wait()
            if known.refusal is not None:
                raise known.refusal
            return False
        self._database.check_room()
        if not others_wait_for_it:
            self._check_share(submission)
        pending = Pending(submission, request)
        self._add(pending)
        # The submitting request may be cancelled meanwhile, but work that is in the database must be started.
        return await asyncio.shield(asyncio.create_task(self._accept(pending, request, start)))

    async def _accept(self, pending: Pending, blob: bytes, start: Callable[[Pending], None]) -> bool:
        submission = pending.submission
        if submission.rejection is not None:
            pending.state, blob = State.REJECTED, to_status(submission.rejection).SerializeToString()
        try:
            is_new = await self._database.write(Batched(rows.insert, rows.Accepted(submission, pending.state, blob)))
        except BaseException as error:
            pending.refusal = error
            self._remove(pending)
            pending.accepted.set()
            raise
        pending.accepted.set()
        if not is_new:
            self._remove(pending)
            return False
        size_bytes = len(pending.request or b"")
        if self._held_bytes + size_bytes > _HELD_REQUEST_BYTES:
            pending.request = None
        else:
            self._held_bytes += size_bytes
        metrics.SUBMITTED.labels(submission.kind.value).inc()
        metrics.PENDING.set(len(self._pending))
        start(pending)
        return True

    async def request_of(self, pending: Pending) -> bytes:
        """Returns the serialized request, from memory or from the database."""
        if pending.request is not None:
            return pending.request
        future_id = pending.submission.future_id
        return await self._database.read(lambda connection: rows.get_request(connection, future_id))

    async def set_running(self, pending: Pending, also: Iterable[Job[Any]] = ()) -> None:
        """Records durably, together with the effects in `also`, the start of work that must not run twice."""
        pending.state, effects = State.RUNNING, list(also)

        def job(connection: Any) -> None:
            for effect in effects:
                effect(connection)
            rows.set_running(connection, pending.submission.future_id)

        await self._database.write(job)

    async def finish(self, pending: Pending, outcome: Outcome, also: Iterable[Job[Any]] = ()) -> None:
        """Stores the outcome together with the effects in `also`, in one transaction; then wakes waiting clients."""
        if pending.is_finishing:  # A cancellation and a result may coincide: the first one counts.
            return
        pending.is_finishing = True
        if outcome.error is not None:
            outcome = outcome._replace(error=self._as_reported(outcome.error))
        # A woken client must find the outcome in the database, even if the work was cancelled during the write.
        await asyncio.shield(asyncio.create_task(self._store(pending, outcome, list(also))))

    async def wait(self, future_id: str, owner: str, timeout_s: float) -> Outcome | Pending:
        """Returns the outcome of a future, or the pending future after `timeout_s`. The caller must send it to the
        client.

        Raises NotFound for an unknown id and for another owner's, and Expired if the result was dropped.
        """
        found = await self._found(future_id, owner, timeout_s)
        if isinstance(found, Outcome) and found.error is not None and found.kind is not Kind.SAMPLE:
            scope, _, seq_id = future_id.rpartition(":")
            self._reported_failures[scope].add(int(seq_id))
        return found

    def has_reported_failure(self, scope: str, seq_id: int) -> bool:
        """Returns whether a client has received, from this process, the error of a failed command."""
        return seq_id in self._reported_failures.get(scope, ())

    async def wait_any(self, target: Target, after: int, timeout_s: float) -> list[Completion]:
        """Returns the completions of a client of a sampling session after number `after`, in order.

        Waits up to `timeout_s` if there are none. Numbers keep increasing across restarts. A completion is repeated
        until it is acknowledged or its result expires.
        """
        session_id = target.sampling_session_id.partition(":")[0]
        self._on_ask(session_id)
        found = await self._completions.wait(target, after, 0.0 if self._is_closing else timeout_s)
        self._on_ask(session_id)
        return found

    async def acknowledge(self, target: Target, future_ids: list[str]) -> None:
        """Deletes results that a client has received. Ignores ids of unfinished futures and of other scopes."""
        scope = target.sampling_session_id
        mine = [future_id for future_id in future_ids if future_id.rpartition(":")[0] == scope]
        if not mine:
            return
        await self._database.write(lambda connection: rows.drop_fetched(connection, scope, mine))
        self._completions.drop(target, mine)
        for future_id in mine:
            self._recent.pop(future_id, None)

    def forget(self, session_id: str) -> None:
        """Drops the data of an ended session from memory."""
        self._completions.forget(session_id)
        for scope in [scope for scope in self._reported_failures if scope.startswith(f"{session_id}:")]:
            del self._reported_failures[scope]

    def release_waiters(self) -> None:
        """Answers every waiting poll at once. The process is about to end, and clients will poll the next one."""
        self._is_closing = True
        self._completions.release()
        for pending in self._pending.values():
            pending.woken.set()

    async def cancel(self, future_id: str, owner: str) -> None:
        """Cancels a sample that its client no longer needs. Has no effect on any other future."""
        pending = self._pending.get(future_id)
        if pending is not None and pending.submission.owner == owner and pending.submission.kind is Kind.SAMPLE:
            await self._give_up(pending, Cancelled("the request was cancelled by its client"))

    async def cancel_session(self, session_id: str, error: FoveaError) -> None:
        """Fails the unfinished samples of a session with `error`."""
        samples = [pending for pending in self._pending.values() if pending.submission.kind is Kind.SAMPLE]
        gone = [pending for pending in samples if pending.submission.session_id == session_id]
        await asyncio.gather(*(self._give_up(pending, error) for pending in gone))

    async def restore(self) -> list[Pending]:
        """Reads the unfinished futures after a restart, oldest first. The caller resumes them."""
        pendings = await self._database.read(rows.unfinished)
        self._last_number = await self._database.read(rows.last_number)
        for pending in pendings:
            pending.accepted.set()
            self._add(pending)
        metrics.PENDING.set(len(self._pending))
        return pendings

    async def sweep(self) -> None:
        """Deletes results that are too old or above their owner's share."""
        now, ttl_s = self._clock.now(), self._result_ttl_s
        self._results_until, dropped = await self._drop(rows.drop_results, self._results_until, now - ttl_s)
        self._rows_until, _ = await self._drop(rows.drop_rows, self._rows_until, now - ttl_s * _ROW_TTL_FACTOR)
        if dropped:
            logger.info("dropped %d results older than %.0f s", dropped, ttl_s)
            self._recent.clear()
        for future_id in await self._result_room.bound(self._stored_bytes):
            self._recent.pop(future_id, None)

    @contextmanager
    def counting(self, submission: Submission) -> Iterator[None]:
        """Counts work without a future, such as a stream, while it runs. Raises ResourceExhausted as `submit` does."""
        self._check_share(submission)
        self._reserve(submission)
        try:
            yield
        finally:
            self._release(submission)

    async def store_usage(self, pending: Pending) -> None:
        """Stores the usage of work that has no future."""
        used = [_used(pending)]
        note_usage(pending.submission.owner, pending.submission.kind.value, vars(pending.usage))
        await self._database.write(lambda connection: add_usage(connection, used, time.time()))

    def _check_share(self, submission: Submission) -> None:
        owner, tokens = submission.owner, self._tokens[submission.owner]
        self._quota.check(owner)
        most = self._owners.of(owner).max_tokens_in_flight
        # A request that alone exceeds the limit may run while its owner has no other; otherwise it could never run.
        if most and tokens and tokens + submission.token_count > most:
            raise exceeded("max_tokens_in_flight", most, f"its unfinished requests have {tokens} tokens")

    def _reserve(self, submission: Submission) -> None:
        self._quota.take(submission.owner)
        self._tokens[submission.owner] += submission.token_count

    def _release(self, submission: Submission) -> None:
        self._quota.give(submission.owner)
        self._tokens[submission.owner] -= submission.token_count
        if not self._tokens[submission.owner]:
            del self._tokens[submission.owner]

    def _add(self, pending: Pending) -> None:
        self._pending[pending.submission.future_id] = pending
        self._reserve(pending.submission)

    def _remove(self, pending: Pending) -> None:
        del self._pending[pending.submission.future_id]
        self._release(pending.submission)

    async def _drop(
        self, drop: Callable[[Any, float, float], tuple[float, int]], since: float, before: float
    ) -> tuple[float, int]:
        """Deletes in portions, so that other writes can run in between. Returns the end of the span and the count."""
        total = 0
        while since < before:
            since, count = await self._database.write(partial(_call, drop, since, before))
            total += count
        return since, total

    async def _found(self, future_id: str, owner: str, timeout_s: float) -> Outcome | Pending:
        pending = self._pending.get(future_id)
        if pending is not None and pending.submission.owner == owner:
            self._on_ask(pending.submission.session_id)
            if not self._is_closing:
                with suppress(TimeoutError):
                    await asyncio.wait_for(pending.woken.wait(), timeout_s)
            self._on_ask(pending.submission.session_id)
            if not pending.done.is_set():
                return pending
        recent = self._recent.get(future_id)
        if recent is not None and recent[0] == owner:
            return recent[1]
        stored = await self._database.read(lambda connection: rows.get(connection, future_id))
        if stored is None or stored.owner != owner:
            raise NotFound(f"there is no request {future_id!r}", field="request_id")
        if stored.outcome is None:
            kept = f"kept for {self._result_ttl_s:.0f} s, within max_result_bytes, and until the client acknowledges it"
            raise Expired(f"the result of {future_id!r} has been deleted: results are {kept}")
        return stored.outcome

    async def _give_up(self, pending: Pending, error: FoveaError) -> None:
        if pending.work is not None:
            pending.work.cancel()
        await self.finish(pending, Outcome(pending.submission.kind, b"", error))

    async def _store(self, pending: Pending, outcome: Outcome, effects: list[Job[Any]]) -> None:
        submission, finished_at = pending.submission, time.time()
        self._stored_bytes += len(outcome.result)
        # Increases with each write, also after a restart and after the rows of the previous process were deleted.
        number = self._last_number = max(self._last_number + 1, time.time_ns() // 1000)
        ended = rows.Finished(submission.future_id, outcome, finished_at, number, _used(pending))
        store = Batched(rows.finish, ended)

        def job(connection: Any) -> None:
            for effect in effects:
                effect(connection)
            store(connection)

        try:
            await self._database.write(job if effects else store)
        finally:
            # If the database fails, waiting clients still get the outcome. After a restart the work counts as
            # unfinished.
            self._publish(pending, outcome)
            if submission.kind is Kind.SAMPLE:
                is_failed, size_bytes = outcome.error is not None, len(outcome.result)
                completion = Completion(number, submission.future_id, is_failed, size_bytes)
                self._completions.note(submission.scope, submission.seq_id, completion)

    def _publish(self, pending: Pending, outcome: Outcome) -> None:
        """Gives the outcome to waiting clients and caches it for repeated requests."""
        submission = pending.submission
        if submission.future_id not in self._pending:
            return
        self._remove(pending)
        if pending.request is not None:
            self._held_bytes -= len(pending.request)
        if outcome.held_bytes <= _RECENT_BYTES:
            self._recent[submission.future_id] = submission.owner, outcome
        metrics.FINISHED.labels(submission.kind.value, outcome.error.reason if outcome.error else "OK").inc()
        note_usage(submission.owner, submission.kind.value, vars(pending.usage))
        metrics.FUTURE_SECONDS.labels(submission.kind.value).observe(time.time() - submission.created_at)
        metrics.PENDING.set(len(self._pending))
        self._on_end(pending, outcome)
        pending.done.set()
        pending.woken.set()


def _used(pending: Pending) -> Used:
    return Used(pending.submission.owner, pending.submission.key_id, pending.usage)


def _call(
    drop: Callable[[Any, float, float], tuple[float, int]], since: float, before: float, connection: Any
) -> tuple[float, int]:
    return drop(connection, since, before)
