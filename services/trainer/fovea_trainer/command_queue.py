"""The queue that passes commands from gRPC calls to the thread that runs them, and returns their results.

That thread runs one command at a time, together with all other ranks. Commands are plain data. Rank 0 sends them to the
other ranks of this trainer only.
"""

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, Unavailable
from fovea_trainer import trainer_metrics
from fovea_trainer.batches.datum_decoding import Datum, DatumSize
from fovea_trainer.batches.places import MOST_SLOTS, PassTerms, Place
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam

_AHEAD = 2
"""The number of waiting commands for which models return to the device while earlier commands run."""


@dataclass(frozen=True)
class Heartbeat:
    """Does nothing. Keeps idle connections alive and detects ranks that do not answer."""


@dataclass(frozen=True)
class Shutdown:
    """Makes every rank leave its loop and end."""


@dataclass(frozen=True)
class CreateModel:
    """Creates a model: an adapter, or full parameters if `lora` is None."""

    model_id: str
    lora: LoraSettings | None


@dataclass(frozen=True)
class RestoreModel:
    """Creates a model from its newest durable point."""

    model_id: str
    lora: LoraSettings | None


@dataclass(frozen=True)
class KeepState:
    """Copies the current state of a model and starts writing it as a durable point.

    Returns None without a copy if `change_count` is set and the model has changed more often.
    """

    model_id: str
    change_count: int | None = None


@dataclass(frozen=True)
class DeleteModel:
    """Frees a model, its gradients and its optimizer. Does nothing if it is unknown."""

    model_id: str


@dataclass(frozen=True)
class PrepareLosses:
    """Starts the workers for traced losses without waiting. Returns True if the workers of all ranks are ready."""


@dataclass(frozen=True)
class ForwardBackward:
    """Computes a loss.

    Args:
        model_id: Id of the model.
        header: The serialized header, checked on rank 0.
        backward: True to add to the model's gradients.
        drop_gradients: True to drop existing gradients first.
        datums: The serialized datums, checked on rank 0.
        sizes: Size of each datum.
        decoded: The decoded datums, on rank 0 only; not sent to other ranks.
        share: The conditions under which the call may share a pass; None if it computes alone.
        place: The place of a shared pass in which the call must run, because it ran there before; None for any.
    """

    model_id: str
    header: bytes
    backward: bool
    drop_gradients: bool
    datums: list[bytes]
    sizes: list[DatumSize]
    decoded: list[Datum] | None = None
    share: PassTerms | None = None
    place: Place | None = None

    def __getstate__(self) -> dict[str, Any]:
        share = self.share and replace(self.share, kind=None)  # only rank 0 compares kinds
        return {**self.__dict__, "decoded": None, "share": share}


@dataclass(frozen=True)
class SharedPass:
    """Computes calls of different models together. Its result has the result or the error of each call."""

    calls: list[ForwardBackward]


@dataclass(frozen=True)
class ClearGradients:
    """Drops the gradients accumulated since the last step."""

    model_id: str


@dataclass(frozen=True)
class OptimStep:
    """Takes an optimizer step on the gradients of all ranks, and drops them.

    Here and in `LoadState`, a `seq_id` of 0 means that the command has no number.
    """

    model_id: str
    adam: Adam
    seq_id: int = 0
    share: ClassVar[PassTerms] = PassTerms("optim_step", 1, MOST_SLOTS)


@dataclass(frozen=True)
class SharedSteps:
    """Takes optimizer steps of different models together. Its result has the answer or the error of each step."""

    calls: list[OptimStep]


@dataclass(frozen=True)
class SaveState:
    """Writes weights and optimizer."""

    model_id: str
    uri: str


@dataclass(frozen=True)
class LoadState:
    """Reads weights, and the optimizer if `optimizer` is set."""

    model_id: str
    uri: str
    optimizer: bool
    seq_id: int = 0


@dataclass(frozen=True)
class TakeSnapshot:
    """Freezes weights as a named snapshot."""

    model_id: str
    snapshot_id: str
    uri: str
    is_export: bool = False


@dataclass(frozen=True)
class RestoreSnapshot:
    """Reads a snapshot back into memory: from `uri`, or from the recovery store if `uri` is empty."""

    snapshot_id: str
    uri: str


@dataclass(frozen=True)
class ForgetSnapshot:
    """Drops a snapshot from memory."""

    snapshot_id: str


@dataclass(frozen=True)
class OpenGroup:
    """Makes the senders other than rank 0 join a transfer group with samplers, and close all groups not in `kept`."""

    group_id: str
    world_size: int
    backend: str
    join_timeout_s: float
    broadcast_timeout_s: float
    part_count: int
    kept: list[str]


@dataclass(frozen=True)
class BroadcastFull:
    """Gathers a full-parameter snapshot and sends to each worker its parts, by `splits`, a serialized SnapshotReady."""

    snapshot_id: str
    group_id: str
    splits: bytes
    part_count: int
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class DescribeFull:
    """Returns the identity and the tensor specs of a full-parameter snapshot. The empty id means the base.

    The snapshot stays in memory until `UnpinFull`.
    """

    snapshot_id: str


@dataclass(frozen=True)
class UnpinFull:
    """Ends the push of a full-parameter snapshot, which may then be dropped from memory."""

    snapshot_id: str


