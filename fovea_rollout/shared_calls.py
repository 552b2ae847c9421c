"""Calls whose answers many rollouts share: asked once a key, awaited by all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SharedCalls(Generic[Key, Value]):
    """Answers by key. Who asks while a call is under way waits for it; a call that failed is made again next time."""

    def __init__(self) -> None:
        self._answers: dict[Key, Value] = {}
        self._calls: dict[Key, asyncio.Task[Value]] = {}

    async def get(self, key: Key, call: Callable[[], Awaitable[Value]]) -> Value:
        """The answer to a key. Raises what the call raises."""
        if key in self._answers:
            return self._answers[key]
        if key not in self._calls:
            self._calls[key] = asyncio.create_task(self._call(key, call))
        # One rollout that is cancelled must not take the answer away from the others.
        return await asyncio.shield(self._calls[key])

    def forget(self, key: Key) -> None:
        """The next one asks anew."""
        self._answers.pop(key, None)

    async def _call(self, key: Key, call: Callable[[], Awaitable[Value]]) -> Value:
        try:
            self._answers[key] = await call()
            return self._answers[key]
        finally:
            del self._calls[key]
