"""Numbered commands of a model: each runs once, for any callers, cancellations and retries."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fovea.wire.errors import Expired, FailedPrecondition, FeatureEvicted, InvalidInput, StorageBehind
from fovea_trainer.recovery.reply_cache import ReplyCache


class Work:
    """Counts its runs; waits at a gate."""

    def __init__(self) -> None:
        self.count = 0
        self.gate = asyncio.Event()
        self.failure: Exception | None = None

    async def run(self) -> int:
        self.count += 1
        await self.gate.wait()
        if self.failure:
            raise self.failure
        return self.count


async def test_a_caller_that_leaves_and_asks_again_gets_the_one_answer() -> None:
    journal, work = ReplyCache(), Work()
    first = asyncio.create_task(journal.once("m", 3, work.run))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    again = asyncio.create_task(journal.once("m", 3, work.run))
    await asyncio.sleep(0)
    work.gate.set()
    assert await again == 1
    assert await journal.once("m", 3, work.run) == 1
    assert await journal.once("m", 4, work.run) == 2
    assert await journal.once("other", 3, work.run) == 3
    with pytest.raises(FailedPrecondition, match="seq_id 3 of model 'm' comes after 4"):
        await journal.once("m", 3, work.run)
    journal.forget("m")
    assert await journal.once("m", 1, work.run) == 4, "a new model with the same name must start anew"


async def test_a_failure_is_an_answer_unless_nothing_was_done() -> None:
    journal, work = ReplyCache(), Work()
    work.gate.set()
    work.failure = InvalidInput("the loss is nan")
    for _ in range(2):
        with pytest.raises(InvalidInput):
            await journal.once("m", 1, work.run)
    assert work.count == 1
    for failure in (FeatureEvicted("render again"), StorageBehind("wait")):
        work.failure = failure
        with pytest.raises(type(failure)):
            await journal.once("m", 2, work.run)
    with pytest.raises(FailedPrecondition):
        await journal.once("m", 1, work.run)
    work.failure = None
    assert await journal.once("m", 2, work.run) == 4


async def test_commands_without_a_number_always_run() -> None:
    journal, work = ReplyCache(), Work()
    work.gate.set()
    assert [await journal.once("m", 0, work.run) for _ in range(2)] == [1, 2]


async def test_the_latest_large_answers_are_kept() -> None:
    journal = ReplyCache(max_bytes=100)

    def answer(size_bytes: int) -> Coroutine[Any, Any, int]:
        return asyncio.sleep(0, size_bytes)

    def size_of(size_bytes: int) -> int:
        return size_bytes

    for model_id in ("a", "b", "c"):
        assert await journal.once(model_id, 1, lambda: answer(40), size_of) == 40
    with pytest.raises(Expired, match="command 1 of model 'a' was done"):
        await journal.once("a", 1, lambda: answer(40), size_of)
    assert await journal.once("b", 1, lambda: answer(1), size_of) == 40
    assert await journal.once("c", 2, lambda: answer(101), size_of) == 101
    with pytest.raises(Expired):
        await journal.once("c", 2, lambda: answer(1), size_of)


async def test_the_last_command_is_known_once_it_is_done() -> None:
    journal, work = ReplyCache(), Work()
    assert await journal.last("m") == 0
    running = asyncio.create_task(journal.once("m", 3, work.run))
    await asyncio.sleep(0)
    asked = asyncio.create_task(journal.last("m"))
    await asyncio.sleep(0)
    assert not asked.done()
    work.gate.set()
    assert await asked == 3
    await running
    work.failure = InvalidInput("the loss is nan")
    with pytest.raises(InvalidInput):
        await journal.once("m", 4, work.run)
    assert await journal.last("m") == 4, "a failure is an outcome"
    work.failure = FeatureEvicted("render again")
    with pytest.raises(FeatureEvicted):
        await journal.once("m", 5, work.run)
    assert await journal.last("m") == 4, "nothing was done"
