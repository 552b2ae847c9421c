"""Threads in virtual time. Their functions run in real threads, one at a time, so that a function can wait for an event
while time passes for all others.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any

Ended = Callable[[Any, Exception | None], None]
"""Receives a function's result or error."""


class Killed(BaseException):
    """Raised in a function that still waits when the world ends."""


class _Thread(threading.Thread):
    """A thread that runs one function after another, each time until the function ends or waits.

    Attributes:
        pause_s: Seconds for which the function waits; None once it has ended.
        result: The result of the last function.
        error: The error of the last function.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="simulated thread")
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._function: Callable[[], Any] | None = None
        self._is_killed = False
        self.pause_s: float | None = None
        self.result: Any = None
        self.error: Exception | None = None

    def begin(self, function: Callable[[], Any]) -> None:
        """Runs a function until it ends or waits."""
        self._function, self.result, self.error = function, None, None
        self.proceed()

    def proceed(self) -> None:
        """Continues a function that waits, until it ends or waits again."""
        self.pause_s = None
        self._turn.release()
        self._back.acquire()

    def wait(self, pause_s: float) -> None:
        """Waits in virtual time. The function calls this."""
        self.pause_s = pause_s
        self._back.release()
        self._turn.acquire()
        if self._is_killed:
            raise Killed

    def kill(self) -> None:
        """Ends the thread, and first the function if one waits."""
        self._is_killed = True
        self._turn.release()
        self.join()

    def run(self) -> None:
        while True:
            self._turn.acquire()
            if self._is_killed or self._function is None:
                return
            try:
                self.result = self._function()
            except Exception as error:
                self.error = error
            except Killed:
                return
            self._function = None
            self._back.release()


class Event(threading.Event):
    """An event on which simulated threads wait in virtual time. They notice it at the end of their timeout."""

    def wait(self, timeout: float | None = None) -> bool:
        thread = threading.current_thread()
        if not isinstance(thread, _Thread):
            return super().wait(timeout)
        assert timeout is not None
        if not self.is_set():
            thread.wait(timeout)
        return self.is_set()


class Threads:
    """The threads of one world.

    Args:
        call_later: Schedules a callback, in the current process.
    """

    def __init__(self, call_later: Callable[..., Any]) -> None:
        self._call_later = call_later
        self._idle: list[_Thread] = []
        self._all: list[_Thread] = []
        self._queues: defaultdict[Executor | None, deque[tuple[Context, Callable[[], Any], Ended]]] = defaultdict(deque)

    def run(self, executor: Executor | None, function: Callable[[], Any], ended: Ended) -> None:
        """Runs a function, after those before it if its executor has only one thread."""
        job = copy_context(), function, ended
        if isinstance(executor, ThreadPoolExecutor) and executor._max_workers == 1:
            queue = self._queues[executor]
            queue.append(job)
            if len(queue) == 1:
                self._begin(job, executor)
        else:
            self._begin(job, None)

    def end(self) -> None:
        """Ends all threads, and the functions of killed processes that still wait."""
        for thread in self._all:
            thread.kill()

    def _begin(self, job: tuple[Context, Callable[[], Any], Ended], executor: Executor | None) -> None:
        context, function, ended = job
        if not self._idle:
            thread = _Thread()
            thread.start()
            self._idle.append(thread)
            self._all.append(thread)
        thread = self._idle.pop()
        thread.begin(lambda: context.copy().run(function))
        self._look(thread, ended, executor)

    def _proceed(self, thread: _Thread, ended: Ended, executor: Executor | None) -> None:
        thread.proceed()
        self._look(thread, ended, executor)

    def _look(self, thread: _Thread, ended: Ended, executor: Executor | None) -> None:
        if thread.pause_s is not None:
            self._call_later(thread.pause_s, self._proceed, thread, ended, executor)
            return
        result, error = thread.result, thread.error
        self._idle.append(thread)
        ended(result, error)
        if executor is not None:
            queue = self._queues[executor]
            queue.popleft()
            if queue:
                self._call_later(0.0, self._begin, queue[0], executor)
