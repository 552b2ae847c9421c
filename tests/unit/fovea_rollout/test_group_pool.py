"""The order in which groups are chosen, controlled by events instead of time."""

import asyncio
from collections import defaultdict

import pytest

from fovea_rollout.loop.group_pool import GroupPool
from fovea_rollout.trajectory import Trajectory
from tests.unit.fovea_rollout.rollouts import FourTokenPictures


class Stage:
    """Groups that end on command."""

    def __init__(self, total: int, buggy: int | None = None, begun: int = 0, replays: int = 0) -> None:
        self.buggy = buggy
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.ends: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.version = 0
        self.pool = GroupPool(self.play, total, begun, replays)

    async def play(self, policy: object, index: int) -> list[Trajectory]:
        self.begun.append(index)
        try:
            await self.ends[index].wait()
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        if index == self.buggy:
            raise ValueError("a bug")
        return [Trajectory(str(index))]

    def end(self, *indices: int) -> None:
        for index in indices:
            self.ends[index].set()

    def fill(self, version: int, count: int) -> None:
        self.version = version
        self.pool.fill(FourTokenPictures(), version, count)

    async def take(self, count: int, overdue: int) -> list[int]:
        groups = await self.pool.take(count, FourTokenPictures(), self.version, overdue)
        return [int(group[0].conversation) for group in groups]

    async def is_waiting(self, taking: "asyncio.Task[list[int]]") -> bool:
        """Returns whether the caller still waits after several turns of the event loop."""
        for _ in range(10):
            await asyncio.sleep(0)
        return not taking.done()


async def test_indices_go_on_after_those_of_before() -> None:
    stage = Stage(4, begun=2)
    stage.fill(1, 3)
    stage.end(2, 3)
    assert await stage.take(2, 0) == [2, 3], "the last two of four"
    assert stage.begun == [2, 3]


async def test_on_policy_waits_for_all() -> None:
    stage = Stage(4)
    stage.fill(0, 2)
    taking = asyncio.create_task(stage.take(2, 0))
    stage.end(1)
    assert await stage.is_waiting(taking)
    stage.end(0)
    assert await taking == [0, 1]
    assert stage.begun == [0, 1]


async def test_one_step_off_leaves_the_next_batch_running() -> None:
    stage = Stage(6)
    stage.fill(0, 4)
    stage.end(0, 1)
    assert await stage.take(2, -1) == [0, 1]
    stage.fill(1, 4)
    stage.end(4, 5)
    taking = asyncio.create_task(stage.take(2, 0))
    assert await stage.is_waiting(taking), "2 and 3 started with version 0"
    stage.end(2, 3)
    assert await taking == [2, 3]
    assert stage.begun == [0, 1, 2, 3, 4, 5]


async def test_inflight_takes_what_is_done_first_but_nothing_gets_older_than_allowed() -> None:
    stage = Stage(100)
    max_lag, count = 2, 2
    versions: dict[int, int] = {}
    taken: list[int] = []
    for step in range(8):
        stage.fill(step, 2 * count)
        for index in range(len(versions), stage.pool._count):
            versions[index] = step
            if index % 3:  # every third one is slow
                stage.end(index)
        taking = asyncio.create_task(stage.take(count, step - max_lag))
        if await stage.is_waiting(taking):
            stage.end(*versions)
        groups = await taking
        assert len(groups) == count
        assert all(step - versions[index] <= max_lag for index in groups)
        taken += groups
    assert len(set(taken)) == len(taken)
    assert taken != sorted(taken), "the fast ones must overtake"
    await stage.pool.close()


async def test_a_group_that_would_get_too_old_is_played_again_until_its_cancellations_are_used_up() -> None:
    stage = Stage(12, replays=1)
    stage.fill(0, 4)
    stage.end(0, 1)
    assert await stage.take(2, -1) == [0, 1]
    stage.fill(1, 4)
    stage.end(4, 5)
    assert await stage.take(2, 0) == [4, 5], (
        "2 and 3 started with version 0 and still run, but the step need not wait for them"
    )
    await asyncio.sleep(0)
    assert stage.cancelled == [2, 3]
    assert (stage.begun, stage.pool.cancelled) == ([0, 1, 2, 3, 4, 5, 2, 3], 2)
    stage.fill(2, 4)
    stage.end(6, 7)
    taking = asyncio.create_task(stage.take(2, 1))
    assert await stage.is_waiting(taking), "they started again with version 1; now the step must wait for them"
    stage.end(2, 3)
    assert await taking == [2, 3]
    assert stage.cancelled == [2, 3]
    stage.end(8, 9)
    stage.fill(3, 4)
    assert await stage.take(2, 2) == [6, 7]
    await stage.pool.close()


async def test_nothing_is_cancelled_while_too_few_groups_are_done() -> None:
    stage = Stage(4, replays=1)
    stage.fill(0, 2)
    taking = asyncio.create_task(stage.take(2, 0))
    stage.end(1)
    assert await stage.is_waiting(taking)
    assert not stage.cancelled
    stage.end(0)
    assert await taking == [0, 1]


async def test_closing_cancels_and_waits() -> None:
    stage = Stage(3)
    stage.fill(0, 3)
    await asyncio.sleep(0)
    await stage.pool.close()
    assert stage.cancelled == [0, 1, 2]


async def test_an_exception_during_play_is_raised() -> None:
    stage = Stage(20, buggy=13)
    stage.fill(0, 15)
    stage.end(13)
    with pytest.raises(ValueError, match="a bug"):
        await stage.take(2, -1)
    await stage.pool.close()
