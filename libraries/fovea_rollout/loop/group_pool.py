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
    """A group that runs: its index, the weights with which it began, and how often it was cancelled before."""

    index: int
    version: int
    cancelled: int = 0


class GroupPool:
    """A pool of groups that run in the background.

    Args:
        play: Plays one group.
        total: The number of groups in the whole run.
        begun: The number of groups that an earlier part of the run has begun; indices continue from there.
        replays: How often an overdue group is cancelled and played again, before `take` waits for it.

    Attributes:
        cancelled: The number of groups that were cancelled and played again.
    """

    def __init__(self, play: Play, total: int, begun: int = 0, replays: int = 0) -> None:
        self._play = play
        self._total = total
        self._count = begun
        self._replays = replays
        self.cancelled = 0
        # In the order in which the groups began.
        self._tasks: dict[asyncio.Task[Sequence[Trajectory]], _Begun] = {}
        self._ending: set[asyncio.Task[Sequence[Trajectory]]] = set()

    def fill(self, policy: Policy, version: int, count: int) -> None:
        """Begins groups until `count` are in the pool, or the run has no more groups."""
        while len(self._tasks) < count and self._count < self._total:
            self._begin(policy, _Begun(self._count, version))
            self._count += 1

    def _begin(self, policy: Policy, begun: _Begun) -> None:
        task = asyncio.create_task(self._play(policy, begun.index), name=f"group {begun.index}")
        self._tasks[task] = begun

    async def take(self, count: int, policy: Policy, version: int, overdue: int) -> list[Sequence[Trajectory]]:
        """Waits for `count` groups that began with weights of version `overdue` or newer.

        At most `count` groups of the pool began with `overdue`, because the last call left `count`. Those that still
        run when `count` others are done would be too old at the next call. They are cancelled and played again with the
        newest weights. The call waits for those that were cancelled `replays` times.

        Args:
            count: The number of groups.
            policy: The policy for groups that are played again.
            version: Version of its weights.
            overdue: The oldest version of this step.

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
            late = [task for task, begun in running.items() if begun.version <= overdue]
            if len(done) >= count:
                waited = [task for task in late if not self._replay(task, policy, version)]
                if not waited:
                    break
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        taken = done[:count]
        for task in taken:
            del self._tasks[task]
        return [task.result() for task in taken]

    def _replay(self, task: asyncio.Task[Sequence[Trajectory]], policy: Policy, version: int) -> bool:
        """Cancels a group and plays it again, unless it was cancelled too often. Returns whether it did."""
        begun = self._tasks[task]
        if begun.cancelled >= self._replays:
            return False
        del self._tasks[task]
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self.cancelled += 1
        self._begin(policy, _Begun(begun.index, version, begun.cancelled + 1))
        return True

    async def close(self) -> None:
        """Cancels the running groups, and waits until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._ending, return_exceptions=True)
        self._tasks.clear()
