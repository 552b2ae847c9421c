"""One forward_backward call on one rank: prepare and agree, then compute step by step with all ranks.

Nothing can fail on one rank alone between the first collective and the last: everything that depends on input or on
other services is done and agreed on before. There are two exceptions, after which all ranks fail together at the end. A
loss whose value or gradient does not exist, which only its log-probabilities can tell: its rank goes on with a loss of
zero. And memory that runs out: its rank computes no more. That is sound where its passes need no other rank; where they
do, micro-batches that may not fit are refused before, and should one still fail, the trainer ends.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

import logging
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import FoveaError, InvalidInput, ResourceExhausted
from services.trainer.batches.datum_decoding import Datum, InputLimits, decode_datum
from services.trainer.batches.micro_batch import Batch, BatchLayout, Patches, wanted_images
from services.trainer.batches.packing import Plan, Step, plan
from services.trainer.batches.vision_memory import SeenImage, VisionMemory
from services.trainer.batches.vision_tensors import FeatureCache
from services.trainer.commands import ForwardBackward
from services.trainer.losses import Loss, Sandbox, loss_of
from services.trainer.model.device_memory import is_out_of_memory
from services.trainer.model.memory_account import MemoryAccount
from services.trainer.model.sharding import ShardedModel
from services.trainer.model.token_budget import Budgets
from services.trainer.model.trained_model import FullModel, TrainedModel
from services.trainer.ranks.control_group import ControlGroup

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Outcome:
    """What a call computed: on rank 0 of all datums; elsewhere log-probabilities of its own, and no metrics."""

    logprobs: Logprobs
    metrics: Metrics
    packing_efficiency: float

    @property
    def size_bytes(self) -> int:
        """Memory of the log-probabilities."""
        return sum(values.nbytes for values in self.logprobs.values())


@dataclass(frozen=True)
class Prepared:
    """What this rank computes with.

    Args:
        loss: What is computed.
        datums: Its datums by index.
        patches: Of the images that the tower may have to be run on, by digest.
        seen: Outputs of the frozen tower that are known; None if the tower is trained.
    """

    loss: Loss
    datums: dict[int, Datum]
    patches: dict[str, Patches]
    seen: dict[str, SeenImage] | None


@dataclass(frozen=True)
class Scored:
    """What came of one micro-batch, still on the device: the rows of all datums, the loss and the measures of each."""

    datums: tuple[Datum, ...]
    rows: list[Tensor]
    losses: Tensor | None
    measures: dict[str, Tensor]


@dataclass
class Share:
    """What this rank computed of a call, and the first failure: a loss that could not be, or memory that ran out."""

    logprobs: Logprobs = field(default_factory=dict)
    measures: Measures = field(default_factory=lambda: defaultdict(list))
    failure: FoveaError | None = None
    ran_out: bool = False

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def take(self, scored: Scored, loss_name: str) -> None:
        """Brings a micro-batch to the host; finds losses that are not finite."""
        flat = torch.cat([row.flatten() for row in scored.rows]).cpu()
        rows = torch.split(flat, [row.numel() for row in scored.rows])
        for datum, row, like in zip(scored.datums, rows, scored.rows, strict=True):
            self.logprobs[datum.index] = row.view(like.shape).numpy().copy()
        if scored.losses is None or self.failure is not None:
            return
        for datum, number in zip(scored.datums, found := scored.losses.tolist(), strict=True):
            if not math.isfinite(number):
                self.failure = InvalidInput(
                    f"datum[{datum.index}]: its {loss_name} loss is {number}; check its loss_inputs, whose numbers are "
                    "too large or whose ratio to the model's log-probabilities overflows",
                    field=f"datum[{datum.index}]",
                )
                return
        self.measures["loss:sum"] += found
        for name, values in scored.measures.items():
            self.measures[name] += values.tolist()


class LossComputer:
    """Runs forward_backward calls on this rank."""

    def __init__(
        self,
        sharded: ShardedModel,
        control: ControlGroup,
        features: FeatureCache,
        layout: BatchLayout,
        vision: VisionMemory,
        limits: InputLimits,
        account: MemoryAccount,
        sandbox: Sandbox,
    ) -> None:
        self._sharded = sharded
        self._module = sharded.module
        self._control = control
        self._features = features
        self._layout = layout
        self._vision = vision
        self._limits = limits
        self._account = account
        self._sandbox = sandbox

    def prepare(self) -> bool:
        """Whether all ranks can compute traced losses at once; starts what is not ready. Collective.

        Raises what `Sandbox.prepare` raises, on all ranks.
        """
        return self._control.least(int(self._control.agree(self._sandbox.prepare))) == 1

    def run(self, command: ForwardBackward, model: TrainedModel) -> Outcome:
        """Computes; adds to the model's gradients if `backward`. Collective.

        Raises, on all ranks, with the gradients as they were before the call: what `FeatureCache.patches_of` raises;
        InvalidInput if a loss or its gradient is not finite, or if a traced loss fails or takes too much;
        ResourceExhausted if memory ran out. Gradients of all parameters are not kept twice: those that earlier calls
        had added are dropped too.
        """
        budgets = self._account.budgets(model.pending_bytes if command.backward else 0, model.trains_vision)
        alone = self._sharded.computes_alone(isinstance(model, FullModel))
        schedule = self._plan(command, budgets)
        prepared = self._control.agree(lambda: self._prepare(command, model, schedule, budgets, alone))
        seconds_left = prepared.loss.seconds_left
        try:
            own = self._attempt(command, model, schedule, prepared, alone, self._account.recompute_above(budgets))
            if own.ran_out and not (command.backward and not model.revert_gradients()):
                reason = own.failure or "another rank ran out of memory"
                logger.warning("%s; once more, in the smallest micro-batches, activations computed again", reason)
                schedule = self._plan(command, Budgets(1, 1))
                prepared.loss.seconds_left = seconds_left
                own = self._attempt(command, model, schedule, prepared, alone, 0)
            self._control.agree(own.check)
        except FoveaError:
            if command.backward:
                model.revert_gradients()
            raise
        finally:
            model.forget_held_gradients()
        model.has_gradients = model.has_gradients or command.backward
        self._vision.remember(prepared.seen or {})
        gathered = self._control.gather((own.logprobs, dict(own.measures)))
        if not gathered:
            return Outcome(own.logprobs, {}, schedule.efficiency)
        logprobs = {index: values for part, _ in gathered for index, values in part.items()}
        metrics = _reduce([measures for _, measures in gathered])
        metrics |= {"tokens:sum": float(sum(size.token_count for size in command.sizes))}
        return Outcome(logprobs, metrics, schedule.efficiency)

    def forget(self, model_id: str) -> None:
        """Drops what waits for a model's next call."""
        self._features.forget(model_id)

    def _plan(self, command: ForwardBackward, budgets: Budgets) -> Plan:
        """Which rank has which datum does not depend on the budgets."""
        return plan(command.sizes, self._control.world_size, budgets.tokens, budgets.patches)

    def _attempt(
        self,
        command: ForwardBackward,
        model: TrainedModel,
        schedule: Plan,
        prepared: Prepared,
        alone: bool,
        recompute_above: float,
    ) -> Share:
        """Where memory ran out on any rank, `ran_out` is set on all of them, which are ready for another attempt."""
        towers = self._tower_steps(prepared, schedule)
        self._module.recompute_above = recompute_above
        model.activate()
        if alone:
            self._sharded.gather()
        share = Share()
        self._compute(command, model, schedule, towers, prepared, alone, share)
        if alone and any(self._control.any_of_each([share.ran_out])):
            share.ran_out = True
            self._sharded.abandon_pass()
            self._account.collect()
        return share

    def _prepare(
        self, command: ForwardBackward, model: TrainedModel, schedule: Plan, budgets: Budgets, alone: bool
    ) -> Prepared:
        if command.backward:
            model.hold_gradients(self._account.place)
        if not alone:
            for step in schedule.steps:
                self._account.check_fits(self._tokens_of(command, step), budgets)
        loss = loss_of(trainer_pb2.ForwardBackwardHeader.FromString(command.header), self._sandbox)
        datums = {index: self._datum(command, index, loss) for index in schedule.datums_of(self._control.rank)}
        seen = None
        if not model.trains_vision:
            grids = {span.feature.digest: span.grid_thw for datum in datums.values() for span in datum.spans}
            seen = self._vision.recall(grids)
        return Prepared(
            loss, datums, self._features.patches_of(command.model_id, list(datums.values()), seen or {}), seen
        )

    def _tokens_of(self, command: ForwardBackward, step: Step) -> int:
        return sum(command.sizes[index].token_count for index in step.datums[self._control.rank])

    def _datum(self, command: ForwardBackward, index: int, loss: Loss) -> Datum:
        if command.decoded is not None:
            return command.decoded[index]
        return decode_datum(trainer_pb2.Datum.FromString(command.datums[index]), index, loss, self._limits)

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
        alone: bool,
        share: Share,
    ) -> None:
        scored: list[Scored] = []

        def compute(step: Step, run_tower: bool) -> None:
            own = [prepared.datums[index] for index in step.datums[self._control.rank]]
            batch = self._layout.pack(own, prepared.patches, run_tower, prepared.seen)
            with torch.set_grad_enabled(command.backward):
                logprobs_TK = self._module(batch, model.unembedding, prepared.seen)
                total, found = _score(batch, logprobs_TK, prepared.loss, share)
            if command.backward:
                torch.autograd.backward([total])
                model.collect_gradients()
            scored.append(found)

        def take() -> None:
            for found in scored:
                if found.datums:
                    share.take(found, prepared.loss.name)

        for step, run_tower in zip(schedule.steps, towers, strict=True):
            _guard(alone, share, partial(compute, step, run_tower))
            if step is not schedule.steps[-1] and not self._goes_on(prepared.loss, share):
                break
            if share.ran_out:
                break
        # Only now: looking at a result makes the device wait for us, and we have the next micro-batch to prepare.
        _guard(alone, share, take)

    def _goes_on(self, loss: Loss, share: Share) -> bool:
        """Of a loss that may take so long: whether it has failed on no rank. Collective.

        No rank has more time left than another: however datums are spread, a call waits once for losses to be stopped.
        """
        if loss.seconds_left is None:
            return True
        left = self._control.least(-1 if share.failure else int(loss.seconds_left * 1e6))
        loss.seconds_left = left / 1e6
        return left >= 0


