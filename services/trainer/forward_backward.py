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
from services.trainer.batch import BatchLayout, Patches, wanted_images
from services.trainer.commands import ForwardBackward
from services.trainer.control import ControlGroup
from services.trainer.datums import Datum, InputLimits, decode_datum
from services.trainer.features import FeatureCache
from services.trainer.losses import loss_of
from services.trainer.model import PackedModel
from services.trainer.packing import Plan, plan
from services.trainer.trained import TrainedModel
from services.trainer.vision_memory import SeenImage, VisionMemory

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
class Prepared:
    """What this rank computes with.

    Args:
        datums: Its datums by index.
        patches: Of the images that the tower may have to be run on, by digest.
        seen: Outputs of the frozen tower that are known; None if the tower is trained.
    """

    datums: dict[int, Datum]
    patches: dict[str, Patches]
    seen: dict[str, SeenImage] | None


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
        vision: VisionMemory,
        limits: InputLimits,
        budgets: Budgets,
    ) -> None:
        self._module = module
        self._control = control
        self._features = features
        self._layout = layout
        self._vision = vision
        self._limits = limits
        self._budgets = budgets

    def run(self, command: ForwardBackward, model: TrainedModel) -> Outcome:
        """Computes; adds to the model's gradients if `backward`. Collective.

        Raises, on all ranks and with nothing changed: what `FeatureCache.patches_of` raises.
        """
        schedule = plan(command.sizes, self._control.world_size, self._budgets.tokens, self._budgets.patches)
        prepared = self._control.agree(lambda: self._prepare(command, model, schedule))
        towers = self._tower_steps(prepared, schedule)
        model.activate()
        own = self._compute(command, model, schedule, towers, prepared)
        self._vision.remember(prepared.seen or {})
        gathered = self._control.gather(own)
        if not gathered:
            return Outcome(*own, schedule.efficiency)
        logprobs = {index: values for part, _ in gathered for index, values in part.items()}
        metrics = _reduce([metrics for _, metrics in gathered])
        metrics |= {"tokens:sum": float(sum(size.token_count for size in command.sizes))}
        return Outcome(logprobs, metrics, schedule.efficiency)

    def _prepare(self, command: ForwardBackward, model: TrainedModel, schedule: Plan) -> Prepared:
        loss = loss_of(command.loss)
        datums = {
            index: decode_datum(trainer_pb2.Datum.FromString(command.datums[index]), index, loss, self._limits)
            for index in schedule.datums_of(self._control.rank)
        }
        seen = None
        if not model.trains_vision:
            grids = {span.feature.digest: span.grid_thw for datum in datums.values() for span in datum.spans}
            seen = self._vision.recall(grids)
        return Prepared(datums, self._features.patches_of(datums.values(), seen or {}), seen)

    def _tower_steps(self, prepared: Prepared, schedule: Plan) -> list[bool]:
        """For each step, whether the ranks run the vision tower: the same on all of them. Collective."""
        if prepared.seen is None or not any(step.has_vision for step in schedule.steps):
            return [step.has_vision for step in schedule.steps]
        seen = set(prepared.seen)
        needs = []
        for step in schedule.steps:
            own = (prepared.datums[index] for index in step.datums[self._control.rank])
            wanted = wanted_images(own, seen)
            needs.append(bool(wanted))
            seen |= {digest for digest, _ in wanted}
        return self._control.any_of_each(needs)

    def _compute(
        self,
        command: ForwardBackward,
        model: TrainedModel,
        schedule: Plan,
        towers: list[bool],
        prepared: Prepared,
    ) -> tuple[Logprobs, Metrics]:
        loss = loss_of(command.loss)
        logprobs: Logprobs = {}
        metrics = []
        for step, run_tower in zip(schedule.steps, towers, strict=True):
            own = [prepared.datums[index] for index in step.datums[self._control.rank]]
            batch = self._layout.pack(own, loss, prepared.patches, run_tower, prepared.seen)
            with torch.set_grad_enabled(command.backward):
                value, logprobs_TK, extra = self._module(batch, loss, command.config, model.unembedding, prepared.seen)
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
