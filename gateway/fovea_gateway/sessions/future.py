"""Futures: accepted work, its progress and its outcome; the encoding of results; and recent ends for the live page."""

import asyncio
import enum
import io
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf import proto
from google.protobuf.message import Message
from google.rpc import status_pb2

from fovea.runtime import tracing
from fovea.wire.errors import FoveaError, Internal, InvalidInput, forget_frames, from_status, to_status
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.access.api_keys import CALLER
from fovea_gateway.access.owners import Usage
from fovea_gateway.database.database import Job

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
T = TypeVar("T")

INT64_MAX = 2**63 - 1
_OUTCOME_BYTES = 1024
"""The estimated memory of one outcome besides its contents: its objects and its cache entry."""


class Kind(enum.StrEnum):
    """The kind of work, which determines the messages in the request and the result."""

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
    """The state of a future, as stored in the database."""

    QUEUED = "queued"
    REJECTED = "rejected"
    """Accepted with invalid content: it fails when the work is due. The request blob contains the status."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """The result blob contains the status."""


UNFINISHED = (State.QUEUED, State.REJECTED, State.RUNNING)


class QueueState(enum.StrEnum):
    """The queue state in the answer to a poll of an unfinished future. The values are the SDK's."""

    ACTIVE = "active"
    PAUSED = "paused_capacity"


class Outcome(NamedTuple):
    """The outcome of a future: a result or an error."""

    kind: Kind
    result: bytes
    error: FoveaError | None = None

    @property
    def state(self) -> State:
        """The state for the database."""
        return State.DONE if self.error is None else State.FAILED

    @property
    def held_bytes(self) -> int:
        """The memory that the outcome occupies, whether it is an error or a result."""
        return _OUTCOME_BYTES + len(self.result) + (len(self.error.message) if self.error is not None else 0)

    def to_blob(self) -> bytes:
        """Returns the bytes for the database."""
        return self.result if self.error is None else to_status(self.error).SerializeToString()

    @classmethod
    def from_blob(cls, kind: Kind, state: State, blob: bytes) -> "Outcome":
        """Reads the bytes that `to_blob` returned."""
        return cls(kind, blob) if state is State.DONE else cls(kind, b"", error_from_blob(blob))


class ResultEncoder(NamedTuple):
    """An encoder of the results of one kind of work, for Tinker's clients.

    Attributes:
        to_json: Converts a stored result into JSON values.
        to_proto: Converts a stored result into protobuf, always to the same bytes; None if no client reads protobuf.
    """

    to_json: Callable[[bytes], dict[str, Any]]
    to_proto: Callable[[bytes], bytes] | None = None


def error_from_blob(blob: bytes) -> FoveaError:
    """Reads a serialized google.rpc.Status."""
    return from_status(status_pb2.Status.FromString(blob))


