"""An event loop with virtual time, which advances only when nothing is left to do, and processes that can be killed.

Ready callbacks run in the order in which they became ready, as asyncio guarantees. The seed determines how long
messages, threads and services take.
"""

import asyncio
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from chaos.simulation.threads import Threads

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_MOST_STEPS = 3_000_000
"""Maximum number of steps in one run; more means an endless loop."""


class Stuck(Exception):
    """Nothing can happen any more, or the same happens forever."""


class Process:
    """A process that can end abruptly, as with SIGKILL: its running and waiting work never continues, without any
    cleanup.

    Attributes:
        is_alive: True until it is killed.
        killed: Set once it is killed.
        frozen: Work that waits while the process is stopped, as with SIGSTOP; None while it runs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive, self.killed = True, asyncio.Event()
        self.frozen: list[asyncio.Handle] | None = None
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Starts a task in this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, name=name or self.name, context=self.context.copy())

    def call_later(self, delay_s: float, callback: Callable[..., Any], *arguments: Any) -> None:
        """Schedules a callback in this process."""
        asyncio.get_running_loop().call_later(delay_s, callback, *arguments, context=self.context)

    def kill(self) -> None:
        """Kills the process."""
        self.is_alive = False
        self.killed.set()

    def freeze(self) -> None:
        """Stops the process until `thaw`, while time passes for all others."""
        self.frozen = []

    def thaw(self) -> None:
        """Resumes the process, with everything that has become due."""
        waiting, self.frozen = self.frozen or [], None
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.resume(waiting)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Task(asyncio.Task[T]):
    """A task with a hash by creation order, so that the order in sets does not depend on memory addresses."""

    _numbers = itertools.count()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = next(_Task._numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.AbstractEventLoop):
    """The methods of an event loop that work without sockets and threads needs.

    Args:
        thread_delay_s: Returns the delay of a thread's start, and of the notification of its end.
        has_threads: Whether functions run in threads, so that they may wait.
    """

    def __init__(self, thread_delay_s: Callable[[], float], has_threads: bool = False) -> None:
        self._threads = Threads(self.call_later) if has_threads else None
        self._thread_delay_s = thread_delay_s
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self.steps = 0
        self.complaints: list[str] = []
        """Errors reported to the loop because no code caught them."""

    def time(self) -> float:
        return self._now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs until `main` ends and returns its result. Raises its errors, and Stuck if nothing more can happen."""
        asyncio._set_running_loop(self)
        old_hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        try:
            task = self.create_task(main, name="main")
            while not task.done():
                self._step()
            return task.result()
        finally:
            if self._threads is not None:
                self._threads.end()
            sys.set_asyncgen_hooks(*old_hooks)
            asyncio._set_running_loop(None)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise Stuck(f"{_MOST_STEPS} steps, and {self._now:.0f} s on the clock: an endless loop")
        if not self._ready:
            if not self._timers:
                raise Stuck("every task waits, and no event is scheduled")
            self._now = max(self._now, self._timers[0][0])
            while self._timers and self._timers[0][0] <= self._now:
                self._ready.append(heapq.heappop(self._timers)[2])
        handle = self._ready.popleft()
        if handle.cancelled():
            return
        process: Process | None = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None and process.frozen is not None:
            process.frozen.append(handle)
        elif process is None or process.is_alive:
            handle._run()

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Runs deferred callbacks now."""
        self._ready.extend(handles)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:  # fmt: skip
        task: _Task[T] = _Task(coro, loop=self, name=name, context=context)
        process = (context or copy_context()).get(PROCESS)
        if process is not None:
            # Keep a reference, because asyncio holds tasks weakly: those of a killed process must not be collected and
            # closed.
            process.tasks[hash(task)] = task
            task.add_done_callback(lambda done: process.tasks.pop(hash(done), None), context=context)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Runs a function a little later, in one step.

        A process that is killed before has not run it. A process that is killed directly after has run it without
        learning the result.
        """
        done = self.create_future()
        self.call_later(self._thread_delay_s(), self._run_function, executor, done, partial(func, *args))
        return done

    def _run_function(self, executor: Executor | None, done: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        def end(result: Any, error: Exception | None) -> None:
            self.call_later(self._thread_delay_s(), _settle, done, result, error)

        if self._threads is not None:
            self._threads.run(executor, function, end)
            return
        result: Any = None
        error: Exception | None = None
        try:
            result = function()
        except Exception as raised:
            error = raised
        end(result, error)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing; a cancelled timer is skipped when it is due."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        source = context.get("task") or context.get("future") or ""
        self.complaints.append(f"{context.get('message')}: {context.get('exception')!r} {source}")

    def _close_generator(self, generator: Any) -> None:
        with suppress(RuntimeError):
            self.call_soon(self.create_task, generator.aclose())


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
