"""A future: accepted work, how it goes and how it ended; and how requests and results of several messages are kept."""

import asyncio
import enum
import io
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from google.protobuf import proto
from google.protobuf.message import Message
from google.rpc import status_pb2

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, Internal, InvalidInput, from_status, to_status
from fovea_gateway import gateway_metrics
from fovea_gateway.access.usage import Usage
from fovea_gateway.database.writer import Job
from fovea_gateway.scopes import CALLER

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

INT64_MAX = 2**63 - 1
_OUTCOME_BYTES = 1024
"""What one outcome takes besides its contents: its objects, and its entry in the cache."""


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


class ResultEncoder(NamedTuple):
    """How the results of one kind of work are written for Tinker's clients.

    Attributes:
        to_json: The kept result as JSON values.
        to_proto: The kept result as protobuf, the same bytes every time; None if no client reads that.
    """

    to_json: Callable[[bytes], dict[str, Any]]
    to_proto: Callable[[bytes], bytes] | None = None


def error_from_blob(blob: bytes) -> FoveaError:
    """Reads a serialized google.rpc.Status."""
    return from_status(status_pb2.Status.FromString(blob))


@dataclass(frozen=True)
class Submission:
    """What a client asked for.

    Attributes:
        scope: What `seq_id` counts in: a model, or a sampling session.
        rejection: Why it will fail when its turn comes.
        known_failure: The failed forward_backward, by seq_id, of which the client had been told before it sent this.
        traceparent: The call that submitted it; empty without tracing and after a restart.
        token_count: Tokens that it may come to, as far as can be told.
        key_id: Which of the owner's keys submitted it.
    """

    future_id: str
    kind: Kind
    owner: str
    session_id: str
    scope: str
    seq_id: int
    rejection: FoveaError | None = None
    known_failure: int | None = None
    created_at: float = field(default_factory=time.time)
    traceparent: str = field(default_factory=tracing.traceparent)
    token_count: int = 0
    key_id: str = field(default_factory=lambda: CALLER.get().key_id)


@dataclass(eq=False)
class Progress:
    """How it goes, for whoever polls and for the metrics.

    Attributes:
        begun_at: When its turn came, seconds of `time.time`; None while it waits.
        sampled: Whose weights a sample is drawn from, once that is known: a trained model's id, or the base's name.
        describe: Says what it waits for as long as it is one of many in a queue: asked for, not told to each.
    """

    queue_state: QueueState = QueueState.ACTIVE
    reason: str = "queued"
    describe: Callable[[], str] | None = None
    begun_at: float | None = None
    sampled: str = ""

    def wait_on(self, reason: str, queue_state: QueueState = QueueState.ACTIVE) -> None:
        """Says what the work waits for."""
        self.reason, self.queue_state, self.describe = reason, queue_state, None

    def queue(self, describe: Callable[[], str], queue_state: QueueState = QueueState.ACTIVE) -> None:
        """Has `describe` asked what the work waits for, until `wait_on` says it."""
        self.describe, self.queue_state = describe, queue_state

    @property
    def waiting_for(self) -> str:
        """Words for whoever polls."""
        return self.describe() if self.describe is not None else self.reason


@dataclass(eq=False)
class Pending:
    """A future that has not ended.

    Attributes:
        request: Serialized request, or None if it must be read from the database.
        usage: What it has used by now.
        work: The task that works on it, if cancelling is possible.
        refusal: Why the submission could not be kept.
        accepted: Set once the submission is kept, or has failed to be.
        done: Set once there is an outcome.
        woken: Set when waiters should look, done or not.
    """

    submission: Submission
    request: bytes | None
    state: State = State.QUEUED
    progress: Progress = field(default_factory=Progress)
    usage: Usage = field(default_factory=Usage)
    work: asyncio.Task[None] | None = None
    is_finishing: bool = False
    refusal: BaseException | None = None
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model(self) -> str:
        """What it belongs to: a trained model's id, or the base's name; empty if neither is known."""
        is_of_model = self.submission.kind not in (Kind.SAMPLE, Kind.CREATE_CUSTOM_LOSS)
        return self.submission.scope if is_of_model else self.progress.sampled

    def begin(self) -> None:
        """Notes that its turn has come; a repeat changes nothing."""
        if self.progress.begun_at is None:
            self.progress.begun_at = time.time()
            gateway_metrics.queued(self.submission.kind.value, self.submission.created_at)


@dataclass
class Done:
    """What work came to: messages for the client, writes to be kept together with them, and what comes after.

    Attributes:
        subject: What it was done with, to do it again: an unnamed snapshot's id, or the folder that was loaded.
    """

    result: list[Message] = field(default_factory=list)
    effects: list[Job[Any]] = field(default_factory=list)
    afterwards: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    subject: str = ""


async def run_to_outcome(pending: Pending, work: Awaitable[Done]) -> tuple[Done, Outcome]:
    """Awaits the work of a future. What it raises becomes the outcome, with nothing done beside it."""
    submission, done, error = pending.submission, Done(), None
    with tracing.span(f"future {submission.kind}", submission.traceparent, future_id=submission.future_id):
        try:
            done = await work
        except FoveaError as failure:
            error = failure
        except Exception as failure:
            log_id = uuid.uuid4().hex[:12]
            logger.error("%s failed, log id %s", submission.future_id, log_id, exc_info=failure)
            error = Internal(f"internal error in {submission.kind}; the gateway's log has it as {log_id}")
        if error is not None:
            tracing.note(reason=error.reason)
            logger.warning("%s of %s failed: %s: %s", submission.kind, submission.future_id, error.reason, error)
    return done, Outcome(submission.kind, join_messages(done.result), error)


def future_id(scope: str, seq_id: int) -> str:
    """Id of the command `seq_id` of a model or a sampling session: a repeat has the same."""
    return f"{scope}:{seq_id}"


def check_seq_id(seq_id: int, field: str, least: int) -> int:
    """Returns a sequence number. Raises InvalidInput outside `least` .. 2^63-1."""
    if not least <= seq_id <= INT64_MAX:
        raise InvalidInput(f"{field} is {seq_id}; it counts up from {least}", field=field)
    return seq_id


def join_messages(messages: Iterable[Message]) -> bytes:
    """Writes messages one after another, each after its length."""
    blob = io.BytesIO()
    for message in messages:
        proto.serialize_length_prefixed(message, blob)
    return blob.getvalue()


def split_messages(kind: type[M], blob: bytes) -> list[M]:
    """Reads what `join_messages` wrote."""
    stream = io.BytesIO(blob)
    messages: list[M] = []
    while stream.tell() < len(blob):
        message = proto.parse_length_prefixed(kind, stream)
        assert message is not None
        messages.append(message)
    return messages


def in_order(values: Mapping[str, float]) -> dict[str, float]:
    """A protobuf map by its keys: its own order differs between processes, and a result is always the same bytes."""
    return dict(sorted(values.items()))
