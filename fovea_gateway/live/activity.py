"""The activity of the gateway since the live page last read it. Recording an event costs almost no time.

The queues hold objects that the gateway has in memory anyway, a moment longer. If too many arrive at once, the oldest
are dropped.
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
    """The events that the live page has not read yet. A gateway has one instance."""

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