def _guard(alone: bool, share: Share, action: Callable[[], None]) -> None:
    """Notes that memory ran out in `action`, where no other rank is in the middle of it too."""
    if share.ran_out:
        return
    try:
        action()
    except Exception as error:
        if not (alone and is_out_of_memory(error)):
            raise
        reason = str(error).splitlines()[0]
        share.ran_out = True
        share.failure = ResourceExhausted(
            f"the trainer ran out of memory in this call: {reason}. Send shorter datums, or delete models"
        )


def _score(batch: Batch, logprobs_TK: Tensor, loss: Loss, share: Share) -> tuple[Tensor, Scored]:
    """The sum of the losses of a micro-batch, scalar with gradient, and what there is to tell of it.

    Where there is none, a zero that still depends on the model: all ranks must run backward together.
    """
    parts = batch.split_logprobs(logprobs_TK)
    rows = [part.detach() for part in parts]
    try:
        if share.failure is None and parts:
            losses, measures = _losses(batch, parts, loss)
            return losses.sum(), Scored(batch.datums, rows, losses.detach(), measures)
    except FoveaError as error:
        share.failure = error
    return logprobs_TK.sum() * 0.0, Scored(batch.datums, rows, None, {})


def _losses(batch: Batch, parts: list[Tensor], loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each datum, 1-D with gradient, and its measures. Raises InvalidInput naming the datum without one."""
    values = loss.compute_each([datum.index for datum in batch.datums], parts, batch.inputs)
    losses = torch.stack([value.loss for value in values])
    names = values[0].metrics
    return losses, {name: torch.stack([value.metrics[name] for value in values]).detach() for name in names}


def _reduce(parts: list[Measures]) -> Metrics:
    """Joins the measures of all ranks by what stands behind the colon of their names."""
    values: Measures = defaultdict(list)
    for part in parts:
        for name, found in part.items():
            values[name] += found
    return {name: float(_REDUCTIONS[name.partition(":")[2]](found)) for name, found in values.items()}
