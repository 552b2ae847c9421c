"""Work in the event loop that outlives whoever asked for it: in the background, shared by many, or not to be stopped.

asyncio keeps only weak references to tasks, drops the failure of one that nobody awaits, and lets the cancellation of
one waiter cancel what others wait for; these helpers do none of it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable
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
            for each in (key, *also):
                self._calls.setdefault(each, task)
            task.add_done_callback(self._forget)
        self._waiter_counts[task] = self._waiter_counts.get(task, 0) + 1
        try:
            # Else the cancellation of one who waits would cancel the call for all.
            return await asyncio.shield(task)
        finally:
            self._leave(task)

    async def cancel(self) -> None:
        """Cancels all calls, and returns once they have ended; who waits for one gets CancelledError."""
        calls = set(self._calls.values())
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
        self._calls = {key: call for key, call in self._calls.items() if call is not task}
        if task.done() and not task.cancelled():
            task.exception()  # all who asked may have left: then asyncio would complain that nobody has seen it


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
        except Exception:
            break  # the task's own failure, raised below
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
        except Exception:
            logger.exception("%s failed; it is tried again in %g s", name, period_s)
        await asyncio.sleep(period_s)
