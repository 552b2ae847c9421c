"""Places are given to owners by turns."""

import asyncio

from gateway.replicas.replicas import Slots


async def test_an_owner_with_many_waiting_delays_another_by_one() -> None:
    slots, order = Slots(1), []
    await slots.acquire("flood")

    async def go(owner: str, number: int) -> None:
        await slots.acquire(owner)
        order.append(f"{owner}{number}")
        slots.release()

    tasks = [asyncio.create_task(go("flood", number)) for number in range(50)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(go("other", number)) for number in range(2)]
    await asyncio.sleep(0)
    slots.release()
    await asyncio.gather(*tasks)
    assert order[:4] == ["flood0", "other0", "flood1", "other1"]
    assert [name for name in order if "flood" in name] == [f"flood{number}" for number in range(50)]


async def test_whoever_gives_up_takes_no_place_along() -> None:
    slots = Slots(1)
    await slots.acquire("a")
    waiting = [asyncio.create_task(slots.acquire("a")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # while it waits
    slots.release()
    waiting[1].cancel()  # in the moment in which it is let in
    await asyncio.sleep(0)
    await waiting[2]
    slots.release()
    await slots.acquire("b")
    assert [task.cancelled() for task in waiting] == [True, True, False]
