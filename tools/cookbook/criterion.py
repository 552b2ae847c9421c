"""Criteria for the metrics that a run writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

Metrics = Sequence[dict[str, Any]]
LEAST_STEPS = 3


@dataclass(frozen=True)
class Verdict:
    """The result for one metric.

    Attributes:
        ok: Whether the criterion holds.
        steps: Number of rows with the metric.
        first: First value.
        last: Last value.
        detail: Description.
    """

    ok: bool
    steps: int
    first: float | None
    last: float | None
    detail: str


class Criterion(Protocol):
    """Checks the rows of metrics.jsonl."""

    @property
    def metric(self) -> str: ...

    def judge(self, rows: Metrics) -> Verdict: ...


@dataclass(frozen=True)
class Falls:
    """`metric` ends at no more than `to` times its first value."""

    metric: str
    to: float

    def judge(self, rows: Metrics) -> Verdict:
        values = _values(rows, self.metric)
        if len(values) < LEAST_STEPS:
            return _too_few(values, self.metric)
        said = f"{self.metric} {values[0]:.4g} to {values[-1]:.4g}, must fall to {self.to:g} of it"
        return Verdict(values[-1] <= self.to * values[0], len(values), values[0], values[-1], said)


@dataclass(frozen=True)
class Rises:
    """The mean of the last two values of `metric` is at least `by` above the first."""

    metric: str
    by: float

    def judge(self, rows: Metrics) -> Verdict:
        values = _values(rows, self.metric)
        if len(values) < LEAST_STEPS:
            return _too_few(values, self.metric)
        end = fmean(values[-2:])
        said = f"{self.metric} {values[0]:.4g} to {end:.4g}, must rise by {self.by:g}"
        return Verdict(end >= values[0] + self.by, len(values), values[0], end, said)


@dataclass(frozen=True)
class Reaches:
    """`metric` ends at `bar` or above."""

    metric: str
    bar: float

    def judge(self, rows: Metrics) -> Verdict:
        values = _values(rows, self.metric)
        if len(values) < LEAST_STEPS:
            return _too_few(values, self.metric)
        said = f"{self.metric} {values[0]:.4g} to {values[-1]:.4g}, must reach {self.bar:g}"
        return Verdict(values[-1] >= self.bar, len(values), values[0], values[-1], said)


@dataclass(frozen=True)
class Stays:
    """Every value of `metric` is within `below` of zero."""

    metric: str
    below: float
    least_steps: int = LEAST_STEPS

    def judge(self, rows: Metrics) -> Verdict:
        values = _values(rows, self.metric)
        if len(values) < self.least_steps:
            return _too_few(values, self.metric)
        worst = max(map(abs, values))
        said = f"{self.metric} at most {worst:.3g}, must stay below {self.below:g}"
        # Do not use `worst`: the result of max() with NaN depends on its position.
        ok = all(abs(value) <= self.below for value in values)
        return Verdict(ok, len(values), values[0], values[-1], said)


def _values(rows: Metrics, metric: str) -> list[float]:
    return [float(row[metric]) for row in rows if metric in row]


def _too_few(values: list[float], metric: str) -> Verdict:
    return Verdict(False, len(values), None, None, f"{metric} was logged {len(values)} times, too few")
