"""Work in the event loop that outlives whoever asked for it, and work that is tried again.

asyncio keeps only weak references to tasks, drops the failure of one that nobody awaits, and lets the cancellation of
one waiter cancel what others wait for; these helpers do none of it. It has no lock that many may share either.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BackgroundTasks:
    """Tasks that nobody needs to await. A failure is logged under the task's name."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Value], name: str) -> asyncio.Task[Value]:
        """Begins `work`, and keeps hold of it until it ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def join(self) -> None:
        """Returns once all that were started, meanwhile too, have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancels all, and returns once they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.join()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("%s failed", task.get_name(), exc_info=error)


class SingleFlight(Generic[Key, Value]):
    """Calls by key, each made once, however many ask for it while it is under way; all get its answer or its error.

    Args:
        abandon: Whether a call is cancelled when the last of those who asked for it is. Else it runs to its end.
    """

    def __init__(self, abandon: bool = False) -> None:
        self._abandon = abandon
        self._calls: dict[Key, asyncio.Task[Value]] = {}
        self._keys: dict[asyncio.Task[Value], list[Key]] = {}
        self._waiter_counts: dict[asyncio.Task[Value], int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._calls

    async def run(
        self, key: Key, call: Callable[[], Coroutine[Any, Any, Value]], also: Iterable[Key] = (), name: str = ""
    ) -> Value:
        """What the call under way for `key` comes to; `call` begins one if there is none. Raises what that raises.

        Args:
            also: Further keys that the new call answers, but for those which have one under way.
            name: Of the new call, for logs.
        """
        task = self._calls.get(key)
        if task is None:
            task = asyncio.create_task(call(), name=name or f"call for {key}")
            self._keys[task] = [each for each in (key, *also) if self._calls.setdefault(each, task) is task]
            task.add_done_callback(self._forget)
        self._waiter_counts[task] = self._waiter_counts.get(task, 0) + 1
        try:
            # Else the cancellation of one who waits would cancel the call for all.
            return await asyncio.shield(task)
        finally:
            self._leave(task)

    async def cancel(self) -> None:
        """Cancels all calls, and returns once they have ended; who waits for one gets CancelledError."""
        calls = list(self._keys)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _leave(self, task: asyncio.Task[Value]) -> None:
        self._waiter_counts[task] -= 1
        if self._waiter_counts[task]:
            return
        del self._waiter_counts[task]
        if self._abandon and not task.done():
            task.cancel()
            # It may take a while to end, and the next who asks must not get its cancellation.
            self._forget(task)

    def _forget(self, task: asyncio.Task[Value]) -> None:
        for key in self._keys.pop(task, ()):
            self._calls.pop(key, None)
        if task.done() and not task.cancelled():
            task.exception()  # all who asked may have left: then asyncio would complain that nobody has seen it


class SharedLock:
    """A lock that many may share or one may have alone; who waits to be alone comes before those who would share."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._shared_count = 0
        self._exclusive_count = 0  # of those who are alone or wait for it
        self._is_exclusive = False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Beside others that share; waits for whoever is, or wants to be, alone."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._exclusive_count)
            self._shared_count += 1
        try:
            yield
        finally:
            self._shared_count -= 1
            await self._notify()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Alone: waits for whoever is inside, and goes before those who would share."""
        self._exclusive_count += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_exclusive and not self._shared_count)
                self._is_exclusive = True
            try:
                yield
            finally:
                self._is_exclusive = False
        finally:
            self._exclusive_count -= 1
            await self._notify()

    async def _notify(self) -> None:
        # A cancelled holder must still wake the others: the lock is free for an instant at most, so this cannot hang.
        async with self._changed:
            self._changed.notify_all()


async def run_to_end(work: Coroutine[Any, Any, Value]) -> Value:
    """Runs `work` to its end even if the caller is cancelled meanwhile; only then does the cancellation go on.

    Plain `asyncio.shield` lets the caller leave, and release its locks, while the work still runs.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:  # the work's own, whatever it is: the task is done, and its result raises it below
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller gets
        raise cancelled
    return task.result()


async def repeat(work: Callable[[], Coroutine[Any, Any, None]], period_s: float, name: str) -> None:
    """Runs `work` again and again, with a pause of `period_s` after each run, until cancelled. Failures are logged."""
    while True:
        try:
            await work()
        except Exception:  # whatever it is: one that ended the loop would be seen by nobody until a restart
            logger.exception("%s failed; it is tried again in %g s", name, period_s)
        await asyncio.sleep(period_s)


class Backoff:
    """Pauses that double from one attempt to the next, until a deadline.

        backoff = Backoff(deadline_s=60.0)
        while True:
            try:
                return await attempt()
            except Unavailable:
                if backoff.is_over:
                    raise
                await backoff.pause()

    Args:
        deadline_s: Seconds from now until `is_over`.
        first_s: Length of the first pause.
        longest_s: Length that pauses do not pass.
        jitter: The share of a pause, 0 to 1, that chance may take off, so that many do not try at the same moment.
    """

    def __init__(
        self, deadline_s: float = math.inf, first_s: float = 0.1, longest_s: float = 2.0, jitter: float = 0.0
    ) -> None:
        self._ends_at = time.monotonic() + deadline_s
        self._first_s, self._longest_s, self._jitter = first_s, longest_s, jitter
        self.next_s = 0.0
        """Length of the next pause, if the deadline does not cut it short."""
        self.reset()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(self._ends_at - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s == 0.0

    def reset(self) -> None:
        """Begins anew with a short pause, after an attempt that went well. The deadline stays."""
        self._set(self._first_s)

    async def pause(self) -> None:
        """Waits before the next attempt, not beyond the deadline."""
        await asyncio.sleep(min(self.next_s, self.left_s))
        self.lengthen()

    def lengthen(self) -> None:
        """Doubles the next pause, for a caller that has made this one in its own way."""
        self._set(min(2 * self._whole_s, self._longest_s))

    def _set(self, whole_s: float) -> None:
        self._whole_s = whole_s
        self.next_s = whole_s * (1.0 - self._jitter * random.random())
