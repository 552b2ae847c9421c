"""The lock admits one set of full weights at a time without starvation."""

import asyncio

import pytest

from fovea_gateway.replicas.samplers import WeightsLock


class Place:
    """A lock with the list of requested weights."""

    def __init__(self) -> None:
        self.put: list[str] = []
        self.fail: Exception | None = None
        self.lock = WeightsLock(self._change)

    async def _change(self, wanted: str) -> None:
        assert self.lock.inside == self.lock._following
        self.put.append(wanted)
        await asyncio.sleep(0.001)
        if self.fail:
            raise self.fail

    async def use(self, wanted: str, entered: list[str], hold_s: float = 0.005) -> None:
        async with self.lock.hold(wanted):
            assert self.lock.resident == wanted
            entered.append(wanted)
            await asyncio.sleep(hold_s)
            assert self.lock.resident == wanted


async def test_base_needs_no_change_and_runs_side_by_side() -> None:
    place, entered = Place(), []  # type: tuple[Place, list[str]]
    tasks = [asyncio.create_task(place.use("", entered)) for _ in range(5)]
    await asyncio.sleep(0.002)
    assert place.lock.inside == 5
    await asyncio.gather(*tasks)
    assert place.put == []


async def test_requests_for_the_same_set_enter_together_and_both_sets_progress() -> None:
    place, entered = Place(), []  # type: tuple[Place, list[str]]
    wanted = ["a", "b"] * 20
    await asyncio.wait_for(asyncio.gather(*(place.use(name, entered) for name in wanted)), 10)
    assert sorted(entered) == sorted(wanted)
    assert place.put == ["a", "b"]


async def test_a_steady_stream_for_one_set_does_not_starve_the_other() -> None:
    place, entered = Place(), []  # type: tuple[Place, list[str]]
    stream = [asyncio.create_task(place.use("a", entered))]

    async def keep_coming() -> None:
        while "b" not in entered:
            stream.append(asyncio.create_task(place.use("a", entered)))
            await asyncio.sleep(0.001)

    coming = asyncio.create_task(keep_coming())
    await asyncio.sleep(0.01)
    await asyncio.wait_for(place.use("b", entered), 10)
    await coming
    await asyncio.gather(*stream)


async def test_a_failed_change_fails_its_waiters_and_is_retried() -> None:
    place, entered = Place(), []  # type: tuple[Place, list[str]]
    place.fail = RuntimeError("broken")
    results = await asyncio.gather(*(place.use("a", entered) for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["broken"] * 3
    assert place.lock.resident is None
    place.fail = None
    await place.use("", entered)
    assert place.put == ["a", ""], (
        "the present weights are unknown after a failure, so even the base must be loaded again"
    )


async def test_cancelled_waiters_leave_no_trace() -> None:
    place, entered = Place(), []  # type: tuple[Place, list[str]]
    holder = asyncio.create_task(place.use("", entered, 0.05))
    await asyncio.sleep(0)
    waiters = [asyncio.create_task(place.use(name, entered)) for name in ("a", "b", "a")]
    await asyncio.sleep(0.001)
    for waiter in waiters[:2]:
        waiter.cancel()
    await asyncio.gather(holder, *waiters, return_exceptions=True)
    assert entered == ["", "a"]
    assert place.lock.inside == 0
    await asyncio.wait_for(place.use("b", entered), 5)


async def test_a_restart_is_noticed() -> None:
    place, entered = Place(), []  # type: tuple[Place, list[str]]
    await place.use("a", entered)
    place.lock.reset("")
    await place.use("", entered)
    assert place.put == ["a"]
    with pytest.raises(ZeroDivisionError):
        async with place.lock.hold("a"):
            _ = 1 / 0
    assert place.lock.inside == 0


async def test_waiting_requests_can_be_dismissed_and_running_ones_stay() -> None:
    place, entered = Place(), []  # type: tuple[Place, list[str]]
    async with place.lock.hold(""):
        waiters = [asyncio.create_task(place.use(name, entered)) for name in ("a", "b")]
        await asyncio.sleep(0)
        place.lock.dismiss(ConnectionError("it leaves"))
        results = await asyncio.gather(*waiters, return_exceptions=True)
        assert [str(result) for result in results] == ["it leaves"] * 2
        assert place.lock.inside == 1
    assert (entered, place.put, place.lock.inside) == ([], [], 0)


async def test_newer_weights_of_a_model_replace_those_of_requests_that_follow_it() -> None:
    """They do not replace a version that a request names exactly, and neither older weights nor another model's replace
    any.
    """
    place, entered = Place(), []  # type: tuple[Place, list[str]]
    lock = place.lock
    async with lock.hold("m@1", follows=True):
        assert lock.is_followed_by("m@2")
        assert not any(map(lock.is_followed_by, ("m@1", "m@0", "n@2", "")))
        async with lock.hold("m@2", follows=True):
            assert place.put == ["m@1", "m@2"]
            async with lock.hold("m@2"):
                held = lock.hold("m@3", follows=True)
                newest = asyncio.create_task(held.__aenter__())
                await asyncio.sleep(0.01)
                assert not newest.done(), "one request needs m@2"
            await newest
            assert (lock.resident, lock.inside) == ("m@3", 3)
        others = [asyncio.create_task(place.use(name, entered)) for name in ("m@4", "n@9", "")]
        await asyncio.sleep(0.01)
        assert not entered
    await held.__aexit__(None, None, None)
    await asyncio.gather(*others)
    assert entered == ["m@4", "n@9", ""]
    assert place.put == ["m@1", "m@2", "m@3", "m@4", "n@9", ""]


async def test_followers_continue_after_a_failed_change_which_is_retried() -> None:
    place = Place()
    async with place.lock.hold("m@1", follows=True):
        place.fail = RuntimeError("broken")
        with pytest.raises(RuntimeError, match="broken"):
            await place.lock.hold("m@2", follows=True).__aenter__()
        assert place.lock.resident is None
        place.fail = None
        async with place.lock.hold("m@2", follows=True):
            assert place.lock.inside == 2
    assert place.lock.inside == place.lock._following == 0
