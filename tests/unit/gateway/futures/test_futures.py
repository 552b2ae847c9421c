"""The board of futures over a real database."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from fovea.wire.errors import Cancelled, Expired, InvalidInput, NotFound
from gateway.access.quotas import Shares
from gateway.database.database import Database
from gateway.futures import future_rows as rows
from gateway.futures.future import Kind, Outcome, Pending, State
from gateway.futures.futures import FutureBoard


def pending(seq_id: int = 1, kind: Kind = Kind.OPTIM_STEP, **more: object) -> Pending:
    return Pending(f"m:{seq_id}", kind, "owner", "sess", "m", seq_id, b"request", **more)  # type: ignore[arg-type]


class Shelf:
    """A board on a database, which can be left and opened again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.started: list[str] = []

    async def open(self) -> FutureBoard:
        self.database = Database(self.url)
        await self.database.open()
        board = FutureBoard(self.database, 0.05, Shares("max_pending", 20_000, "unfinished requests"))
        board.start = lambda work: self.started.append(work.future_id)
        return board


@pytest.fixture
async def shelf(database_url: str) -> AsyncIterator[Shelf]:
    opened = Shelf(database_url)
    yield opened
    await opened.database.close()


async def test_a_thousand_repeats_start_one(shelf: Shelf) -> None:
    board = await shelf.open()
    news = await asyncio.gather(*(board.submit(pending()) for _ in range(1000)))
    assert sum(news) == 1
    assert shelf.started == ["m:1"]


async def test_waiters_wake_with_the_outcome(shelf: Shelf) -> None:
    board, work = await shelf.open(), pending()
    await board.submit(work)
    waiters = [asyncio.create_task(board.wait("m:1", "owner", 10)) for _ in range(50)]
    await asyncio.sleep(0)
    await board.finish(work, Outcome(work.kind, b"result"))
    outcomes = await asyncio.gather(*waiters)
    assert all(isinstance(outcome, Outcome) and outcome.result == b"result" for outcome in outcomes)
    assert not await board.submit(pending()), "a repeat after the end starts nothing"


async def test_unfinished_work_survives_with_its_request(shelf: Shelf) -> None:
    board = await shelf.open()
    first, second, rejected = pending(1), pending(2), pending(3, rejection=InvalidInput("bad", field="x"))
    for work in (first, second, rejected):
        await board.submit(work)
    await board.set_running(first)
    await shelf.database.close()
    board = await shelf.open()
    restored = await board.restore()
    assert [(work.future_id, work.state) for work in restored] == [
        ("m:1", State.RUNNING),
        ("m:2", State.QUEUED),
        ("m:3", State.REJECTED),
    ]
    assert restored[0].request is None
    assert await board.request_of(restored[0]) == b"request"
    assert isinstance(restored[2].rejection, InvalidInput)
    assert restored[2].rejection.field == "x"
    await board.finish(restored[1], Outcome(Kind.OPTIM_STEP, b"late"))
    answer = await board.wait("m:2", "owner", 0)
    assert isinstance(answer, Outcome)
    assert answer.result == b"late"


