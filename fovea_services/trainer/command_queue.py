"""Commands from gRPC calls to the thread that runs them with all ranks, one at a time, and their results back.

Commands are plain data, which rank 0 sends to the other ranks of this trainer only.
"""

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
from fovea_services.trainer import trainer_metrics
from fovea_services.trainer.batches.datum_decoding import Datum
from fovea_services.trainer.batches.packing import DatumSize
from fovea_services.trainer.model.lora import LoraSettings
from fovea_services.trainer.model.optimizer import Adam


@dataclass(frozen=True)
class Heartbeat:
    """Nothing; keeps idle connections alive and notices ranks that do not answer."""


@dataclass(frozen=True)
class Shutdown:
    """Have every rank leave its loop, and end."""


@dataclass(frozen=True)
class CreateModel:
    """Make a model; full parameters if `lora` is None."""

    model_id: str
    lora: LoraSettings | None


@dataclass(frozen=True)
class RestoreModel:
    """Make a model from its newest durable point."""

    model_id: str
    lora: LoraSettings | None


@dataclass(frozen=True)
class KeepState:
    """Copy a model as it is, and begin to write it as a durable point."""

    model_id: str


@dataclass(frozen=True)
class DeleteModel:
    """Free a model, its gradients and its optimizer; an unknown one is no error."""

    model_id: str


@dataclass(frozen=True)
class PrepareLosses:
    """Start what traced losses are computed with, without waiting for it; says whether all ranks have it ready."""


@dataclass(frozen=True)
class ForwardBackward:
    """Compute a loss. `header` and `datums` are serialized messages that were checked on rank 0; `sizes` are theirs.

    `drop_gradients` drops those that are there already, first. `decoded` is what rank 0 made of the datums when it
    checked; it is not sent.
    """

    model_id: str
    header: bytes
    backward: bool
    drop_gradients: bool
    datums: list[bytes]
    sizes: list[DatumSize]
    decoded: list[Datum] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "decoded": None}


@dataclass(frozen=True)
class ClearGradients:
    """Drop what calls have added to the gradients since the last step."""

    model_id: str


@dataclass(frozen=True)
class OptimStep:
    """Step on the accumulated gradients of all ranks, and drop them. A `seq_id` of 0 is none, here and below."""

    model_id: str
    adam: Adam
    seq_id: int = 0


@dataclass(frozen=True)
class SaveState:
    """Write weights and optimizer."""

    model_id: str
    uri: str


@dataclass(frozen=True)
class LoadState:
    """Read weights, and the optimizer if asked."""

    model_id: str
    uri: str
    optimizer: bool
    seq_id: int = 0


@dataclass(frozen=True)
class TakeSnapshot:
    """Freeze weights under a name."""

    model_id: str
    snapshot_id: str
    uri: str
    is_export: bool = False


@dataclass(frozen=True)
class RestoreSnapshot:
    """Read a snapshot that was dropped from memory back from storage; without `uri`, what recovery keeps of it."""

    snapshot_id: str
    uri: str


@dataclass(frozen=True)
class ForgetSnapshot:
    """Drop a snapshot from memory."""

    snapshot_id: str


@dataclass(frozen=True)
class OpenGroup:
    """Have the senders beside rank 0 meet samplers in a transfer group, and leave those that are not in `kept`."""

    group_id: str
    world_size: int
    backend: str
    join_timeout_s: float
    broadcast_timeout_s: float
    kept: list[str]


@dataclass(frozen=True)
class BroadcastFull:
    """Gather a snapshot of full parameters and send it over an open transfer group, all senders in turns."""

    snapshot_id: str
    group_id: str
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class DescribeFull:
    """Identity and tensors of a snapshot of full parameters, kept until `UnpinFull`; the empty name is the base."""

    snapshot_id: str


@dataclass(frozen=True)
class UnpinFull:
    """The push of a snapshot that was described is over."""

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
    | ClearGradients
    | OptimStep
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

    def fail_all(self, error: FoveaError) -> None:
        """Fails everything that runs or waits, and everything that will be submitted. Callable from any thread."""
        self._broken = error
        for result in list(self._pending):
            resolve(result, error=error)


def resolve(result: "Future[Any]", value: Any = None, error: BaseException | None = None) -> None:
    """Sets the outcome of a future, unless `fail_all` or its caller has been quicker."""
    try:
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)
    except InvalidStateError:
        return
