"""Runs one environment, async or not, behind async methods."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer, Environment, Step
from fovea_rollout.messages import Message, parse_messages

Outcome = tuple[Any, BaseException | None]
Call = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Outcome]", Callable[..., Any], tuple[Any, ...]]


LARGEST = 1e30
"""The largest magnitude of a reward or a metric. The bound keeps sums over turns and groups finite."""


class EnvironmentHost:
    """The owner of one environment: it makes the environment and calls it, one call after the other.

    Plain functions run in a thread of this environment's own, for two reasons. A graphics context belongs to one
    thread, and an environment that hangs must not occupy a thread of a shared pool. The thread is a daemon, so that a
    hanging environment does not keep the program alive.

    Args:
        factory: Makes the environment, in the same thread.
    """

    def __init__(self, factory: Callable[[], Environment]) -> None:
        self._factory = factory
        self._environment: Environment | None = None
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name="environment", daemon=True)
        self._thread.start()

    async def make(self) -> None:
        """Makes the environment. Raises what the factory raises."""
        await self._call(self._make)

    async def reset(self) -> tuple[Message, ...]:
        """Begins the episode; returns its first messages.

        Raises what the environment raises, and InvalidInput for messages in another format.
        """
        return parse_messages(await self._call(self._method("reset")), "reset()")

    async def step(self, answer: Answer) -> tuple[Step, tuple[Message, ...]]:
        """Hands over an answer; returns the environment's step and its parsed messages.

        Raises what the environment raises, and InvalidInput if it did not return a valid `Step`.
        """
        step = await self._call(self._method("step"), answer)
        if not isinstance(step, Step):
            raise InvalidInput(f"step() returned {type(step).__name__}; return a Step", field="step()")
        for name, value in (("reward", step.reward), *((f"metrics[{key!r}]", m) for key, m in step.metrics.items())):
            if not abs(value) <= LARGEST:  # false for NaN, too
                raise InvalidInput(
                    f"step().{name} is {value}; it must be a finite number of at most {LARGEST:g} in magnitude",
                    field=f"step().{name}",
                )
        if step.is_done:
            return step, ()
        if not (messages := parse_messages(step.messages, "step().messages")):
            raise InvalidInput("step().messages is empty: set is_done=True, or ask again", field="step().messages")
        return step, messages

    async def close(self) -> None:
        """Closes the environment, if there is one, after all earlier calls. Call it once."""
        try:
            await self._call(self._close)
        finally:
            self._calls.put(None)

    def _make(self) -> None:
        self._environment = self._factory()

    def _close(self) -> Any:
        return None if self._environment is None else self._environment.close()

    def _method(self, name: str) -> Callable[..., Any]:
        return getattr(self._environment, name)  # type: ignore[no-any-return]

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Outcome] = loop.create_future()
        self._calls.put((loop, outcome, function, arguments))
        try:
            value, error = await outcome
        except asyncio.CancelledError:
            if outcome.done() and not outcome.cancelled():  # cancelled after the result came, before this task resumed
                _discard(outcome.result())
            raise
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value


def _work(calls: queue.SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        loop, outcome, function, arguments = call
        result: Outcome
        try:
            result = function(*arguments), None
        except BaseException as error:  # a library that calls sys.exit() must not end the thread silently
            result = None, error
        try:
            loop.call_soon_threadsafe(_settle, outcome, result)
        except RuntimeError:  # the loop is closed, so no caller waits for the result
            _discard(result)


def _settle(outcome: asyncio.Future[Outcome], result: Outcome) -> None:
    if not outcome.done():
        outcome.set_result(result)
    else:  # the caller was cancelled
        _discard(result)


def _discard(result: Outcome) -> None:
    """Closes a coroutine that will never be awaited."""
    if inspect.iscoroutine(result[0]):
        result[0].close()
