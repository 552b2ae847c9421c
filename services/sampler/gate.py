"""Many may sample at once; new full weights go in alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class WeightGate:
    """A readers-writer lock for one event loop. A waiting writer goes before readers that come later."""

    def __init__(self) -> None:
        self._readers = 0
        self._writers = 0
        self._writing = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Holds off writers."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._writers)
            self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            await self._notify()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Waits for all readers and writers before it, and holds off all after it."""
        self._writers += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._readers and not self._writing)
                self._writing = True
            try:
                yield
            finally:
                self._writing = False
        finally:
            self._writers -= 1
            await self._notify()

    async def _notify(self) -> None:
        # A cancelled holder must still wake the others: the lock is free for an instant at most, so this cannot hang.
        async with self._changed:
            self._changed.notify_all()
