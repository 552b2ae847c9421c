"""What has happened in the gateway since somebody last took it: noted in no time by whoever it happens to.

It holds what the gateway has in memory anyway, for a moment longer, and drops the oldest where too much comes at once.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from fovea.wire.errors import FoveaError
from fovea_gateway.futures.future import Kind, Outcome, Pending

_TRAINING_BYTES = 64 * 2**20
_SAMPLE_BYTES = 32 * 2**20
_SAMPLES = 512
_FAILURES = 1000
_PORTION_BYTES = 8 * 2**20
_PORTION = 64

T = TypeVar("T")


class Ending(NamedTuple):
    """A future that has ended, with its request as far as it was in memory."""

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

    def take(self, most_bytes: int, most: int) -> list[T]:
        """The oldest, up to so many and one at least."""
        taken: list[T] = []
        left = most_bytes
        while self._items and len(taken) < most and (not taken or left > 0):
            item, size_bytes = self._items.popleft()
            self._bytes -= size_bytes
            left -= size_bytes
            taken.append(item)
        return taken


@dataclass
class Happenings:
    """What is to be looked at. One of its kind for a gateway."""

    _training: _Queue[Ending] = field(default_factory=lambda: _Queue(_TRAINING_BYTES, 2**17))
    _samples: _Queue[Ending] = field(default_factory=lambda: _Queue(_SAMPLE_BYTES, _SAMPLES))
    _failures: _Queue[Failure] = field(default_factory=lambda: _Queue(2**62, _FAILURES))

    def note_end(self, pending: Pending, outcome: Outcome) -> None:
        """A future has ended."""
        submission = pending.submission
        if outcome.error is not None:
            subject = pending.model or submission.scope
            self._failures.put(Failure(submission.owner, submission.kind.value, subject, outcome.error), 0)
        queue = self._samples if submission.kind is Kind.SAMPLE else self._training
        queue.put(Ending(pending, outcome), len(outcome.result) + len(pending.request or b""))

    def note_refusal(self, owner: str, route: str, error: FoveaError) -> None:
        """A REST request of an owner was refused."""
        self._failures.put(Failure(owner, route, "", error), 0)

    def take_training(self) -> list[Ending]:
        """Commands that have ended, in order; the next ones at the next call if they are many."""
        return self._training.take(_PORTION_BYTES, 2000)

    def take_samples(self) -> list[Ending]:
        """Samples that have ended, in order; the next ones at the next call if they are many."""
        return self._samples.take(_PORTION_BYTES, _PORTION)

    def take_failures(self) -> list[Failure]:
        """What was refused or has failed."""
        return self._failures.take(2**62, _FAILURES)
