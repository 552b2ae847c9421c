"""What a forward_backward call computes: of one micro-batch, of one rank, of all ranks."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fovea.wire.errors import FoveaError, InvalidInput, ResourceExhausted
from fovea_services.trainer.batches.datum_decoding import Datum

Logprobs = dict[int, npt.NDArray[np.float32]]
Metrics = dict[str, float]
Measures = dict[str, list[float]]
"""What was measured of each datum, by the name of the metric that it goes into."""

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
}

_GAP_INPUTS = ("logprobs", "advantages", "weights")


@dataclass(frozen=True)
class ForwardBackwardResult:
    """Of a call: on rank 0 of all datums; elsewhere log-probabilities of its own, and no metrics."""

    logprobs: Logprobs
    metrics: Metrics
    packing_efficiency: float

    @property
    def size_bytes(self) -> int:
        """Memory of the log-probabilities."""
        return sum(values.nbytes for values in self.logprobs.values())


@dataclass(frozen=True)
class MicroBatchResult:
    """Of one micro-batch, still on the device.

    Args:
        datums: What was computed, in order.
        rows: float32, the log-probabilities of each datum, shaped as its targets.
        losses: float32, 1-D, of each datum; None if they could not be computed.
        measures: 1-D, by metric, of each datum.
    """

    datums: tuple[Datum, ...]
    rows: list[Tensor]
    losses: Tensor | None
    measures: dict[str, Tensor]


@dataclass
class RankResult:
    """Of one rank's part of a call, and the first failure: a loss that could not be, or memory that ran out."""

    logprobs: Logprobs = field(default_factory=dict)
    measures: Measures = field(default_factory=lambda: defaultdict(list))
    failure: FoveaError | None = None
    out_of_memory: bool = False
    expert_counts: Tensor | None = None
    """int64 [layers with experts, experts]: tokens that each has had."""

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: FoveaError) -> None:
        """Notes that a loss could not be computed."""
        self.failure = error

    def run_out(self, error: Exception | None = None) -> None:
        """Notes that memory ran out, here with `error`, or on another rank."""
        self.out_of_memory = True
        if error is not None:
            reason = str(error).splitlines()[0]
            self.failure = ResourceExhausted(
                f"the trainer ran out of memory in this call: {reason}. Send shorter datums, or delete models"
            )

    def count_experts(self, counts: Tensor | None) -> None:
        """Adds those of a micro-batch; None for a model without experts."""
        if counts is not None:
            self.expert_counts = counts if self.expert_counts is None else self.expert_counts + counts

    def add(self, batch: MicroBatchResult, loss_name: str, model: str) -> None:
        """Brings a micro-batch to the host; finds losses that are not finite. `model` names the model and its step."""
        if not batch.datums:
            return
        flat = torch.cat([row.flatten() for row in batch.rows]).cpu()
        rows = torch.split(flat, [row.numel() for row in batch.rows])
        for datum, row, like in zip(batch.datums, rows, batch.rows, strict=True):
            self.logprobs[datum.index] = row.view(like.shape).numpy().copy()
        if batch.losses is None or self.failure is not None:
            return
        for datum, number in zip(batch.datums, found := batch.losses.tolist(), strict=True):
            if not math.isfinite(number):
                return self.fail(
                    InvalidInput(
                        f"datum[{datum.index}]: its {loss_name} loss is {number}: {self._cause(datum.index, model)}",
                        field=f"datum[{datum.index}]",
                    )
                )
        self.measures["loss:sum"] += found
        for name, values in batch.measures.items():
            self.measures[name] += values.tolist()

    def _cause(self, index: int, model: str) -> str:
        """Explains why the loss of a datum is not finite."""
        if not np.isfinite(self.logprobs[index]).all():
            return (
                f"log-probabilities of {model} are not finite, so it has diverged; lower the learning rate, and load "
                "an earlier state"
            )
        return (
            "numbers of its loss_inputs are too large, or their ratio to the model's log-probabilities, which are "
            "finite, overflows; check its loss_inputs"
        )


def reduce_measures(parts: Iterable[Measures]) -> Metrics:
    """Joins the measures of all ranks by what stands behind the colon of their names."""
    values: Measures = defaultdict(list)
    for part in parts:
        for name, found in part.items():
            values[name] += found
    return {name: float(_REDUCTIONS[name.partition(":")[2]](found)) for name, found in values.items()}


def expert_loads(layers: Sequence[int], parts: Iterable[list[list[int]]]) -> Metrics:
    """How unevenly tokens were spread over the experts of each layer: the fullest over the mean, 1 if evenly.

    Args:
        layers: Numbers of the layers with experts.
        parts: Of each rank, tokens by layer and expert; an empty list where it computed none.
    """
    known = [np.array(part) for part in parts if part]
    if not known:
        return {}
    total = np.sum(known, axis=0)
    loads = total.max(axis=1) / total.mean(axis=1)
    found = {f"expert_load/layer_{layer:02}:mean": float(load) for layer, load in zip(layers, loads, strict=True)}
    return {**found, "expert_load:max": float(loads.max())}


def mean_logprob_gap(datums: Iterable[Datum], logprobs: Mapping[int, npt.NDArray[np.float32]]) -> float | None:
    """Mean |lp - q| in nats over all positions with an advantage; None if no datum brings sampled log-probabilities.

    It says how far the sampler is from the trainer: what a policy gradient takes for off-policy data. Weights that have
    moved since they sampled are in it too: it is the engines' disagreement alone only in the first call after a push.

    Args:
        datums: Checked examples; those of losses without the inputs of a policy gradient do not count. q is `logprobs`.
        logprobs: The trainer's lp by index of the datum, float32 [N] or [N, K], at the weights before the step.
    """
    total, count = 0.0, 0
    for datum in datums:
        own = logprobs[datum.index]
        given = [values for name in _GAP_INPUTS if (values := datum.inputs.get(name)) is not None]
        # A loss that a client traced may use these names for what it likes.
        if len(given) < len(_GAP_INPUTS) or any(values.shape != own.shape for values in given):
            continue
        sampled, advantages, weights = given
        matters = advantages * weights != 0
        total += float(np.abs(own - sampled)[matters].sum())
        count += int(matters.sum())
    return total / count if count else None
