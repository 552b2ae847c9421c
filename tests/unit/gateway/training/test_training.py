"""The order of one model's commands."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.wire.errors import FeatureEvicted, FoveaError, SessionEnded
from fovea_gateway.sessions.future import Kind, Pending, Progress, QueueState, Submission
from fovea_gateway.training import commands
from fovea_gateway.training.training import CommandQueue


def command(seq_id: int) -> Submission:
    return Submission(f"m:{seq_id}", Kind.OPTIM_STEP, "o", "s", "m", seq_id)


class Record:
    """The actions of a queue, and a gate to hold it."""

    def __init__(self, next_seq_id: int = 1, gap_timeout_s: float = 60.0) -> None:
        self.ran: list[int] = []
        self.refused: list[tuple[int, FoveaError | None]] = []
        self.skipped: list[tuple[int, int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.queue = CommandQueue("m", next_seq_id, self._run, self._refuse, self._skip, gap_timeout_s)

    async def _run(self, pending: Pending) -> None:
        await self.open.wait()
        self.ran.append(pending.submission.seq_id)
        pending.done.set()

    async def _refuse(self, pending: Pending, error: FoveaError | None) -> None:
        self.refused.append((pending.submission.seq_id, error))
        pending.done.set()

    def _skip(self, first: int, last: int) -> None:
        self.skipped.append((first, last))

    def add(self, seq_id: int) -> Pending:
        pending = Pending(command(seq_id), b"")
        self.queue.add(pending)
        return pending


@settings(max_examples=50)
@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_any_order_of_arrival_runs_in_order(count: int, shuffle: random.Random) -> None:
    async def scenario() -> None:
        record = Record()
        order = list(range(1, count + 1))
        shuffle.shuffle(order)
        pendings = []
        for seq_id in order:
            pendings.append(record.add(seq_id))
            if shuffle.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*(pending.done.wait() for pending in pendings))
        assert record.ran == list(range(1, count + 1))

    asyncio.run(scenario())


async def test_a_gap_holds_what_is_behind_it_and_says_so() -> None:
    record = Record()
    late = record.add(3)
    record.add(1)
    await asyncio.sleep(0.01)
    assert record.ran == [1]
    assert "request 2" in late.progress.waiting_for, "the error must name the missing request now"
    record.add(2)
    await late.done.wait()
    assert record.ran == [1, 2, 3]


async def test_a_gap_that_stays_is_skipped_and_latecomers_are_refused() -> None:
    record = Record(gap_timeout_s=0.02)
    await record.add(4).done.wait()
    assert record.skipped == [(1, 3)]
    await record.add(2).done.wait()
    assert record.refused == [(2, None)]
    await record.add(5).done.wait()
    assert record.ran == [4, 5]


async def test_closing_lets_the_running_one_end_and_refuses_the_rest() -> None:
    record = Record()
    record.open.clear()
    running, queued, gapped = record.add(1), record.add(2), record.add(9)
    await asyncio.sleep(0)
    closing = asyncio.create_task(record.queue.close(SessionEnded("over")))
    await asyncio.sleep(0.01)
    record.open.set()
    await closing
    assert running.done.is_set()
    assert record.ran == [1]
    assert [seq_id for seq_id, _ in record.refused] == [2, 9]
    assert queued.done.is_set()
    assert gapped.done.is_set()
    await record.add(3).done.wait()
    assert record.ran == [1]


async def test_pausing_starts_nothing_more() -> None:
    record = Record()
    record.open.clear()
    record.add(1)
    record.add(2)
    await asyncio.sleep(0)
    task = record.queue.pause()
    assert task is not None
    record.open.set()
    await task
    assert record.ran == [1]
    assert record.queue.pause() is None


async def test_a_queue_wakes_up_again_after_idling() -> None:
    record = Record(next_seq_id=7)
    for seq_id in (7, 8, 9):
        await record.add(seq_id).done.wait()
        await asyncio.sleep(0.01)
    assert record.ran == [7, 8, 9]


class Told(Progress):
    """Counts the calls of wait_on."""

    told = 0

    def wait_on(self, reason: str, queue_state: QueueState = QueueState.ACTIVE) -> None:
        Told.told += 1
        super().wait_on(reason, queue_state)


async def test_waiting_commands_are_not_rescanned_for_each_command() -> None:
    record, count = Record(), 1000
    pendings = [Pending(command(seq_id), b"", progress=Told()) for seq_id in range(1, count + 1)]
    for pending in reversed(pendings):
        record.queue.add(pending)
        await asyncio.sleep(0)
    await pendings[-1].done.wait()
    assert record.ran == list(range(1, count + 1))
    assert Told.told <= count


@pytest.mark.parametrize(("named", "indexes"), [("1,2", [1, 2]), ("2,9,-1", [2]), ("9,-1", [0, 1, 2]), ("", [0, 1, 2])])
def test_datums_out_of_range_are_not_rendered_again(named: str, indexes: list[int]) -> None:
    error = FeatureEvicted("gone", datums=named)
    assert commands._missing(error, 3) == indexes, "an empty list would repeat the same call endlessly"
