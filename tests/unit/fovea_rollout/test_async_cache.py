"""A value is requested once, whichever callers want it or cancel."""

import asyncio

import pytest

from fovea_rollout.policies.async_cache import AsyncCache


class Asked:
    """Returns ten times the key once the gate is open."""

    def __init__(self, cache: AsyncCache[int, int]) -> None:
        self._cache = cache
        self.asked: list[int] = []
        self.began, self.gate = asyncio.Event(), asyncio.Event()
        self.failures = 0

    async def get(self, key: int) -> int:
        return await self._cache.get(key, lambda: self._answer(key))

    async def _answer(self, key: int) -> int:
        self.asked.append(key)
        self.began.set()
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("gone")
        return 10 * key


async def test_concurrent_callers_wait_for_one_call() -> None:
    ask = Asked(AsyncCache())
    tasks = [asyncio.create_task(ask.get(key)) for key in [8, 8, 4] * 10]
    await ask.began.wait()
    tasks[0].cancel()  # it started the call; the others must get their value nevertheless
    await asyncio.sleep(0)
    ask.gate.set()
    assert await asyncio.gather(*tasks[1:]) == ([80, 80, 40] * 10)[1:]
    assert await ask.get(8) == 80
    assert ask.asked == [8, 4]


async def test_a_call_that_failed_is_made_again() -> None:
    ask = Asked(AsyncCache())
    ask.gate.set()
    ask.failures = 1
    with pytest.raises(ConnectionError):
        await ask.get(8)
    assert await ask.get(8) == 80


async def test_a_value_that_was_forgotten_is_asked_for_again() -> None:
    cache: AsyncCache[int, int] = AsyncCache()
    ask = Asked(cache)
    ask.gate.set()
    await ask.get(8)
    cache.forget(8, 80)
    await ask.get(8)
    assert ask.asked == [8, 8]


async def test_a_value_that_has_been_replaced_is_not_forgotten() -> None:
    """Two callers find the same value lost. The later one must not drop the value that the first one has requested
    again.
    """
    cache: AsyncCache[str, object] = AsyncCache()
    made: list[object] = []

    async def make() -> object:
        made.append(object())
        return made[-1]

    lost = await cache.get("a", make)
    cache.forget("a", lost)
    again = await cache.get("a", make)
    cache.forget("a", lost)
    assert await cache.get("a", make) is again
    assert len(made) == 2
