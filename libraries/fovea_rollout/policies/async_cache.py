"""A cache of values that concurrent callers request once, such as the number of tokens of a picture size."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from fovea.runtime.tasks import SingleFlight

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class AsyncCache(Generic[Key, Value]):
    """A cache of values by key. One call makes each value, and all concurrent callers await it.

    A call that fails is made again by the next caller.
    """

    def __init__(self) -> None:
        self._values: dict[Key, Value] = {}
        self._calls: SingleFlight[Key, Value] = SingleFlight()

    async def get(self, key: Key, call: Callable[[], Awaitable[Value]]) -> Value:
        """Returns the value of a key, from `call` if there is none yet. Raises what the call raises."""
        if key in self._values:
            return self._values[key]

        async def made() -> Value:
            self._values[key] = await call()
            return self._values[key]

        return await self._calls.run(key, made)

    def forget(self, key: Key, value: Value) -> None:
        """Drops a value, so that the next caller makes it again. Keeps a value that has replaced this one meanwhile."""
        if self._values.get(key) is value:
            del self._values[key]