async def test_outcome_and_its_effects_are_kept_together_or_not_at_all(shelf: Shelf) -> None:
    board, work = await shelf.open(), pending()
    await board.submit(work)

    def broken(connection: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await board.finish(work, Outcome(work.kind, b"result"), [broken])
    answer = await board.wait("m:1", "owner", 0)
    assert isinstance(answer, Outcome), "whoever waits is not left hanging"
    await shelf.database.close()
    board = await shelf.open()
    assert [left.future_id for left in await board.restore()] == ["m:1"]


async def test_the_first_of_a_cancel_and_a_result_counts(shelf: Shelf) -> None:
    board, work = await shelf.open(), pending(kind=Kind.SAMPLE)
    await board.submit(work)
    await asyncio.gather(board.cancel("m:1", "owner"), board.finish(work, Outcome(work.kind, b"late")))
    answer = await board.wait("m:1", "owner", 0)
    assert isinstance(answer, Outcome)
    assert isinstance(answer.error, Cancelled)
    await board.cancel("m:1", "owner")
    await board.cancel("unknown", "owner")


async def test_strangers_see_nothing(shelf: Shelf) -> None:
    board, work = await shelf.open(), pending()
    await board.submit(work)
    with pytest.raises(NotFound):
        await board.wait("m:1", "stranger", 0)
    await board.finish(work, Outcome(work.kind, b"result"))
    with pytest.raises(NotFound):
        await board.wait("m:1", "stranger", 0)


async def test_old_results_expire_and_stay_expired(shelf: Shelf) -> None:
    board, work = await shelf.open(), pending()
    await board.submit(work)
    await board.finish(work, Outcome(work.kind, b"result"))
    assert isinstance(await board.wait("m:1", "owner", 0), Outcome)
    await asyncio.sleep(0.06)
    await board.sweep()
    with pytest.raises(Expired):
        await board.wait("m:1", "owner", 0)
    assert not await board.submit(pending()), "it is gone, but not forgotten"


async def test_release_answers_every_poll_now(shelf: Shelf) -> None:
    board, work = await shelf.open(), pending()
    await board.submit(work)
    poll = asyncio.create_task(board.wait("m:1", "owner", 60))
    await asyncio.sleep(0)
    board.release_waiters()
    assert await poll is work
    assert await board.wait("m:1", "owner", 60) is work


async def test_what_is_kept_is_begun_although_its_client_went_away(shelf: Shelf) -> None:
    board = await shelf.open()
    gate = threading.Event()
    blocking = asyncio.create_task(shelf.database.write(lambda connection: gate.wait(20)))
    await asyncio.sleep(0)
    submitting = asyncio.create_task(board.submit(pending()))
    await asyncio.sleep(0.01)
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    gate.set()
    await blocking
    assert not await board.submit(pending()), "the repeat finds it"
    assert shelf.started == ["m:1"]


async def test_what_cannot_be_kept_is_refused_to_its_repeats_too(shelf: Shelf) -> None:
    board = await shelf.open()
    too_large = 2**70  # for a column of 64 bits
    answers = await asyncio.gather(*(board.submit(pending(too_large)) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(answer, Exception) for answer in answers), answers
    assert board.pending_count == 0
    assert shelf.started == []


async def finished(board: FutureBoard, seq_ids: range, outcome: Outcome) -> None:
    works = [pending(seq_id) for seq_id in seq_ids]
    await asyncio.gather(*(board.submit(work) for work in works))
    await asyncio.gather(*(board.finish(work, outcome) for work in works))


async def test_failures_are_counted_like_results(tmp_path: Path) -> None:
    shelf = Shelf(f"sqlite:///{tmp_path / 'x.db'}")
    board = await shelf.open()
    await finished(board, range(80), Outcome(Kind.OPTIM_STEP, b"", InvalidInput("x" * 2**20)))
    assert len(board._recent) <= 64
    await shelf.database.close()


async def test_a_sweep_looks_at_what_is_due_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.futures.futures._ROW_TTL_FACTOR", 1e9)
    monkeypatch.setattr(rows, "_ROWS_PER_DROP", 700, raising=False)
    shelf, count, looked = Shelf(f"sqlite:///{tmp_path / 'x.db'}"), 3000, 0
    board = await shelf.open()
    await finished(board, range(count), Outcome(Kind.OPTIM_STEP, b"result"))
    await asyncio.sleep(0.06)
    await board.sweep()
    with pytest.raises(Expired):
        await board.wait(f"m:{count - 1}", "owner", 0)

    def look() -> None:
        nonlocal looked
        looked += 100

    def watch(connection: sa.Connection) -> None:
        connection.connection.driver_connection.set_progress_handler(look, 100)  # type: ignore[union-attr]

    await shelf.database.write(watch)
    await board.sweep()
    assert looked < count, "instructions of SQLite: it looks at none of those rows again"
    await finished(board, range(count, count + 1), Outcome(Kind.OPTIM_STEP, b"result"))
    await asyncio.sleep(0.06)
    await board.sweep()
    with pytest.raises(Expired):
        await board.wait(f"m:{count}", "owner", 0)
    await shelf.database.close()
