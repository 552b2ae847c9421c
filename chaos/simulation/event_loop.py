"""An event loop whose time passes only when nothing is left to do, and processes in it that end as by SIGKILL.

What is ready runs in the order in which it became ready, as asyncio promises; what a seed decides is how long messages,
threads and services take.
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
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_MOST_STEPS = 3_000_000
"""Of one run: above, it goes round in circles."""


class Stuck(Exception):
    """Nothing can happen any more, or the same happens for ever."""


class Process:
    """Whoever ends at once: what it had running or waiting never runs again, and nothing is cleaned up.

    Attributes:
        is_alive: Until it is killed.
        frozen: What waits while it is stopped, as by SIGSTOP; None while it runs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.frozen: list[asyncio.Handle] | None = None
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Begins something in it."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, name=name or self.name, context=self.context.copy())

    def call_later(self, delay_s: float, callback: Callable[..., Any], *arguments: Any) -> None:
        """Calls something in it later."""
        asyncio.get_running_loop().call_later(delay_s, callback, *arguments, context=self.context)

    def kill(self) -> None:
        """Ends it."""
        self.is_alive = False

    def freeze(self) -> None:
        """Stops it until `thaw`: time goes on for all others."""
        self.frozen = []

    def thaw(self) -> None:
        """Lets it go on with all that has become due."""
        waiting, self.frozen = self.frozen or [], None
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.resume(waiting)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Task(asyncio.Task[T]):
    """A task that sets hold in the order in which tasks were begun, not by where memory happened to be free."""

    _numbers = itertools.count()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = next(_Task._numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that work without sockets and threads uses.

    Args:
        thread_delay_s: How long a thread takes before its work, and how long the loop takes to learn of its end.
    """

    def __init__(self, thread_delay_s: Callable[[], float]) -> None:
        self._thread_delay_s = thread_delay_s
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self.steps = 0
        self.complaints: list[str] = []
        """What was reported to the loop as an error that nobody caught."""

    def time(self) -> float:
        return self._now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs until `main` ends. Raises what it raises, and Stuck if nothing can happen any more."""
        asyncio._set_running_loop(self)
        old_hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        try:
            task = self.create_task(main, name="main")
            while not task.done():
                self._step()
            return task.result()
        finally:
            sys.set_asyncgen_hooks(*old_hooks)
            asyncio._set_running_loop(None)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise Stuck(f"{_MOST_STEPS} steps, and {self._now:.0f} s on the clock: it goes round in circles")
        if not self._ready:
            if not self._timers:
                raise Stuck("everybody waits and nothing is to come")
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
        """Has what was put off run now."""
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
            # Held, as asyncio holds tasks weakly: those of a killed process must not be collected, and so closed.
            process.tasks[hash(task)] = task
            task.add_done_callback(lambda done: process.tasks.pop(hash(done), None))
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Runs a function at some time soon, at one go. A process that is killed before has not run it; one that is
        killed right after has, and never knew.
        """
        done = self.create_future()
        self.call_later(self._thread_delay_s(), self._run_function, done, func, args)
        return done

    def _run_function(self, done: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = func(*args)
        except Exception as raised:
            error = raised
        self.call_later(self._thread_delay_s(), _settle, done, result, error)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

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
