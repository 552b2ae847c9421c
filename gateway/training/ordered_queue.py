"""The line of one model: commands run one after another, strictly by seq_id, whatever order they arrive in."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from fovea.wire.errors import FoveaError
from gateway.futures.future import Pending

logger = logging.getLogger(__name__)


class Line:
    """Holds what arrived early and runs what is in turn.

    Args:
        model_id: For logs.
        next_seq_id: The first command in turn.
        execute: Runs one command and ends its future, well or badly; never raises.
        refuse: Ends the future of a command that can no longer run.
        skip: Notes that a range of seq ids never arrived.
        gap_timeout_s: How long later commands wait for a missing one, counted from the last arrival.
    """

    def __init__(
        self,
        model_id: str,
        next_seq_id: int,
        execute: Callable[[Pending], Awaitable[None]],
        refuse: Callable[[Pending, FoveaError | None], Awaitable[None]],
        skip: Callable[[int, int], None],
        gap_timeout_s: float,
    ) -> None:
        self._model_id = model_id
        self._next = next_seq_id
        self._execute, self._refuse, self._skip = execute, refuse, skip
        self._gap_timeout_s = gap_timeout_s
        self._waiting: dict[int, Pending] = {}
        self._late: deque[Pending] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed_by: FoveaError | None = None
        self._is_paused = False

    @property
    def in_turn(self) -> int:
        """The seq_id that runs now, or runs next once it has arrived."""
        return self._next

    def add(self, pending: Pending) -> None:
        """Takes a command; returns at once."""
        if pending.seq_id < self._next:
            self._late.append(pending)
        else:
            self._waiting[pending.seq_id] = pending
            if pending.seq_id != self._next:
                pending.place = self._describe
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"line {self._model_id}")

    async def close(self, error: FoveaError) -> None:
        """Refuses what waits and what is to come; the running command ends first."""
        self._closed_by = error
        self._arrived.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def stop(self) -> None:
        """Stops at once, for the end of the process: what waits stays in the database."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def pause(self) -> asyncio.Task[None] | None:
        """Starts nothing more; returns the task to wait for if a command runs now."""
        self._is_paused = True
        self._arrived.set()
        return None if self._task is None or self._task.done() else self._task

    async def _run(self) -> None:
        while (self._waiting or self._late) and not self._is_paused:
            while self._late:
                await self._refuse(self._late.popleft(), self._closed_by)
            if self._closed_by is not None:
                for pending in sorted(self._waiting.values(), key=lambda pending: pending.seq_id):
                    await self._refuse(self._waiting.pop(pending.seq_id), self._closed_by)
            elif self._next in self._waiting:
                await self._execute(self._waiting.pop(self._next))
                self._next += 1
            elif self._waiting:
                await self._wait_for_missing()

    def _describe(self) -> str:
        return f"waiting for request {self._next} of this model"

    async def _wait_for_missing(self) -> None:
        self._arrived.clear()
        try:
            await asyncio.wait_for(self._arrived.wait(), self._gap_timeout_s)
        except TimeoutError:
            first = min(self._waiting)
            logger.warning("%s: requests %d to %d never arrived", self._model_id, self._next, first - 1)
            self._skip(self._next, first - 1)
            self._next = first
