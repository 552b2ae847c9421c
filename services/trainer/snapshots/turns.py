"""Who may send when: adapters side by side, full parameters alone, one broadcast at a time over each group."""

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class Turns:
    """Turns of pushes, first come first served but for what can go on side by side. Lives in the event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._sharing = 0
        self._alone = False
        self._wants_alone = 0
        self._groups: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Beside others that share; waits for whoever is, or wants to be, alone."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._alone and not self._wants_alone)
            self._sharing += 1
        try:
            yield
        finally:
            async with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Beside nobody."""
        async with self._changed:
            self._wants_alone += 1
            try:
                await self._changed.wait_for(lambda: not self._alone and not self._sharing)
                self._alone = True
            finally:
                self._wants_alone -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            async with self._changed:
                self._alone = False
                self._changed.notify_all()

    def of_group(self, key: Hashable) -> asyncio.Lock:
        """The lock of those who send to the same members."""
        return self._groups.setdefault(key, asyncio.Lock())
