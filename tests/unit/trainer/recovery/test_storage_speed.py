"""The measured speed of recovery storage, with a clock of the test."""

import asyncio
from concurrent.futures import Future

import pytest

from fovea_trainer.recovery.recovery_folder import StorageSpeed


async def never_late(words: str) -> None:
    raise AssertionError(words)


async def test_waits_of_storage_lower_what_it_may_owe_but_not_what_counts_as_a_hang() -> None:
    now = [0.0]
    speed = StorageSpeed(60.0, lambda: now[0])
    found = []
    for idle_s, wanted_s in ((0.0, 0.0), (0.0, 1.0), (9.0, 10.0)):  # the second was wanted during the first
        now[0] += idle_s
        write: Future[str] = Future()
        write.set_result("")
        asyncio.get_running_loop().call_soon(now.__setitem__, 0, now[0] + 1.0)
        await speed.written(write, 10**9, never_late, wanted_s)
        found.append((speed.patience_s(10**11), speed.most_bytes(1.0)))
    assert [patience_s for patience_s, _ in found] == [pytest.approx(found[0][0])] * 3
    assert found[1][1] == pytest.approx(found[0][1])
    assert found[2][1] < found[0][1] / 2


async def test_storage_is_not_idle_while_the_next_state_is_copied() -> None:
    """Writes of a second follow each other. Each copy takes 0.9 s, beside the write of the state before."""
    now = [0.0]
    speed = StorageSpeed(60.0, lambda: now[0])
    writes: list[Future[str]] = [Future() for _ in range(20)]
    before = asyncio.create_task(speed.written(writes[0], 10**9, never_late))
    for number in range(1, len(writes)):
        await asyncio.sleep(0)
        now[0] = number - 0.1
        following = asyncio.create_task(speed.written(writes[number], 10**9, never_late, wanted_s=0.9))
        await asyncio.sleep(0)
        now[0] = number
        writes[number - 1].set_result("")
        await before
        before = following
    assert speed.most_bytes(1.0) == pytest.approx(60.0 * 1e9)
    writes[-1].set_result("")
    await before


async def test_the_time_of_a_write_begins_when_the_write_before_it_ends() -> None:
    now = [0.0]
    speed = StorageSpeed(60.0, lambda: now[0])
    writes: list[Future[str]] = [Future(), Future()]
    waiting = [asyncio.create_task(speed.written(write, 10**9, never_late)) for write in writes]
    await asyncio.sleep(0)
    assert speed.owed_bytes == 2 * 10**9
    for write, task in zip(writes, waiting, strict=True):
        now[0] += 1.0
        write.set_result("")
        await task
    assert speed.owed_bytes == 0
    assert speed.most_bytes(1.0) == pytest.approx(60 * 10**9)


async def test_the_time_of_a_hang_is_not_the_speed_of_storage() -> None:
    now = 0.0
    speed = StorageSpeed(60.0, lambda: now)
    late: list[str] = []
    write: Future[str] = Future()

    async def note(words: str) -> None:
        nonlocal now
        late.append(words)
        now += 3600.0
        write.set_result("written")

    speed.least_patience_s = 0.0
    before = speed.most_bytes(1.0)
    assert await speed.written(write, 1, note) == "written"
    assert (late, speed.most_bytes(1.0)) == (["a write of 0.0 MiB has not returned for 0 s"], before)
