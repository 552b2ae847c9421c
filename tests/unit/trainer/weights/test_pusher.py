"""Order of pushes and commands at the shared lock."""

import asyncio

from fovea.runtime.tasks import SharedLock


async def _until_idle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_shared_holders_run_together_and_exclusive_ones_alone() -> None:
    lock = SharedLock()
    inside: list[str] = []
    ends: dict[str, asyncio.Event] = {name: asyncio.Event() for name in ("a", "b", "full", "c")}

    async def take(name: str) -> None:
        async with lock.exclusive() if name == "full" else lock.shared():
            inside.append(name)
            await ends[name].wait()
            inside.remove(name)

    tasks = []
    for name in ends:
        tasks.append(asyncio.create_task(take(name)))
        await _until_idle()
    assert inside == ["a", "b"]
    for ended, expected in (("a", ["b"]), ("b", ["full"]), ("full", ["c"]), ("c", [])):
        ends[ended].set()
        await _until_idle()
        assert inside == expected
    await asyncio.gather(*tasks)


async def test_a_cancelled_exclusive_waiter_blocks_no_other() -> None:
    lock = SharedLock()

    async def alone() -> None:
        async with lock.exclusive():
            raise AssertionError("never had its turn")

    async with lock.shared():
        waiting = asyncio.create_task(alone())
        await _until_idle()
        waiting.cancel()
        await asyncio.wait([waiting])
        async with asyncio.timeout(10), lock.shared():
            pass
