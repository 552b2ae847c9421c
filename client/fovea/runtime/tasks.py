"""Helpers for asyncio: background tasks, shared calls, a read-write lock, retries and periodic work.

asyncio holds only weak references to tasks, drops the failure of a task that is not awaited, and lets the cancellation
of one waiter cancel a task that others wait for. These helpers avoid all three. asyncio also has no read-write lock.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BackgroundTasks:
    """Tasks that need not be awaited. Failures are logged under the task's name."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Value], name: str) -> asyncio.Task[Value]:
        """Starts `work` and holds a reference to it until it ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def join(self) -> None:
        """Waits until all tasks have ended, including those started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        for task in self._tasks:
            task.cancel()
        await self.join()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("%s failed", task.get_name(), exc_info=error)


class SingleFlight(Generic[Key, Value]):
    """Shared calls, one per key at a time. All callers that ask for a key meanwhile get the call's result or error.

    Args:
        abandon: Whether to cancel a call when its last waiter is cancelled. If false, the call runs to its end.
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
        """Returns the result of the running call for `key`, or of `call` if none is running. Raises the call's errors.

        Args:
            key: Key of the call.
            call: Starts the call.
            also: Further keys that the new call answers, except those with a running call.
            name: Name of the new call, for logs.
        """
        task = self._calls.get(key)
        if task is None:
            task = asyncio.create_task(call(), name=name or f"call for {key}")
            self._keys[task] = [each for each in (key, *also) if self._calls.setdefault(each, task) is task]
            task.add_done_callback(self._forget)
        self._waiter_counts[task] = self._waiter_counts.get(task, 0) + 1
        try:
            # Without the shield, the cancellation of one waiter would cancel the call for all.
            return await asyncio.shield(task)
        finally:
            self._leave(task)

    async def cancel(self) -> None:
        """Cancels all calls and waits until they have ended. Their waiters get CancelledError."""
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
            # The call may take a while to end. Forget it now, so that the next caller does not get its cancellation.
            self._forget(task)

    def _forget(self, task: asyncio.Task[Value]) -> None:
        for key in self._keys.pop(task, ()):
            self._calls.pop(key, None)
        if task.done() and not task.cancelled():
            task.exception()  # if all waiters have left, asyncio would warn about an exception that was never retrieved


class SharedLock:
    """A read-write lock for asyncio: many shared holders or one exclusive holder. Exclusive waiters go first."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._shared_count = 0
        self._exclusive_count = 0  # exclusive holders, present and waiting
        self._is_exclusive = False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Holds the lock together with other shared holders. Waits for present and waiting exclusive holders."""
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
        """Holds the lock exclusively. Waits for present holders and goes before waiting shared holders."""
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
        # A cancelled holder must still wake the others. This cannot hang, because the condition is held only for an
        # instant.
        async with self._changed:
            self._changed.notify_all()


class Members(Generic[Value]):
    """The members that are present, and a way to wait until all have left."""

    def __init__(self) -> None:
        self._members: list[Value] = []
        self._empty = asyncio.Event()
        self._empty.set()

    def __iter__(self) -> Iterator[Value]:
        return iter(list(self._members))

    def __bool__(self) -> bool:
        return bool(self._members)

    @contextmanager
    def joined(self, member: Value) -> Iterator[Value]:
        """Keeps a member present for the duration of the block."""
        self._members.append(member)
        self._empty.clear()
        try:
            yield member
        finally:
            self._members.remove(member)
            if not self._members:
                self._empty.set()

    async def wait_empty(self) -> None:
        """Waits until no member is present."""
        await self._empty.wait()


async def run_to_end(work: Coroutine[Any, Any, Value]) -> Value:
    """Runs `work` to its end even if the caller is cancelled meanwhile, then raises the cancellation.

    With plain `asyncio.shield`, the caller would leave and release its locks while the work still runs.
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
        except Exception:  # an error of the work: the task is done, and `result` below raises it
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # marks it as retrieved; the caller gets the cancellation
        raise cancelled
    return task.result()


async def repeat(work: Callable[[], Coroutine[Any, Any, None]], period_s: float, name: str) -> None:
    """Runs `work` until cancelled, with a pause of `period_s` seconds after each run. Failures are logged."""
    while True:
        try:
            await work()
        except Exception:  # catch everything, so that a failure cannot end the loop unnoticed
            logger.exception("%s failed; retrying in %g s", name, period_s)
        await asyncio.sleep(period_s)


class Backoff:
    """Pauses between attempts that double each time, until a deadline.

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
        first_s: Seconds of the first pause.
        longest_s: Maximum seconds of a pause.
        jitter: Fraction of a pause, 0 to 1, that is removed at random, so that many clients do not retry at the same
            moment.
    """

    def __init__(
        self, deadline_s: float = math.inf, first_s: float = 0.1, longest_s: float = 2.0, jitter: float = 0.0
    ) -> None:
        self._ends_at = time.monotonic() + deadline_s
        self._first_s, self._longest_s, self._jitter = first_s, longest_s, jitter
        self.next_s = 0.0
        """Seconds of the next pause, unless the deadline shortens it."""
        self.reset()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(self._ends_at - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """True once the deadline has passed."""
        return self.left_s == 0.0

    def reset(self) -> None:
        """Starts again with a short pause, after a successful attempt. The deadline does not change."""
        self._set(self._first_s)

    async def pause(self) -> None:
        """Waits before the next attempt, but not beyond the deadline."""
        await asyncio.sleep(min(self.next_s, self.left_s))
        self.lengthen()

    def lengthen(self) -> None:
        """Doubles the next pause, for a caller that pauses in its own way."""
        self._set(min(2 * self._whole_s, self._longest_s))

    def _set(self, whole_s: float) -> None:
        self._whole_s = whole_s
        self.next_s = whole_s * (1.0 - self._jitter * random.random())
