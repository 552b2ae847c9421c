"""One forward_backward call on one rank: prepare and agree, then compute step by step with all ranks.

Nothing can fail on one rank alone between the first collective and the last: everything that depends on input or on
other services is done and agreed on before.
"""

# ruff: noqa: N806 -- the suffix of a tensor's name is its shape

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fovea.api.v1 import trainer_pb2
from services.trainer.batch import BatchLayout, Patches
from services.trainer.commands import ForwardBackward
from services.trainer.control import ControlGroup
from services.trainer.datums import Datum, InputLimits, decode_datum
from services.trainer.features import FeatureCache
from services.trainer.losses import loss_of
from services.trainer.model import PackedModel
from services.trainer.packing import Plan, plan
from services.trainer.trained import TrainedModel

Logprobs = dict[int, npt.NDArray[np.float32]]
Metrics = dict[str, float]

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


@dataclass(frozen=True)
class Outcome:
    """What a call computed; on rank 0 of all datums, elsewhere of its own."""

    logprobs: Logprobs
    metrics: Metrics
    packing_efficiency: float


@dataclass(frozen=True)
class Budgets:
    """The most tokens and patches of one micro-batch of one rank."""

    tokens: int
    patches: int


class LossComputer:
    """Runs forward_backward calls on this rank."""

    def __init__(
        self,
        module: PackedModel,
        control: ControlGroup,
        features: FeatureCache,
        layout: BatchLayout,
        limits: InputLimits,
        budgets: Budgets,
    ) -> None:
        self._module = module
        self._control = control
        self._features = features
        self._layout = layout
        self._limits = limits
        self._budgets = budgets

    def run(self, command: ForwardBackward, model: TrainedModel) -> Outcome:
        """Computes; adds to the model's gradients if `backward`. Collective.

        Raises, on all ranks and with nothing changed: what `FeatureCache.patches_of` raises.
        """
        schedule = plan(command.sizes, self._control.world_size, self._budgets.tokens, self._budgets.patches)
        datums, patches = self._control.agree(lambda: self._prepare(command, schedule))
        model.activate()
        own = self._compute(command, model, schedule, datums, patches)
        gathered = self._control.gather(own)
        if not gathered:
            return Outcome(*own, schedule.efficiency)
        logprobs = {index: values for part, _ in gathered for index, values in part.items()}
        metrics = _reduce([metrics for _, metrics in gathered])
        metrics |= {"tokens:sum": float(sum(size.token_count for size in command.sizes))}
        return Outcome(logprobs, metrics, schedule.efficiency)

    def _prepare(self, command: ForwardBackward, schedule: Plan) -> tuple[dict[int, Datum], dict[str, Patches]]:
        loss = loss_of(command.loss)
        datums = {
            index: decode_datum(trainer_pb2.Datum.FromString(command.datums[index]), index, loss, self._limits)
            for index in schedule.datums_of(self._control.rank)
        }
        return datums, self._features.patches_of(datums.values())

    def _compute(
        self,
        command: ForwardBackward,
        model: TrainedModel,
        schedule: Plan,
        datums: dict[int, Datum],
        patches: dict[str, Patches],
    ) -> tuple[Logprobs, Metrics]:
        loss = loss_of(command.loss)
        logprobs: Logprobs = {}
        metrics = []
        for step in schedule.steps:
            own = [datums[index] for index in step.datums[self._control.rank]]
            batch = self._layout.pack(own, loss, patches, step.has_vision)
            with torch.set_grad_enabled(command.backward):
                value, logprobs_TK, extra = self._module(
                    batch, loss, command.config, model.unembedding, model.trains_vision
                )
            if command.backward:
                value.backward()
            logprobs |= batch.split_logprobs(logprobs_TK)
            if own:
                metrics.append({"loss:sum": value.item(), **{name: found.item() for name, found in extra.items()}})
        return logprobs, _reduce(metrics)


def _reduce(parts: list[Metrics]) -> Metrics:
    """Joins metrics of micro-batches or ranks by what stands behind the colon."""
    values: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(value)
    return {name: float(_REDUCTIONS[name.partition(":")[2]](found)) for name, found in values.items()}
