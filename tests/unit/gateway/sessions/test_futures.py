"""The registry of futures over a real database."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from fovea.runtime.durable import ExpiryClock
from fovea.wire.errors import Cancelled, Expired, FoveaError, InvalidInput, NotFound
from fovea_gateway.access.kept_rows import ResultRoom
from fovea_gateway.access.owners import Owners, Quota
from fovea_gateway.database.database import Database
from fovea_gateway.sessions import future_rows as rows
from fovea_gateway.sessions.future import Kind, Outcome, Pending, State, Submission
from fovea_gateway.sessions.futures import Futures


def submission(
    seq_id: int = 1, kind: Kind = Kind.OPTIM_STEP, rejection: FoveaError | None = None, owner: str = "owner"
) -> Submission:
    return Submission(f"m:{seq_id}", kind, owner, "sess", "m", seq_id, rejection)


class Store:
    """Futures in a database that can be closed and opened again; records the started work."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.started: dict[str, Pending] = {}
        self.result_ttl_s, self.result_bytes = 0.05, 2**30

    async def open(self) -> Futures:
        self.database = Database(self.url)
        await self.database.open()
        quota = Quota("max_pending", 20_000, "unfinished requests")
        room = ResultRoom(self.database, self.result_bytes)
        return Futures(self.database, self.result_ttl_s, quota, Owners(self.database), ExpiryClock(), room)

    async def submit(self, futures: Futures, work: Submission) -> bool:
        return await futures.submit(work, b"request", self._start)

    async def started_by(self, futures: Futures, work: Submission) -> Pending:
        await self.submit(futures, work)
        return self.started[work.future_id]

    def _start(self, pending: Pending) -> None:
        assert pending.submission.future_id not in self.started
        self.started[pending.submission.future_id] = pending


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    opened = Store(database_url)
    yield opened
    await opened.database.close()


async def test_a_thousand_repeats_start_one(store: Store) -> None:
    futures = await store.open()
    news = await asyncio.gather(*(store.submit(futures, submission()) for _ in range(1000)))
    assert sum(news) == 1
    assert list(store.started) == ["m:1"]


async def test_waiters_wake_with_the_outcome(store: Store) -> None:
    futures = await store.open()
    work = await store.started_by(futures, submission())
    waiters = [asyncio.create_task(futures.wait("m:1", "owner", 10)) for _ in range(50)]
    await asyncio.sleep(0)
    await futures.finish(work, Outcome(work.submission.kind, b"result"))
    outcomes = await asyncio.gather(*waiters)
    assert all(isinstance(outcome, Outcome) and outcome.result == b"result" for outcome in outcomes)
    assert not await store.submit(futures, submission()), "a repeat after the end must start nothing"


async def test_unfinished_work_survives_with_its_request(store: Store) -> None:
    futures = await store.open()
    for work in (submission(1), submission(2), submission(3, rejection=InvalidInput("bad", field="x"))):
        await store.submit(futures, work)
    await futures.set_running(store.started["m:1"])
    await store.database.close()
    futures = await store.open()
    restored = await futures.restore()
    assert [(work.submission.future_id, work.state) for work in restored] == [
        ("m:1", State.RUNNING),
        ("m:2", State.QUEUED),
        ("m:3", State.REJECTED),
    ]
    assert restored[0].request is None
    assert await futures.request_of(restored[0]) == b"request"
    assert isinstance(restored[2].submission.rejection, InvalidInput)
    assert restored[2].submission.rejection.field == "x"
    await futures.finish(restored[1], Outcome(Kind.OPTIM_STEP, b"late"))
    answer = await futures.wait("m:2", "owner", 0)
    assert isinstance(answer, Outcome)
    assert answer.result == b"late"


