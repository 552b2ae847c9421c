"""Commands run in order, results return, and nothing waits for ever."""

import asyncio
import threading

import pytest

from fovea.wire.errors import InvalidInput, Unavailable
from fovea_trainer.batches.places import PassTerms
from fovea_trainer.command_queue import (
    ClearGradients,
    CommandQueue,
    ForwardBackward,
    Heartbeat,
    OptimStep,
    Shutdown,
    resolve,
)
from fovea_trainer.model.optimizer import Adam


def _serve(queue: CommandQueue, seen: list[str], gate: threading.Event) -> threading.Thread:
    def run() -> None:
        while not isinstance((job := queue.next()[0]).command, Shutdown):
            gate.wait()
            if isinstance(job.command, ClearGradients):
                seen.append(job.command.model_id)
                wrong = job.command.model_id == "bad"
                resolve(job.result, job.command.model_id, InvalidInput("bad") if wrong else None)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


async def test_results_and_errors_come_back_in_order() -> None:
    queue, seen, gate = CommandQueue(60), [], threading.Event()
    queue.open()
    thread = _serve(queue, seen, gate)
    calls = [asyncio.create_task(queue.submit(ClearGradients(name))) for name in ("a", "bad", "c")]
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    queue.shut_down()
    await asyncio.to_thread(thread.join)
    assert seen == ["a", "bad", "c"]
    assert results[0] == "a"
    assert isinstance(results[1], InvalidInput)
    assert results[2] == "c"


async def test_a_caller_that_left_is_passed_over() -> None:
    queue, seen, gate = CommandQueue(60), [], threading.Event()
    queue.open()
    thread = _serve(queue, seen, gate)
    calls = [asyncio.create_task(queue.submit(ClearGradients(name))) for name in ("a", "b", "c")]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.sleep(0)
    gate.set()
    assert await calls[2] == "c"
    queue.shut_down()
    await asyncio.to_thread(thread.join)
    assert seen == ["a", "c"]


async def test_a_broken_trainer_fails_everything_at_once() -> None:
    queue = CommandQueue(60)
    with pytest.raises(Unavailable, match="still loading"):
        await queue.submit(ClearGradients("a"))
    queue.open()
    calls = [asyncio.create_task(queue.submit(ClearGradients(name))) for name in ("a", "b")]
    await asyncio.sleep(0)
    (running,) = queue.next()
    await asyncio.to_thread(queue.fail_all, Unavailable("rank 1 died"))
    for call in calls:
        with pytest.raises(Unavailable, match="rank 1 died"):
            await call
    with pytest.raises(Unavailable, match="rank 1 died"):
        await queue.submit(ClearGradients("c"))
    with pytest.raises(Unavailable, match="rank 1 died"):
        queue.check()
    resolve(running.result, "too late")


def test_idleness_makes_heartbeats() -> None:
    assert isinstance(CommandQueue(0.01).next()[0].command, Heartbeat)


def _call(model_id: str, rows: int = 64, kind: str = "a") -> ForwardBackward:
    return ForwardBackward(model_id, b"", True, False, [], [], None, PassTerms(kind, rows, 3))


async def test_waiting_calls_of_other_models_come_with_the_first_one() -> None:
    """Jobs of one model keep their order, and a pass has at most as many calls as slots."""
    queue = CommandQueue(60)
    queue.open()
    commands = [
        _call("a"), ClearGradients("b"), _call("b"), _call("a"), _call("c"), _call("d", kind="b"), _call("e", 128),
        _call("f"), _call("g"),
    ]  # fmt: skip
    calls = [asyncio.create_task(queue.submit(command)) for command in commands]
    await asyncio.sleep(0)
    calls[7].cancel()
    await asyncio.sleep(0)
    found = []
    while len(found) < 5:
        jobs = queue.next()
        found.append([number for job in jobs for number, command in enumerate(commands) if command is job.command])
        for job in jobs:
            resolve(job.result)
    assert found == [[0, 4, 8], [1], [2, 3], [5], [6]]


async def test_models_that_do_not_fit_on_the_device_together_run_one_after_another() -> None:
    """This includes steps, which share passes for any model size: sixteen large ones could exhaust the trainer's
    memory.
    """
    queue = CommandQueue(60)
    queue.open()
    calls = [asyncio.create_task(queue.submit(OptimStep(name, Adam(0.1)))) for name in ("a", "large", "c", "large")]
    await asyncio.sleep(0)
    found = []
    while len(found) < 3:
        jobs = queue.next(lambda model_ids: "large" not in model_ids)
        found.append([job.command.model_id for job in jobs if isinstance(job.command, OptimStep)])
        for job in jobs:
            resolve(job.result)
    await asyncio.gather(*calls)
    assert found == [["a", "c"], ["large"], ["large"]]