Command = (
    Heartbeat
    | Shutdown
    | CreateModel
    | RestoreModel
    | KeepState
    | DeleteModel
    | PrepareLosses
    | ForwardBackward
    | SharedPass
    | ClearGradients
    | OptimStep
    | SharedSteps
    | SaveState
    | LoadState
    | TakeSnapshot
    | RestoreSnapshot
    | ForgetSnapshot
    | OpenGroup
    | BroadcastFull
    | DescribeFull
    | UnpinFull
)


@dataclass(frozen=True)
class Job:
    """A queued command.

    Args:
        command: The command.
        result: Receives the result or error.
        traceparent: Trace context of the call; empty without tracing.
        queued_at: Time of queueing, a reading of `time.time`.
        seconds: The rank's thread appends the seconds of execution.
    """

    command: Command
    result: "Future[Any]"
    traceparent: str = field(default_factory=tracing.traceparent)
    queued_at: float = field(default_factory=time.time)
    seconds: list[float] = field(default_factory=list)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Records a tracing span around the execution of the command, if the call is traced. Works in any thread."""
        if not self.traceparent:
            yield
            return
        with tracing.span(f"command {type(self.command).__name__}", self.traceparent):
            tracing.record("queue", self.queued_at)
            yield


class CommandQueue:
    """A first-in, first-out queue of commands.

    `submit` is for the event loop, `next` and the jobs' futures are for the rank's thread.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._put_back: deque[Job] = deque()
        self._pending: set[Future[Any]] = set()
        self._broken: FoveaError | None = Unavailable("the trainer is still loading its model")

    def open(self) -> None:
        """Starts accepting commands."""
        self._broken = None

    def check(self) -> None:
        """Checks that commands are accepted. Callable from any thread.

        Raises:
            FoveaError: The trainer is still loading or is broken. The message says which.
        """
        if self._broken is not None:
            raise self._broken

    async def submit(self, command: Command, seconds: list[float] | None = None) -> Any:
        """Runs a command on all ranks and returns rank 0's result.

        A command is not run if its caller is cancelled before the command starts. A running command is not interrupted.

        Args:
            command: The command.
            seconds: Receives the seconds of its execution.

        Raises:
            Unavailable: The trainer is still loading, or it broke. Errors of the command are passed on.
        """
        self.check()
        result: Future[Any] = Future()
        self._pending.add(result)
        result.add_done_callback(self._pending.discard)
        trainer_metrics.QUEUED.inc()
        self._jobs.put(Job(command, result, seconds=[] if seconds is None else seconds))
        return await asyncio.wrap_future(result)

    def next(self, fit: Callable[[Sequence[str]], bool] = lambda model_ids: True) -> list[Job]:
        """Returns the next job, or a heartbeat if no job arrives for `heartbeat_s` seconds.

        A call that may share a pass comes with all waiting calls of other models that can share it, and an optimizer
        step with other models' steps. Jobs of one model keep their order.

        Args:
            fit: Returns True if the models of these ids fit on the device together.
        """
        while True:
            try:
                job = self._put_back.popleft() if self._put_back else self._jobs.get(timeout=self._heartbeat_s)
            except queue.Empty:
                return [Job(Heartbeat(), Future())]
            if self._starts(job):
                return [job, *self._sharing(job, fit)]

    def _starts(self, job: Job) -> bool:
        """Marks a job as running. Returns False if its caller is gone."""
        trainer_metrics.QUEUED.dec()
        if not job.result.set_running_or_notify_cancel():
            return False
        trainer_metrics.QUEUE_SECONDS.observe(max(time.time() - job.queued_at, 0.0))
        return True

    def _sharing(self, first: Job, fit: Callable[[Sequence[str]], bool]) -> Iterator[Job]:
        """Starts and yields the waiting jobs that can be done together with the first one."""
        share: PassTerms | None = getattr(first.command, "share", None)
        if share is None:
            return
        with suppress(queue.Empty):
            while True:
                self._put_back.append(self._jobs.get_nowait())
        together = [getattr(first.command, "model_id", "")]
        passed = set(together)
        for job in list(self._put_back):
            model_id: str = getattr(job.command, "model_id", "")
            other: PassTerms | None = getattr(job.command, "share", None)
            may_share = len(together) < share.most and model_id not in passed
            if may_share and other is not None and share.takes(other) and fit([*together, model_id]):
                self._put_back.remove(job)
                if self._starts(job):
                    together.append(model_id)
                    yield job
            passed.add(model_id)

    def ahead(self) -> list[Command]:
        """Returns the next waiting commands, without removing them."""
        with self._jobs.mutex:
            return [job.command for job in islice([*self._put_back, *self._jobs.queue], _AHEAD)]

    def shut_down(self) -> None:
        """Makes the ranks exit after all queued commands."""
        trainer_metrics.QUEUED.inc()
        self._jobs.put(Job(Shutdown(), Future()))

    def fail_all(self, error: FoveaError) -> None:
        """Fails all running and queued commands, and all later ones. Callable from any thread."""
        self._broken = error
        for result in list(self._pending):
            resolve(result, error=error)


def resolve(result: "Future[Any]", value: Any = None, error: BaseException | None = None) -> None:
    """Sets the outcome of a future, unless `fail_all` or a cancellation has already done so."""
    try:
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)
    except InvalidStateError:
        return
