"""Background tasks, shared calls, uninterruptible work, and backoff."""

import asyncio
import logging

import pytest

from fovea.runtime.tasks import BackgroundTasks, Backoff, Members, SingleFlight, repeat, run_to_end


async def test_a_background_failure_is_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    tasks = BackgroundTasks()
    with caplog.at_level(logging.ERROR):
        tasks.start(fail(), "the sweep")
        await tasks.join()
    assert len(tasks) == 0
    assert [record.getMessage() for record in caplog.records] == ["the sweep failed"]


async def test_background_tasks_are_cancelled_and_waited_for() -> None:
    ended = []

    async def last() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    tasks = BackgroundTasks()
    tasks.start(last(), "one")
    tasks.start(last(), "two")
    await asyncio.sleep(0)
    await tasks.cancel()
    assert ended == [True, True]


async def test_join_waits_for_what_is_started_meanwhile() -> None:
    ended = []
    tasks = BackgroundTasks()

    async def second() -> None:
        ended.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        tasks.start(second(), "second")

    tasks.start(first(), "first")
    await tasks.join()
    assert ended == ["second"]


class _Source:
    """Returns the number of its calls, once its gate is open."""

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0
        self.begun, self.let = asyncio.Event(), asyncio.Event()

    async def answer(self) -> int:
        self.calls += 1
        number = self.calls
        self.begun.set()
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return number


async def test_concurrent_callers_share_one_call() -> None:
    source, flight = _Source(), SingleFlight[str, int]()
    waiting = [asyncio.create_task(flight.run("key", source.answer)) for _ in range(3)]
    await asyncio.sleep(0)
    assert "key" in flight
    waiting[0].cancel()
    await asyncio.sleep(0)
    source.let.set()
    await asyncio.wait(waiting)
    assert waiting[0].cancelled()
    assert [task.result() for task in waiting[1:]] == [1, 1]
    assert "key" not in flight
    assert await flight.run("key", source.answer) == 2


async def test_all_get_the_error_and_the_next_call_is_a_new_one() -> None:
    flight = SingleFlight[int, int]()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError("broken")

    async def work() -> int:
        return 7

    answers = await asyncio.gather(*(flight.run(1, fail) for _ in range(2)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["broken", "broken"]
    assert await flight.run(1, work) == 7


async def test_a_call_answers_its_other_keys() -> None:
    source, flight = _Source(), SingleFlight[str, int]()
    source.let.set()
    first = asyncio.create_task(flight.run("a", source.answer, also=["b"]))
    await asyncio.sleep(0)
    assert await flight.run("b", source.answer) == await first == 1
    assert "a" not in flight
    assert "b" not in flight


@pytest.mark.parametrize("abandon", [False, True])
async def test_a_call_without_callers_ends_or_continues_as_configured(abandon: bool) -> None:
    source, flight = _Source(), SingleFlight[str, int](abandon)
    waiting = [asyncio.create_task(flight.run("key", source.answer)) for _ in range(2)]
    await source.begun.wait()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    source.let.set()
    assert await flight.run("key", source.answer) == (2 if abandon else 1)
    assert source.cancelled == abandon


async def test_calls_are_cancelled_together() -> None:
    source, flight = _Source(), SingleFlight[str, int]()
    waiting = asyncio.create_task(flight.run("key", source.answer))
    await source.begun.wait()
    await flight.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert source.cancelled == 1


async def test_work_runs_to_its_end_before_the_cancellation_goes_on() -> None:
    source = _Source()
    caller = asyncio.create_task(run_to_end(source.answer()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    source.let.set()
    await asyncio.wait([caller])
    assert caller.cancelled()
    assert source.cancelled == 0


async def test_work_that_fails_raises_what_it_raised() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await run_to_end(fail())


async def test_a_repeated_task_continues_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    runs = 0
    enough = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("broken")
        enough.set()

    task = asyncio.create_task(repeat(work, 0.0, "the sweep"))
    await enough.wait()
    task.cancel()
    assert [record.getMessage() for record in caplog.records] == ["the sweep failed; retrying in 0 s"]


async def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=0.001, longest_s=0.004)
    pauses = []
    for _ in range(4):
        pauses.append(backoff.next_s)
        await backoff.pause()
    assert pauses == [0.001, 0.002, 0.004, 0.004]
    assert not backoff.is_over
    backoff.reset()
    assert backoff.next_s == 0.001


def test_chance_shortens_pauses_by_no_more_than_its_share() -> None:
    pauses = {Backoff(first_s=1.0, jitter=0.25).next_s for _ in range(200)}
    assert len(pauses) > 100
    assert 0.75 <= min(pauses) < 0.85
    assert 0.9 < max(pauses) <= 1.0


async def test_no_pause_goes_beyond_the_deadline() -> None:
    backoff = Backoff(deadline_s=0.01, first_s=3600.0, longest_s=3600.0)
    await backoff.pause()
    while not backoff.is_over:  # a timer may fire one clock tick early
        await backoff.pause()
    assert backoff.left_s == 0.0


def test_a_deadline_in_the_past() -> None:
    backoff = Backoff(deadline_s=-1.0)
    assert (backoff.is_over, backoff.left_s) == (True, 0.0)


async def test_waiters_continue_once_the_last_member_has_left() -> None:
    members = Members[str]()
    await members.wait_empty()
    with members.joined("a"):
        waiting = asyncio.create_task(members.wait_empty())
        with members.joined("b"):
            assert list(members) == ["a", "b"]
        await asyncio.sleep(0)
        assert not waiting.done()
        assert members
    await waiting
    assert not members
