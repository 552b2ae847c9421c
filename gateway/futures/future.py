"""A future: one accepted piece of work, its state and its outcome."""

import asyncio
import enum
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from google.rpc import status_pb2

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, Internal, from_status, to_status
from gateway import stages

logger = logging.getLogger(__name__)

_OUTCOME_BYTES = 1024
"""Of an outcome's objects and of what finds it, whatever is in it."""


class Kind(enum.StrEnum):
    """What kind of work; decides how request and result are read."""

    CREATE_MODEL = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_STATE = "save_state"
    LOAD_STATE = "load_state"
    SAVE_FOR_SAMPLER = "save_for_sampler"
    SAVE_EXTERNAL = "save_external"
    SAMPLE = "sample"
    CREATE_CUSTOM_LOSS = "create_custom_loss"


class State(enum.StrEnum):
    """Where it stands, as the database has it."""

    QUEUED = "queued"
    REJECTED = "rejected"
    """Accepted, but its content is wrong: it fails when its turn comes. The request blob holds the status."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """The result blob holds the status."""


UNFINISHED = (State.QUEUED, State.REJECTED, State.RUNNING)


class QueueState(enum.StrEnum):
    """What a poll of an unfinished future says; the words are the SDK's."""

    ACTIVE = "active"
    PAUSED = "paused_capacity"


class Outcome(NamedTuple):
    """How a future ended: a result, or an error."""

    kind: Kind
    result: bytes
    error: FoveaError | None = None

    @property
    def state(self) -> State:
        """The state to keep."""
        return State.DONE if self.error is None else State.FAILED

    @property
    def held_bytes(self) -> int:
        """What it takes in memory, an error as well as a result."""
        return _OUTCOME_BYTES + len(self.result) + (len(self.error.message) if self.error is not None else 0)

    def to_blob(self) -> bytes:
        """What the database keeps."""
        return self.result if self.error is None else to_status(self.error).SerializeToString()

    @classmethod
    def from_blob(cls, kind: Kind, state: State, blob: bytes) -> "Outcome":
        """Reads what `to_blob` wrote."""
        return cls(kind, blob) if state is State.DONE else cls(kind, b"", error_from_blob(blob))


def error_from_blob(blob: bytes) -> FoveaError:
    """Reads a serialized google.rpc.Status."""
    return from_status(status_pb2.Status.FromString(blob))


@dataclass(eq=False)
class Pending:
    """A future that has not ended.

    Attributes:
        request: Serialized request, or None if it must be read from the database.
        rejection: Why it will fail when its turn comes.
        sampled: Whose weights a sample is drawn from, once that is known: a trained model's id, or the base's name.
        traceparent: The call that submitted it; empty without tracing and after a restart.
        known_failure: The failed forward_backward, by seq_id, of which the caller had been told before it sent this.
        begun_at: When its turn came, seconds of `time.time`; None while it waits.
        place: What it waits for as long as it stands in a line of many: asked for, not told to each.
        work: The task that works on it, if cancelling is possible.
        accepted: Set once the submission is kept, or has failed to be.
        refusal: Why it could not be kept.
        done: Set once there is an outcome.
        woken: Set when waiters should look, done or not.
    """

    future_id: str
    kind: Kind
    owner: str
    session_id: str
    scope: str
    seq_id: int
    request: bytes | None
    rejection: FoveaError | None = None
    state: State = State.QUEUED
    created_at: float = field(default_factory=time.time)
    sampled: str = ""
    traceparent: str = field(default_factory=tracing.traceparent)
    known_failure: int | None = None
    begun_at: float | None = None
    queue_state: QueueState = QueueState.ACTIVE
    place: Callable[[], str] | None = None
    work: asyncio.Task[None] | None = None
    is_finishing: bool = False
    refusal: BaseException | None = None
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    _reason: str = "queued"

    @property
    def model(self) -> str:
        """What it belongs to: a trained model's id, or the base's name; empty if neither is known."""
        return self.sampled if self.kind in (Kind.SAMPLE, Kind.CREATE_CUSTOM_LOSS) else self.scope

    def begin(self) -> None:
        """Notes that its turn has come; a repeat changes nothing."""
        if self.begun_at is None:
            self.begun_at = time.time()
            stages.waited(self.kind.value, self.created_at)

    def wait_on(self, reason: str, queue_state: QueueState = QueueState.ACTIVE) -> None:
        """Says what the work waits for."""
        self._reason, self.queue_state, self.place = reason, queue_state, None

    @property
    def waiting_for(self) -> str:
        """Words for whoever polls."""
        return self.place() if self.place is not None else self._reason


def unforeseen(pending: Pending, failure: Exception) -> Internal:
    """Logs what should not have happened, and what its client is told instead: where to look for it."""
    log_id = uuid.uuid4().hex[:12]
    logger.error("%s failed, log id %s", pending.future_id, log_id, exc_info=failure)
    return Internal(f"internal error in {pending.kind}; the gateway's log has it as {log_id}")
