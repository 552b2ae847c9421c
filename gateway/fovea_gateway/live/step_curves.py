"""Curves in bounded memory, reduced to as many points as a screen can show: of one model's metrics by step, and of the
services' figures by time. Each column of a model's curves is an array of shape [metrics, BUCKETS].

Below the curves: the datums of a step with the largest loss, read from the stored request and its result.
"""

import hashlib
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from fovea.api.v1 import gateway_pb2, model_input_pb2
from fovea.wire import tensors
from fovea_gateway.live.sample_gallery import Drawn, Ids, Picture, place_of, read_input
from fovea_gateway.sessions.future import split_messages
from fovea_gateway.training.batches import request_from_blob

BUCKETS = 1024
MOST_METRICS = 32
MOST_SERIES = 64
REWARD_BINS = 24
REWARD_ROWS = 128
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

    def means(self, name: str, most: int, digits: int = 6) -> list[float]:
        """Returns only the `mean` that `points` returns, with less work."""
        row, used = self._rows.get(name), self.last_step // self.stride + 1
        if row is None:
            return []
        together = math.ceil(used / most)
        count, total = (_joined(self._columns[column][row, :used], column, together) for column in ("count", "total"))
        there = np.flatnonzero(count)
        return _rounded(total[there] / count[there], digits)

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


