"""A pool of groups of rollouts, which run while the loop trains on other groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fovea_rollout.policies.policy import Policy
from fovea_rollout.trajectory import Trajectory

Play = Callable[[Policy, int], Coroutine[Any, Any, Sequence[Trajectory]]]
"""Plays the group with an index, with a policy."""


@dataclass(frozen=True)
class _Begun:
    index: int
    version: int


class GroupPool:
    """A pool of groups that run in the background.

    Args:
        play: Plays one group.
        total: The number of groups in the whole run.
        begun: The number of groups that an earlier part of the run has begun; indices continue from there.
    """

    def __init__(self, play: Play, total: int, begun: int = 0) -> None:
        self._play = play
        self._total = total
        self._count = begun
        # In the order in which the groups began.
        self._tasks: dict[asyncio.Task[Sequence[Trajectory]], _Begun] = {}

    def fill(self, policy: Policy, version: int, count: int) -> None:
        """Begins groups until `count` are in the pool, or the run has no more groups."""
        while len(self._tasks) < count and self._count < self._total:
            begun = _Begun(self._count, version)
            self._tasks[asyncio.create_task(self._play(policy, begun.index), name=f"group {begun.index}")] = begun
            self._count += 1

    async def take(self, count: int, overdue: int) -> list[Sequence[Trajectory]]:
        """Waits for `count` groups, and for all groups that began with weights of version `overdue` or older.

        At most twice `count` groups run, and `count` of them began with each version except the first. So at most
        `count` groups are ever overdue, and no returned group is older than `overdue`.

        Returns:
            The finished groups that began first.

        Raises:
            Exception: An error that playing a group raised.
        """
        while True:
            done = [task for task in self._tasks if task.done()]
            for task in done:
                task.result()
            running = {task: begun for task, begun in self._tasks.items() if not task.done()}
            if len(done) >= count and all(begun.version > overdue for begun in running.values()):
                break
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        taken = done[:count]
        for task in taken:
            del self._tasks[task]
        return [task.result() for task in taken]

    async def close(self) -> None:
        """Cancels the running groups, and waits until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
