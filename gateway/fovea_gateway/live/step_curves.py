"""The curves of one model: its metrics by step, in bounded memory, reduced to as many points as a screen can show.

Each column is an array of shape [metrics, BUCKETS].
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

BUCKETS = 1024
MOST_METRICS = 32
_COLUMNS = ("count", "total", "low", "high")
_EMPTY = {"count": 0.0, "total": 0.0, "low": math.inf, "high": -math.inf}
_HEAD_BYTES = 4
LARGEST = 1e200
"""The largest magnitude that a curve draws. Sums of as many values as a gateway ever records stay finite."""

Array = npt.NDArray[np.float64]


class StepCurves:
    """Metrics of the steps 0, 1, 2 and so on, at full resolution up to BUCKETS steps.

    Beyond that, neighbouring steps share a bucket, which stores their mean, minimum and maximum. A spike therefore
    remains visible however long a training runs.

    Attributes:
        stride: The number of steps that share a bucket.
        last_step: The last step with a value.
        last: The newest value of each metric, finite or not.
        version: Changes with each recorded value.
        resumed: The checkpoint's path, and its step, if the model continues another model's run; else None.
        is_stored: Whether the database has a version of the curves, possibly without the newest steps.
    """

    def __init__(
        self,
        stride: int = 1,
        last_step: int = 0,
        last: Mapping[str, float] | None = None,
        resumed: tuple[str, int] | None = None,
    ) -> None:
        self.stride, self.last_step, self.version, self.is_stored = stride, last_step, 0, False
        self.last = dict(last or {})
        self.resumed = None if resumed is None else (str(resumed[0]), int(resumed[1]))
        self._rows: dict[str, int] = {}
        self._columns: dict[str, Array] = {name: np.empty((0, BUCKETS)) for name in _COLUMNS}

    @property
    def names(self) -> list[str]:
        """The names of the metrics with values, in order of appearance."""
        return list(self.last)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of a step, which may be an earlier one. Ignores new names once there are MOST_METRICS."""
        while step // self.stride >= BUCKETS:
            self._halve()
        bucket = step // self.stride
        for name, value in metrics.items():
            row = self._row(name)
            if row is None:
                continue
            self.last[name] = value
            if not abs(value) <= LARGEST:  # This form also excludes NaN.
                continue
            columns = self._columns
            columns["count"][row, bucket] += 1
            columns["total"][row, bucket] += value
            columns["low"][row, bucket] = min(columns["low"][row, bucket], value)
            columns["high"][row, bucket] = max(columns["high"][row, bucket], value)
        self.last_step = max(self.last_step, step)
        self.version += 1

    def continued(self, path: str, step: int) -> "StepCurves":
        """Returns the curves of a new model that continues from a checkpoint: a copy of the steps up to `step`.

        Steps that share a bucket with a later one are left out.
        """
        found = StepCurves(self.stride, resumed=(path, step))
        while step // found.stride >= BUCKETS:
            found._halve()
        found.last_step, used = step, min((step + 1) // self.stride, BUCKETS)
        for name, row in self._rows.items() if found.stride == self.stride else ():
            there = np.flatnonzero(self._columns["count"][row, :used])
            if not len(there):
                continue
            own = found._row(name)
            for column, values in self._columns.items():
                found._columns[column][own, :used] = values[row, :used]
            found.last[name] = float(self._columns["total"][row, there[-1]] / self._columns["count"][row, there[-1]])
        found.version = 1
        return found

    def means(self, name: str, most: int) -> list[float]:
        """Returns only the `mean` that `points` returns, with less work."""
        row, used = self._rows.get(name), self.last_step // self.stride + 1
        if row is None:
            return []
        together = math.ceil(used / most)
        count, total = (_joined(self._columns[column][row, :used], column, together) for column in ("count", "total"))
        there = np.flatnonzero(count)
        return _rounded(total[there] / count[there])

    def points(self, name: str, most: int, first_step: int = 0, last_step: int | None = None) -> dict[str, list[float]]:
        """Returns a metric as at most `most` points: `step`, `mean`, and `low` and `high` if a point joins steps.

        Args:
            first_step: The first step wanted. Steps that share a bucket with it are included.
            last_step: The last one, by default the last with a value.
        """
        row, begin = self._rows.get(name), first_step // self.stride
        wanted = self.last_step if last_step is None else min(last_step, self.last_step)
        end = wanted // self.stride + 1
        if row is None or begin >= end:
            return {"step": [], "mean": []}
        together = math.ceil((end - begin) / most)
        shown = (self._columns[column][row, begin:end] for column in _COLUMNS)
        count, total, low, high = (
            _joined(values, column, together) for values, column in zip(shown, _COLUMNS, strict=True)
        )
        there = np.flatnonzero(count)
        width = together * self.stride
        first = begin * self.stride + there * width
        last = np.minimum(first + width - 1, self.last_step)
        found = {"step": ((first + last) / 2).tolist(), "mean": _rounded(total[there] / count[there])}
        if width > 1:
            found |= {"low": _rounded(low[there]), "high": _rounded(high[there])}
        return found

    def mark_stored(self) -> None:
        """Records that the database has the curves."""
        self.is_stored = True

    def to_blob(self) -> bytes:
        """Returns the bytes for the database."""
        used = self.last_step // self.stride + 1
        resumed = [] if self.resumed is None else [self.resumed]
        head = json.dumps([self.stride, self.last_step, self.last, *resumed, list(self._rows)]).encode()
        columns = [self._columns[column][:, :used].tobytes() for column in _COLUMNS]
        return zstandard.compress(b"".join([len(head).to_bytes(_HEAD_BYTES, "little"), head, *columns]), 1)

    @classmethod
    def from_blob(cls, blob: bytes) -> "StepCurves":
        """Reads the bytes that `to_blob` returned."""
        data = zstandard.decompress(blob)
        end = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "little")
        *facts, names = json.loads(data[_HEAD_BYTES:end])
        curves = cls(*facts)
        for name in names:
            curves._row(name)
        curves.mark_stored()
        used = curves.last_step // curves.stride + 1
        stored = np.frombuffer(data, np.float64, offset=end).reshape(len(_COLUMNS), len(names), used)
        for column, values in zip(_COLUMNS, stored, strict=True):
            curves._columns[column][:, :used] = values
        return curves

    def _row(self, name: str) -> int | None:
        if name not in self._rows:
            if len(self._rows) >= MOST_METRICS:
                return None
            self._rows[name] = len(self._rows)
            for column, values in self._columns.items():
                self._columns[column] = np.vstack([values, np.full((1, BUCKETS), _EMPTY[column])])
        return self._rows[name]

    def _halve(self) -> None:
        for column, values in self._columns.items():
            joined = np.full_like(values, _EMPTY[column])
            if len(values):
                joined[:, : BUCKETS // 2] = _joined(values, column, 2)
            self._columns[column] = joined
        self.stride *= 2


def _joined(values: Array, column: str, together: int) -> Array:
    """Joins neighbours along the last axis into groups of `together`; the last group may be smaller."""
    if together == 1:
        return values
    missing = -values.shape[-1] % together
    widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    padded = np.pad(values, widths, constant_values=_EMPTY[column])
    grouped = padded.reshape(*values.shape[:-1], -1, together)
    reduced: Any = {"low": np.min, "high": np.max}.get(column, np.sum)(grouped, axis=-1)
    found: Array = reduced
    return found


def _rounded(values: Array) -> list[float]:
    """Rounds to six digits: more than a screen shows, in half the bytes."""
    return [float(f"{value:.6g}") for value in values]
