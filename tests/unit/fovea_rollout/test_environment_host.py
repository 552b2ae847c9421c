"""An environment's host never leaves a coroutine that is not awaited."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable

import pytest

from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.environments.environment_host import EnvironmentHost
from fovea_rollout.messages import Message


class Held:
    """Its step returns a coroutine once the gate is open; its later reset sets an event."""

    def __init__(self) -> None:
        self.begun, self.gate, self.came_behind = threading.Event(), threading.Event(), threading.Event()
        self.coroutine = self._answer()

    def reset(self) -> list[Message]:
        self.came_behind.set()
        return [Message("user", ("look",))]

    def step(self, answer: Answer) -> Awaitable[Step]:
        self.begun.set()
        self.gate.wait(60)
        return self.coroutine

    def close(self) -> None:
        pass

    async def _answer(self) -> Step:
        return Step([], 1.0, is_done=True)


async def test_a_step_that_is_cancelled_as_its_result_comes_closes_it() -> None:
    environment = Held()
    host = EnvironmentHost(lambda: environment)
    await host.make()
    step = asyncio.create_task(host.step(Answer("")))
    await asyncio.to_thread(environment.begun.wait, 60)
    reset = asyncio.create_task(host.reset())
    await asyncio.sleep(0)
    environment.gate.set()
    assert environment.came_behind.wait(60)  # The step's result waits in the event loop, which is blocked here.
    asyncio.get_running_loop().call_soon(step.cancel)
    with pytest.raises(asyncio.CancelledError):
        await step
    assert inspect.getcoroutinestate(environment.coroutine) == inspect.CORO_CLOSED
    assert await reset
    await host.close()