async def test_outcome_and_its_effects_are_kept_together_or_not_at_all(store: Store) -> None:
    futures = await store.open()
    work = await store.started_by(futures, submission())

    def broken(connection: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await futures.finish(work, Outcome(work.submission.kind, b"result"), [broken])
    answer = await futures.wait("m:1", "owner", 0)
    assert isinstance(answer, Outcome), "no waiter may hang"
    await store.database.close()
    futures = await store.open()
    assert [left.submission.future_id for left in await futures.restore()] == ["m:1"]


async def test_the_first_of_a_cancel_and_a_result_counts(store: Store) -> None:
    futures = await store.open()
    work = await store.started_by(futures, submission(kind=Kind.SAMPLE))
    await asyncio.gather(futures.cancel("m:1", "owner"), futures.finish(work, Outcome(work.submission.kind, b"late")))
    answer = await futures.wait("m:1", "owner", 0)
    assert isinstance(answer, Outcome)
    assert isinstance(answer.error, Cancelled)
    await futures.cancel("m:1", "owner")
    await futures.cancel("unknown", "owner")


async def test_strangers_see_nothing(store: Store) -> None:
    futures = await store.open()
    work = await store.started_by(futures, submission())
    with pytest.raises(NotFound):
        await futures.wait("m:1", "stranger", 0)
    await futures.finish(work, Outcome(work.submission.kind, b"result"))
    with pytest.raises(NotFound):
        await futures.wait("m:1", "stranger", 0)


async def test_old_results_expire_and_stay_expired(store: Store) -> None:
    futures = await store.open()
    work = await store.started_by(futures, submission())
    await futures.finish(work, Outcome(work.submission.kind, b"result"))
    assert isinstance(await futures.wait("m:1", "owner", 0), Outcome)
    await asyncio.sleep(0.06)
    await futures.sweep()
    with pytest.raises(Expired):
        await futures.wait("m:1", "owner", 0)
    assert not await store.submit(futures, submission()), "it is gone, but not forgotten"


async def test_release_answers_every_poll_now(store: Store) -> None:
    futures = await store.open()
    work = await store.started_by(futures, submission())
    poll = asyncio.create_task(futures.wait("m:1", "owner", 60))
    await asyncio.sleep(0)
    futures.release_waiters()
    assert await poll is work
    assert await futures.wait("m:1", "owner", 60) is work


async def test_a_stored_submission_starts_although_its_client_disconnected(store: Store) -> None:
    futures = await store.open()
    gate = threading.Event()
    blocking = asyncio.create_task(store.database.write(lambda connection: gate.wait(20)))
    await asyncio.sleep(0)
    submitting = asyncio.create_task(store.submit(futures, submission()))
    await asyncio.sleep(0.01)
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    gate.set()
    await blocking
    assert not await store.submit(futures, submission()), "the repeat must find it"
    assert list(store.started) == ["m:1"]


async def test_a_submission_that_cannot_be_stored_is_refused_to_its_repeats_too(store: Store) -> None:
    futures = await store.open()
    too_large = 2**70  # for a 64-bit column
    answers = await asyncio.gather(
        *(store.submit(futures, submission(too_large)) for _ in range(3)), return_exceptions=True
    )
    assert all(isinstance(answer, Exception) for answer in answers), answers
    assert futures.pending_count == 0
    assert not store.started


async def finished(store: Store, futures: Futures, seq_ids: range, outcome: Outcome) -> None:
    works = await asyncio.gather(*(store.started_by(futures, submission(seq_id)) for seq_id in seq_ids))
    await asyncio.gather(*(futures.finish(work, outcome) for work in works))


async def test_failures_are_counted_like_results(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'x.db'}")
    futures = await store.open()
    await finished(store, futures, range(80), Outcome(Kind.OPTIM_STEP, b"", InvalidInput("x" * 2**20)))
    assert len(futures._recent) <= 64
    await store.database.close()


async def test_a_sweep_looks_at_what_is_due_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea_gateway.sessions.futures._ROW_TTL_FACTOR", 1e9)
    monkeypatch.setattr(rows, "_ROWS_PER_DROP", 700, raising=False)
    store, count, looked = Store(f"sqlite:///{tmp_path / 'x.db'}"), 3000, 0
    futures = await store.open()
    await finished(store, futures, range(count), Outcome(Kind.OPTIM_STEP, b"result"))
    await asyncio.sleep(0.06)
    await futures.sweep()
    with pytest.raises(Expired):
        await futures.wait(f"m:{count - 1}", "owner", 0)

    def look() -> None:
        nonlocal looked
        looked += 100

    def watch(connection: sa.Connection) -> None:
        connection.connection.driver_connection.set_progress_handler(look, 100)  # type: ignore[union-attr]

    await store.database.write(watch)
    await futures.sweep()
    assert looked < count, "SQLite instructions: it must not read those rows again"
    await finished(store, futures, range(count, count + 1), Outcome(Kind.OPTIM_STEP, b"result"))
    await asyncio.sleep(0.06)
    await futures.sweep()
    with pytest.raises(Expired):
        await futures.wait(f"m:{count}", "owner", 0)
    await store.database.close()


async def test_an_owner_that_keeps_more_results_than_its_share_loses_its_own_oldest(store: Store) -> None:
    store.result_ttl_s, store.result_bytes = 3600.0, 1000
    futures = await store.open()

    async def end(seq_id: int, owner: str, size_bytes: int) -> None:
        work = await store.started_by(futures, submission(seq_id, owner=owner))
        await futures.finish(work, Outcome(Kind.OPTIM_STEP, b"x" * size_bytes))

    await end(100, "quiet", 200)
    for seq_id in range(8):
        await end(seq_id, "owner", 100)
    await futures.sweep()
    # It may have 400: as much is free beside the other's 200.
    for seq_id in range(4):
        with pytest.raises(Expired, match="max_result_bytes"):
            await futures.wait(f"m:{seq_id}", "owner", 0)
    for seq_id in range(4, 8):
        assert isinstance(await futures.wait(f"m:{seq_id}", "owner", 0), Outcome)
    assert isinstance(await futures.wait("m:100", "quiet", 0), Outcome)
    await store.database.close()
    futures = await store.open()  # futures of an earlier process count, too
    await end(101, "owner", 300)
    await futures.sweep()
    with pytest.raises(Expired):
        await futures.wait("m:6", "owner", 0)
    assert isinstance(await futures.wait("m:7", "owner", 0), Outcome)
    assert isinstance(await futures.wait("m:100", "quiet", 0), Outcome)
