"""Commands from gRPC calls to the thread that runs them with all ranks, one at a time, and their results back."""

import asyncio
import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, Unavailable
from services.trainer import trainer_metrics
from services.trainer.commands import Command, Heartbeat, Shutdown


@dataclass(frozen=True)
class Job:
    """A command, where its result goes, the call that it came with, and when, in seconds of `time.time`."""

    command: Command
    result: "Future[Any]"
    traceparent: str = field(default_factory=tracing.traceparent)
    queued_at: float = field(default_factory=time.time)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """The span of its execution, in whatever thread, if it came with one."""
        if not self.traceparent:
            yield
            return
        with tracing.span(f"command {type(self.command).__name__}", self.traceparent):
            tracing.record("queue", self.queued_at)
            yield


class CommandQueue:
    """First in, first out. `submit` is for the event loop, `next` and the jobs' futures for the rank's thread."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._pending: set[Future[Any]] = set()
        self._broken: FoveaError | None = Unavailable("the trainer is still loading its model")

    def open(self) -> None:
        """Takes commands from now on."""
        self._broken = None

    def check(self) -> None:
        """Raises why no command would be taken: still loading, or broken. Callable from any thread."""
        if self._broken is not None:
            raise self._broken

    async def submit(self, command: Command) -> Any:
        """Runs a command on all ranks and returns its result on rank 0.

        Raises what the command raises, Unavailable if the trainer breaks. A command whose caller leaves before its
        turn is not run; one that runs is not interrupted.
        """
        self.check()
        result: Future[Any] = Future()
        self._pending.add(result)
        result.add_done_callback(self._pending.discard)
        trainer_metrics.QUEUED.inc()
        self._jobs.put(Job(command, result))
        return await asyncio.wrap_future(result)

    def next(self) -> Job:
        """The next job; a heartbeat if there is none for a while."""
        while True:
            try:
                job = self._jobs.get(timeout=self._heartbeat_s)
            except queue.Empty:
                return Job(Heartbeat(), Future())
            trainer_metrics.QUEUED.dec()
            if job.result.set_running_or_notify_cancel():
                trainer_metrics.QUEUE_SECONDS.observe(max(time.time() - job.queued_at, 0.0))
                return job

    def shut_down(self) -> None:
        """Makes the ranks leave once all that is queued has run."""
        trainer_metrics.QUEUED.inc()
        self._jobs.put(Job(Shutdown(), Future()))

    def break_down(self, error: FoveaError) -> None:
        """Fails everything that runs or waits, and everything that will be submitted. Callable from any thread."""
        self._broken = error
        for result in list(self._pending):
            settle(result, error=error)


def settle(result: "Future[Any]", value: Any = None, error: BaseException | None = None) -> None:
    """Sets the outcome of a future, unless `break_down` or its caller has been quicker."""
    try:
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)
    except InvalidStateError:
        return