@dataclass(frozen=True)
class Submission:
    """The work that a client has requested.

    Attributes:
        scope: The model or the sampling session within which `seq_id` counts.
        rejection: The error with which the work will fail when it is due.
        known_failure: The seq_id of a failed forward_backward that the client knew of when it sent this request.
        traceparent: The trace context of the submitting call; empty without tracing and after a restart.
        token_count: An estimate of the tokens that the work may process.
        key_id: The id of the owner's API key that submitted the work.
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
    """The progress of a future, for polls and metrics.

    Attributes:
        begun_at: The start of the work in seconds of `time.time`; None while it waits.
        sampled: The source of a sample's weights, once it is known: a trained model's id or the base model's name.
        describe: Returns a description of the work's wait in a queue. It is called for each poll, because the position
            changes.
    """

    queue_state: QueueState = QueueState.ACTIVE
    reason: str = "queued"
    describe: Callable[[], str] | None = None
    begun_at: float | None = None
    sampled: str = ""

    def wait_on(self, reason: str, queue_state: QueueState = QueueState.ACTIVE) -> None:
        """Sets the text that tells clients what the work waits for."""
        self.reason, self.queue_state, self.describe = reason, queue_state, None

    def queue(self, describe: Callable[[], str], queue_state: QueueState = QueueState.ACTIVE) -> None:
        """Sets the function that returns the text for clients. It is used until the next `wait_on`."""
        self.describe, self.queue_state = describe, queue_state

    @property
    def waiting_for(self) -> str:
        """The text that tells polling clients what the work waits for."""
        return self.describe() if self.describe is not None else self.reason


@dataclass(eq=False)
class Pending:
    """A future that has not ended.

    Attributes:
        request: The serialized request, or None if it must be read from the database.
        usage: The resources used so far.
        device_seconds: Like `usage.gpu_seconds`, also on the CPU.
        place: The place of a loss computation in a pass of the trainer, with which it can be repeated bit for bit.
        work: The task that runs the work, if it can be cancelled.
        refusal: The error that prevented the storing of the submission; None if there was none.
        accepted: Set once the submission has been stored or could not be stored.
        done: Set once there is an outcome.
        woken: Set when waiting polls must answer, with or without an outcome.
    """

    submission: Submission
    request: bytes | None
    state: State = State.QUEUED
    progress: Progress = field(default_factory=Progress)
    usage: Usage = field(default_factory=Usage)
    device_seconds: float = 0.0
    place: str = ""
    work: asyncio.Task[None] | None = None
    is_finishing: bool = False
    refusal: BaseException | None = None
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model(self) -> str:
        """The id of the trained model or the name of the base model; empty if neither is known."""
        is_of_model = self.submission.kind not in (Kind.SAMPLE, Kind.CREATE_CUSTOM_LOSS)
        return self.submission.scope if is_of_model else self.progress.sampled

    def add_seconds(self, seconds: float, memory_kind: str) -> None:
        """Adds the seconds of all devices. A service with memory of kind `host` uses no GPU."""
        self.device_seconds += seconds
        self.usage.gpu_seconds += seconds * (memory_kind != "host")

    def begin(self) -> None:
        """Records the start of the work. Repeated calls change nothing."""
        if self.progress.begun_at is None:
            self.progress.begun_at = time.time()
            waited_s = max(self.progress.begun_at - self.submission.created_at, 0.0)
            metrics.STAGE_SECONDS.labels("queue", self.submission.kind.value).observe(waited_s)
            tracing.record("queue", self.submission.created_at)


@dataclass
class Done:
    """The result of successful work: messages for the client, writes for the transaction that stores the outcome, and
    calls to make afterwards.

    Attributes:
        subject: The object needed to repeat the work: the id of an unnamed snapshot, or the folder that was loaded.
    """

    result: list[Message] = field(default_factory=list)
    effects: list[Job[Any]] = field(default_factory=list)
    afterwards: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    subject: str = ""


async def run_to_outcome(pending: Pending, work: Awaitable[Done]) -> tuple[Done, Outcome]:
    """Awaits the work of a future. An exception becomes the outcome, with an empty `Done`."""
    submission, done, error = pending.submission, Done(), None
    with tracing.span(f"future {submission.kind}", submission.traceparent, future_id=submission.future_id):
        try:
            done = await work
        except FoveaError as failure:
            error = failure
        except Exception as failure:
            log_id = uuid.uuid4().hex[:12]
            logger.error("%s failed, log id %s", submission.future_id, log_id, exc_info=failure)
            error = Internal(f"internal error in {submission.kind}; the gateway's log has details under {log_id}")
        if error is not None:
            tracing.note(reason=error.reason)
            logger.warning("%s of %s failed: %s: %s", submission.kind, submission.future_id, error.reason, error)
            forget_frames(error)  # the outcome keeps the error
    return done, Outcome(submission.kind, join_messages(done.result), error)


@contextmanager
def stage(name: str, kind: str) -> Iterator[None]:
    """Measures one stage of a request of this kind, whether it succeeds or fails."""
    started = time.perf_counter()
    try:
        with tracing.span(name):
            yield
    finally:
        metrics.STAGE_SECONDS.labels(name, kind).observe(time.perf_counter() - started)


def future_id(scope: str, seq_id: int) -> str:
    """Returns the id of command `seq_id` of a model or sampling session. A repeated command has the same id."""
    return f"{scope}:{seq_id}"


def check_seq_id(seq_id: int, field: str, least: int) -> int:
    """Returns the sequence number. Raises InvalidInput unless it is in `least` .. 2^63-1."""
    if not least <= seq_id <= INT64_MAX:
        raise InvalidInput(f"{field} is {seq_id}; numbers count up from {least}", field=field)
    return seq_id


def join_messages(messages: Iterable[Message]) -> bytes:
    """Serializes messages one after another, each with a length prefix."""
    blob = io.BytesIO()
    for message in messages:
        proto.serialize_length_prefixed(message, blob)
    return blob.getvalue()


def split_messages(kind: type[M], blob: bytes) -> list[M]:
    """Reads messages that `join_messages` serialized."""
    stream = io.BytesIO(blob)
    messages: list[M] = []
    while stream.tell() < len(blob):
        message = proto.parse_length_prefixed(kind, stream)
        assert message is not None
        messages.append(message)
    return messages


def in_order(values: Mapping[str, float]) -> dict[str, float]:
    """Sorts a protobuf map by its keys. Map order differs between processes, but equal results must be equal bytes."""
    return dict(sorted(values.items()))


_TRAINING_BYTES = 64 * 2**20
_SAMPLE_BYTES = 32 * 2**20
_SAMPLES = 512
_FAILURES = 1000
_PORTION_BYTES = 8 * 2**20
_PORTION = 64


class Ending(NamedTuple):
    """A future that has ended, with its request if that was in memory."""

    pending: Pending
    outcome: Outcome


class Failure(NamedTuple):
    """A request that was refused, or a future that failed."""

    owner: str
    what: str
    subject: str
    error: FoveaError


class _Queue(Generic[T]):
    def __init__(self, most_bytes: int, most: int) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0

    def put(self, item: T, size_bytes: int) -> None:
        self._items.append((item, size_bytes))
        self._bytes += size_bytes
        while self._items and (self._bytes > self._most_bytes or len(self._items) > self._most):
            self._bytes -= self._items.popleft()[1]

    def pop(self, most_bytes: int, most: int) -> list[T]:
        """Removes and returns the oldest items up to the limits, but at least one."""
        found: list[T] = []
        left = most_bytes
        while self._items and len(found) < most and (not found or left > 0):
            item, size_bytes = self._items.popleft()
            self._bytes -= size_bytes
            left -= size_bytes
            found.append(item)
        return found


@dataclass
class Activity:
    """The events that the live page has not read yet. A gateway has one instance.

    Recording an event costs almost no time. The queues keep objects that the gateway has in memory anyway for a moment
    longer. If too many events arrive at once, the oldest are dropped.
    """

    _training: _Queue[Ending] = field(default_factory=lambda: _Queue(_TRAINING_BYTES, 2**17))
    _samples: _Queue[Ending] = field(default_factory=lambda: _Queue(_SAMPLE_BYTES, _SAMPLES))
    _failures: _Queue[Failure] = field(default_factory=lambda: _Queue(2**62, _FAILURES))

    def note_end(self, pending: Pending, outcome: Outcome) -> None:
        """Records the end of a future."""
        submission = pending.submission
        if outcome.error is not None:
            subject = pending.model or submission.scope
            self._failures.put(Failure(submission.owner, submission.kind.value, subject, outcome.error), 0)
        queue = self._samples if submission.kind is Kind.SAMPLE else self._training
        queue.put(Ending(pending, outcome), len(outcome.result) + len(pending.request or b""))

    def note_refusal(self, owner: str, route: str, error: FoveaError) -> None:
        """Records the refusal of a REST request of an owner."""
        self._failures.put(Failure(owner, route, "", error), 0)

    def pop_training(self) -> list[Ending]:
        """Returns ended commands in order. If there are many, the next call returns the rest."""
        return self._training.pop(_PORTION_BYTES, 2000)

    def pop_samples(self) -> list[Ending]:
        """Returns ended samples in order. If there are many, the next call returns the rest."""
        return self._samples.pop(_PORTION_BYTES, _PORTION)

    def pop_failures(self) -> list[Failure]:
        """Returns the refused requests and the failed futures."""
        return self._failures.pop(2**62, _FAILURES)


def note_usage(tenant: str, kind: str, usage: Mapping[str, float]) -> None:
    """Counts the usage of a request of this kind: tokens as `trained_tokens` and so on, and `gpu_seconds`."""
    for name, value in usage.items():
        if value and name.endswith("_tokens"):
            metrics.TOKENS.labels(tenant, name.removesuffix("_tokens")).inc(value)
    if usage["gpu_seconds"]:
        metrics.GPU_SECONDS.labels(tenant, kind).inc(usage["gpu_seconds"])
