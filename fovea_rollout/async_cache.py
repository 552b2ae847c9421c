"""Values that are asked for once and shared, such as how many tokens pictures of a size take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class AsyncCache(Generic[Key, Value]):
    """Values by key, each made by one call that all concurrent callers await; a call that failed is made again."""

    def __init__(self) -> None:
        self._values: dict[Key, Value] = {}
        self._calls: dict[Key, asyncio.Task[Value]] = {}

    async def get(self, key: Key, call: Callable[[], Awaitable[Value]]) -> Value:
        """The value of a key, from `call` if there is none yet. Raises what the call raises."""
        if key in self._values:
            return self._values[key]
        if key not in self._calls:
            self._calls[key] = asyncio.create_task(self._call(key, call))
        # One caller that is cancelled must not take the value away from the others.
        return await asyncio.shield(self._calls[key])

    def forget(self, key: Key) -> None:
        """Drops a value: the next caller asks anew."""
        self._values.pop(key, None)

    async def _call(self, key: Key, call: Callable[[], Awaitable[Value]]) -> Value:
        try:
            self._values[key] = await call()
            return self._values[key]
        finally:
            del self._calls[key]