class RewardHistogram:
    """The numbers of rewards by step and by bin, in bounded memory: bins widen, and neighbouring steps share a row."""

    def __init__(self) -> None:
        self._stride, self._low, self._width = 1, 0.0, 0.0
        self._counts = np.zeros((REWARD_ROWS, REWARD_BINS))

    def add(self, step: int, rewards: Sequence[float]) -> None:
        """Counts finite rewards of a step."""
        if not rewards:
            return
        while step // self._stride >= REWARD_ROWS:
            joined = _joined(self._counts.T, "count", 2).T
            self._counts = np.pad(joined, ((0, REWARD_ROWS // 2), (0, 0)))
            self._stride *= 2
        low, high = min(rewards), max(rewards)
        if not self._width:
            span = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else max(1.0, abs(low))
            self._low, self._width = low, span / REWARD_BINS * (1 + 1e-6)  # the highest is within the last bin
        while low < self._low or high >= self._low + REWARD_BINS * self._width:
            is_below = low < self._low
            self._low -= is_below * REWARD_BINS * self._width
            room = (REWARD_BINS // 2, 0) if is_below else (0, REWARD_BINS // 2)
            self._counts = np.pad(_joined(self._counts, "count", 2), ((0, 0), room))
            self._width *= 2
        places = np.clip((np.asarray(rewards) - self._low) // self._width, 0, REWARD_BINS - 1).astype(int)
        np.add.at(self._counts[step // self._stride], places, 1)

    def points(self) -> dict[str, Any]:
        """Returns the lower edge of the bins, their width, and for each row with rewards its first step and counts."""
        rows = np.flatnonzero(self._counts.any(1))
        steps, counts = (rows * self._stride).tolist(), self._counts[rows].astype(int).tolist()
        return {"low": self._low, "width": self._width, "stride": self._stride, "step": steps, "counts": counts}


class SystemHistory:
    """A ring with the figures of the services in the last day: one column for each period.

    Args:
        period_s: Seconds of a column. Of several values in one period, the last is kept.
        columns: The number of columns.
    """

    def __init__(self, period_s: float = 10.0, columns: int = 8640) -> None:
        self._period_s, self._columns = period_s, columns
        self._series: dict[str, npt.NDArray[np.float32]] = {}
        self._last: dict[str, int] = {}
        self._newest = 0
        self.newest: dict[str, Any] = {"at": 0.0, "values": {}}

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """Records named figures at a time in seconds since the epoch. Of too many names, the oldest is dropped."""
        number = int(at // self._period_s)
        for series in self._series.values():
            for passed in range(max(self._newest + 1, number - self._columns + 1), number + 1):
                series[passed % self._columns] = np.nan
        self._newest = max(number, self._newest)
        for name, value in values.items():
            if name not in self._series:
                if len(self._series) >= MOST_SERIES:
                    oldest = min(self._last, key=lambda each: self._last[each])
                    del self._series[oldest], self._last[oldest]
                self._series[name] = np.full(self._columns, np.nan, np.float32)
            self._series[name][number % self._columns] = value
            self._last[name] = number
        shown = {name: float(f"{value:.4g}") for name, value in values.items()}
        self.newest = {"at": number * self._period_s, "values": shown}

    def points(self, span_s: float, most: int) -> dict[str, Any]:
        """Returns the figures of the last `span_s` seconds as at most `most` points.

        `at` is the time of each point. Each series has `mean` and `high`, with None where nothing is known.
        """
        count = max(1, min(math.ceil(span_s / self._period_s), self._columns))
        together = math.ceil(count / most)
        groups = math.ceil(count / together)
        # Whole groups of equal columns, so that a point does not change with each new column.
        last = self._newest // together * together + together - 1
        numbers = np.arange(last - groups * together + 1, last + 1)
        is_there = (numbers <= self._newest) & (numbers > self._newest - self._columns)
        found: dict[str, Any] = {}
        for name, series in self._series.items():
            values = np.where(is_there, series[numbers % self._columns], np.nan).reshape(groups, together)
            known = ~np.isnan(values)
            counts = known.sum(1)
            if counts.any():
                totals = np.where(known, values, 0.0).sum(1, dtype=np.float64)
                highs = np.where(known, values, -np.inf).max(1)
                found[name] = {
                    "mean": [float(f"{t / n:.4g}") if n else None for t, n in zip(totals, counts, strict=True)],
                    "high": [float(f"{high:.4g}") if n else None for high, n in zip(highs, counts, strict=True)],
                }
        at = (numbers.reshape(groups, together)[:, 0] * self._period_s).tolist()
        return {"period_s": self._period_s * together, "at": at, "series": found}


def _joined(values: Array, column: str, together: int) -> Array:
    """Joins neighbours along the last axis into groups of `together`; the last group may be smaller."""
    if together == 1:
        return values
    join = {"low": np.minimum, "high": np.maximum}.get(column, np.add)
    found: Array = join.reduceat(values, np.arange(0, values.shape[-1], together), axis=-1)
    return found


def _rounded(values: Array, digits: int = 6) -> list[float]:
    """Rounds by default to six digits: more than a screen shows, in half the bytes."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


MOST_WORST, _MOST_TARGETS = 8, 2048
_WEIGHTED = "cross_entropy"
"""The loss function that sums weighted log-probabilities. Others have no loss per token."""
Logprobs = npt.NDArray[np.float32]


class WorstDatum(NamedTuple):
    """A datum with a large loss: the weighted mean of the negative log-probabilities in nats, infinite if it is not a
    number; a digest of input and targets, by which it is recognized in a later epoch; the input until the first target
    with a weight; the targets with a weight and the trainer's log-probabilities of them.
    """

    loss: float
    digest: str
    pieces: list[Ids | Picture]
    drawn: Drawn


class DatumLosses(NamedTuple):
    """The losses of one batch: log-probabilities, float32, one per position, by the places of the datums; and the
    datums with the largest loss, the largest first.
    """

    by_place: dict[bytes, Logprobs]
    worst: list[WorstDatum]


def read_losses(future_id: str, request: bytes, result: bytes, at: float, has_samples: bool) -> DatumLosses:
    """Reads a stored loss and its result, which came `at` seconds after 1970. Blocks: it decodes the whole request.

    `has_samples` states whether samples wait for log-probabilities; otherwise `by_place` is empty.
    """
    answers = split_messages(gateway_pb2.WaitFutureResponse, result)
    outputs = [record.output for record in answers if record.HasField("output")]
    asked = request_from_blob(request)
    by_place: dict[bytes, Logprobs] = {}
    ranked: list[tuple[float, int, Ids, Logprobs, npt.NDArray[np.bool_]]] = []
    for index, (datum, output) in enumerate(zip(asked.data, outputs, strict=False)):
        if "target_tokens" not in datum.loss_inputs or "logprobs" not in output.tensors:
            continue
        targets = tensors.decode(datum.loss_inputs["target_tokens"]).astype(np.int32)
        logprobs = tensors.decode(output.tensors["logprobs"]).astype(np.float32)
        if not targets.ndim == logprobs.ndim == 1 or not len(targets):
            continue
        if has_samples:
            whole = place_of(datum.input)
            whole.update(targets[-1:].tobytes())
            by_place[whole.digest()] = logprobs
        if asked.header.loss_function == _WEIGHTED and asked.header.backward:
            given = datum.loss_inputs
            weights = tensors.decode(given["weights"]) if "weights" in given else np.ones(len(targets), np.float32)
            if (loss := _per_token(weights, logprobs)) is not None:
                ranked.append((loss, index, targets, logprobs, weights != 0))
    worst = heapq.nlargest(MOST_WORST, ranked, key=lambda one: one[0])
    return DatumLosses(by_place, [_shown(future_id, asked.data[one[1]].input, at, *one) for one in worst])


def _per_token(weights: npt.NDArray[np.float32], logprobs: Logprobs) -> float | None:
    """Returns the loss per unit of weight; None for a datum without weights."""
    total = float(np.abs(weights).sum(dtype=np.float64))
    if len(weights) != len(logprobs) or not total > 0:
        return None
    loss = -float(weights.astype(np.float64) @ logprobs) / total
    return math.inf if math.isnan(loss) else loss


def _shown(
    future_id: str,
    given: model_input_pb2.ModelInput,
    at: float,
    loss: float,
    index: int,
    targets: Ids,
    logprobs: Logprobs,
    has_weight: npt.NDArray[np.bool_],
) -> WorstDatum:
    digest, pieces = read_input(given)
    digest = hashlib.sha256(digest.encode() + targets.tobytes()).hexdigest()[:16]
    # The input at a position precedes the target at that position.
    spare = len(targets) - 1 - int(np.flatnonzero(has_weight)[0])
    while spare > 0 and pieces and isinstance(last := pieces[-1], np.ndarray):
        pieces[-1] = last[: max(len(last) - spare, 0)]
        spare -= len(last)
        if spare >= 0:
            pieces.pop()
    kept = np.flatnonzero(has_weight)[:_MOST_TARGETS]
    is_cut = int(has_weight.sum()) > _MOST_TARGETS
    drawn = Drawn(f"{future_id}:{index}", targets[kept], logprobs[kept], "", at, is_cut)
    return WorstDatum(loss, digest, pieces, drawn)
