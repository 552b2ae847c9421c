"""The results of a forward_backward call: of one micro-batch, of one rank, and of all ranks."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fovea.wire.errors import FoveaError, InvalidInput, ResourceExhausted
from fovea_trainer.batches.datum_decoding import Datum

Logprobs = dict[int, npt.NDArray[np.float32]]
Metrics = dict[str, float]
Measures = dict[str, list[float]]
"""The measured values of all datums, keyed by metric name."""

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "mean": lambda values: sum(values) / len(values),
}

ALONE = "alone"
"""The place of a call that shared no pass."""

_GAP_INPUTS = ("logprobs", "advantages", "weights")


@dataclass(frozen=True)
class ForwardBackwardResult:
    """The result of a call.

    Args:
        logprobs: float32 log-probabilities, keyed by datum index. Rank 0 has those of all datums, another rank only
            those of its own.
        metrics: Metrics of the call; empty on other ranks.
        packing_efficiency: As `Plan.efficiency`.
        place: The slot of a shared pass, as `Place` writes it, or `ALONE`. With the same place, the call has the same
            result bit for bit when it runs again.
    """

    logprobs: Logprobs
    metrics: Metrics
    packing_efficiency: float
    place: str = ALONE

    @property
    def size_bytes(self) -> int:
        """Memory of the log-probabilities in bytes."""
        return sum(values.nbytes for values in self.logprobs.values())


@dataclass(frozen=True)
class MicroBatchResult:
    """The result of one micro-batch, still on the device.

    Args:
        datums: The datums, in order.
        rows: float32, the log-probabilities of each datum in the shape of its targets.
        losses: float32 [datums]; None if they could not be computed.
        measures: [datums] each, keyed by metric name.
    """

    datums: tuple[Datum, ...]
    rows: list[Tensor]
    losses: Tensor | None
    measures: dict[str, Tensor]


@dataclass
class RankResult:
    """The result of one rank's share of a call.

    Args:
        logprobs: float32 log-probabilities, keyed by datum index.
        measures: Measured values of the datums, keyed by metric name.
        failure: The first error: a loss that could not be computed, or exhausted memory.
        out_of_memory: True if memory ran out on this or another rank.
        expert_counts: int64 [layers with experts, experts], the number of tokens per expert; None without experts.
    """

    logprobs: Logprobs = field(default_factory=dict)
    measures: Measures = field(default_factory=lambda: defaultdict(list))
    failure: FoveaError | None = None
    out_of_memory: bool = False
    expert_counts: Tensor | None = None

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: FoveaError) -> None:
        """Records that a loss could not be computed."""
        self.failure = error

    def run_out(self, error: Exception | None = None) -> None:
        """Records that memory ran out, on this rank with `error`, or on another rank."""
        self.out_of_memory = True
        if error is not None:
            reason = str(error).splitlines()[0]
            self.failure = ResourceExhausted(
                f"the trainer ran out of memory in this call: {reason}. Send shorter datums, or delete models"
            )

    def count_experts(self, counts: Tensor | None) -> None:
        """Adds the counts of a micro-batch; None for a model without experts."""
        if counts is not None:
            self.expert_counts = counts if self.expert_counts is None else self.expert_counts + counts

    def add(self, batch: MicroBatchResult, loss_name: str, model: str) -> None:
        """Copies a micro-batch to the host. Records the first loss that is not finite as the failure.

        Args:
            batch: The micro-batch.
            loss_name: Name of the loss, for errors.
            model: The model and its step, for errors.
        """
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
        """Returns the reason why the loss of a datum is not finite."""
        if not np.isfinite(self.logprobs[index]).all():
            return (
                f"the log-probabilities of {model} are not finite, so it has diverged; lower the learning rate, and "
                "load an earlier state"
            )
        return (
            "values in its loss_inputs are too large, or their ratio to the model's log-probabilities, which are "
            "finite, overflows; check its loss_inputs"
        )


def reduce_measures(parts: Iterable[Measures]) -> Metrics:
    """Merges the measures of all ranks. The part of a metric's name after the colon names the reduction."""
    values: Measures = defaultdict(list)
    for part in parts:
        for name, found in part.items():
            values[name] += found
    return {name: float(_REDUCTIONS[name.partition(":")[2]](found)) for name, found in values.items()}


def expert_loads(layers: Sequence[int], parts: Iterable[list[list[int]]]) -> Metrics:
    """Returns the load imbalance of the experts, per layer and its maximum over the layers; empty without counts.

    The imbalance of a layer is the most tokens of one expert, divided by the mean over its experts; 1 is balanced.

    Args:
        layers: Numbers of the layers with experts.
        parts: For each rank the tokens per layer and expert; an empty list if it computed none.
    """
    known = [np.array(part) for part in parts if part]
    if not known:
        return {}
    total = np.sum(known, axis=0)
    loads = total.max(axis=1) / total.mean(axis=1)
    found = {f"expert_load/layer_{layer:02}:mean": float(load) for layer, load in zip(layers, loads, strict=True)}
    return {**found, "expert_load:max": float(loads.max())}


def mean_logprob_gap(datums: Iterable[Datum], logprobs: Mapping[int, npt.NDArray[np.float32]]) -> float | None:
    """Returns the mean |lp - q| in nats over all positions where advantage times weight is not zero.

    Returns None if there is no such position.

    The mean measures the distance between sampler and trainer, which makes the data of a policy gradient off-policy. It
    includes changes of the weights since sampling. In the first call after a push it is only the difference between the
    two engines.

    Args:
        datums: Checked examples. Those without the inputs of a policy gradient are ignored. q is the input `logprobs`.
        logprobs: The trainer's lp at the weights before the step, float32 [N] or [N, K], keyed by datum index.
    """
    total, count = 0.0, 0
    for datum in datums:
        own = logprobs[datum.index]
        given = [values for name in _GAP_INPUTS if (values := datum.inputs.get(name)) is not None]
        # A traced loss may use these names for other inputs.
        if len(given) < len(_GAP_INPUTS) or any(values.shape != own.shape for values in given):
            continue
        sampled, advantages, weights = given
        matters = advantages * weights != 0
        total += float(np.abs(own - sampled)[matters].sum())
        count += int(matters.sum())
    return total / count if count else None
