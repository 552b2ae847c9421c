"""One forward_backward call on one rank: prepare and agree, then compute step by step with all ranks.

Nothing can fail on one rank alone between the first collective and the last: everything that depends on input or on
other services is done and agreed on before. There are two exceptions, after which all ranks fail together at the end. A
loss whose value or gradient does not exist, which only its log-probabilities can tell: its rank goes on with a loss of
zero. And memory that runs out: its rank computes no more. That is sound where its passes need no other rank; where they
do, micro-batches that may not fit are refused before, and should one still fail, the trainer ends.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fovea.api.v1 import model_input_pb2, trainer_pb2
from fovea.wire.errors import FoveaError
from fovea.wire.features import FeatureTensors
from fovea_services.trainer.batches.datum_decoding import Datum, DatumLimits, decode_datum
from fovea_services.trainer.batches.micro_batch import Batch, BatchLayout, wanted_images
from fovea_services.trainer.batches.packing import Plan, Step, plan
from fovea_services.trainer.batches.vision_cache import TensorFetcher, VisionOutput, VisionOutputCache
from fovea_services.trainer.command_queue import ForwardBackward
from fovea_services.trainer.loss_results import (
    ForwardBackwardResult,
    MicroBatchResult,
    RankResult,
    expert_loads,
    reduce_measures,
)
from fovea_services.trainer.losses import Loss, Sandbox, loss_of
from fovea_services.trainer.model.memory_budget import Budgets, MemoryBudget
from fovea_services.trainer.model.sharding import ShardedModel
from fovea_services.trainer.model.trained_model import FullModel, TrainedModel
from fovea_services.trainer.ranks.control_group import ControlGroup, is_out_of_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedCall:
    """What this rank computes with.

    Args:
        command: What was asked for.
        model: Whose weights are used, and whose gradients added to.
        alone: Whether its passes need no other rank.
        loss: What is computed.
        datums: This rank's, by index.
        images: Tensors of the images that the tower may have to be run on, by digest.
        cached: Outputs of the frozen tower that are known; None if the tower is trained.
    """

    command: ForwardBackward
    model: TrainedModel
    alone: bool
    loss: Loss
    datums: dict[int, Datum]
    images: dict[str, FeatureTensors]
    cached: dict[str, VisionOutput] | None


class LossComputer:
    """Runs forward_backward calls on this rank."""

    def __init__(
        self,
        sharded: ShardedModel,
        control: ControlGroup,
        features: TensorFetcher,
        layout: BatchLayout,
        vision: VisionOutputCache,
        limits: DatumLimits,
        memory: MemoryBudget,
        sandbox: Sandbox,
    ) -> None:
        self._sharded = sharded
        self._module = sharded.module
        self._control = control
        self._features = features
        self._layout = layout
        self._vision = vision
        self._limits = limits
        self._memory = memory
        self._sandbox = sandbox

    def prepare(self) -> bool:
        """Whether all ranks can compute traced losses at once; starts what is not ready. Collective.

        Raises what `Sandbox.prepare` raises, on all ranks.
        """
        return self._control.minimum(int(self._control.agree(self._sandbox.prepare))) == 1

    def run(self, command: ForwardBackward, model: TrainedModel) -> ForwardBackwardResult:
        """Computes; adds to the model's gradients if `backward`. Collective.

        Raises, on all ranks, with the gradients as they were before the call: what `TensorFetcher.tensors_of` raises;
        InvalidInput if a loss or its gradient is not finite, or if a traced loss fails or takes too much;
        ResourceExhausted if memory ran out. Gradients of all parameters are not kept twice: those that earlier calls
        had added are dropped too.
        """
        budgets = self._memory.budgets(model.pending_bytes if command.backward else 0, model.trains_vision)
        schedule = self._plan(command, budgets)
        call = self._control.agree(lambda: self._prepare(command, model, schedule, budgets))
        seconds_left = call.loss.seconds_left
        try:
            own = self._attempt(call, schedule, self._memory.recompute_above(budgets))
            if own.out_of_memory and (not command.backward or model.restore_gradients()):
                reason = own.failure or "another rank ran out of memory"
                logger.warning("%s; once more, in the smallest micro-batches, activations computed again", reason)
                schedule = self._plan(command, Budgets(1, 1))
                call.loss.limit_time(seconds_left)
                own = self._attempt(call, schedule, 0)
            self._control.agree(own.check)
        except FoveaError:
            if command.backward:
                model.restore_gradients()
            raise
        finally:
            model.drop_saved_gradients()
        if command.backward:
            model.gradients_added()
        self._vision.store_all(call.cached or {})
        counts = [] if own.expert_counts is None else own.expert_counts.tolist()
        gathered = self._control.gather((own.logprobs, dict(own.measures), counts))
        if not gathered:
            return ForwardBackwardResult(own.logprobs, {}, schedule.efficiency)
        logprobs = {index: values for part, _, _ in gathered for index, values in part.items()}
        metrics = reduce_measures(measures for _, measures, _ in gathered)
        metrics |= expert_loads(self._module.expert_loads.layers, [part for _, _, part in gathered])
        metrics |= {"tokens:sum": float(sum(size.token_count for size in command.sizes))}
        return ForwardBackwardResult(logprobs, metrics, schedule.efficiency)

    def fetch_ahead(self, features: Iterable[model_input_pb2.VisionFeature], trains_vision: bool) -> None:
        """Has tensors fetched that a call to come may need: not those whose output is known. From any thread."""
        self._features.fetch_ahead(
            [feature for feature in features if trains_vision or not self._vision.holds(feature.digest)]
        )

    def forget(self, model_id: str) -> None:
        """Drops what waits for a model's next call."""
        self._features.forget(model_id)

    def _plan(self, command: ForwardBackward, budgets: Budgets) -> Plan:
        """Which rank has which datum does not depend on the budgets."""
        return plan(command.sizes, self._control.world_size, budgets.tokens, budgets.patches)

    def _attempt(self, call: PreparedCall, schedule: Plan, recompute_above: float) -> RankResult:
        """Where memory ran out on any rank, `out_of_memory` is set on all of them, which are ready for another try."""
        towers = self._tower_steps(call, schedule)
        call.model.activate()
        if call.alone:
            self._sharded.gather()
        result = RankResult()
        self._compute(call, schedule, towers, recompute_above, result)
        if call.alone and any(self._control.any_each([result.out_of_memory])):
            result.run_out()
            self._sharded.abandon_pass()
            self._memory.collect()
        return result

    def _prepare(self, command: ForwardBackward, model: TrainedModel, schedule: Plan, budgets: Budgets) -> PreparedCall:
        alone = self._sharded.computes_alone(isinstance(model, FullModel))
        if command.backward:
            model.save_gradients(self._memory.device_for)
        if not alone:
            for step in schedule.steps:
                self._memory.check_fits(self._tokens_of(command, step, self._control.rank), budgets)
        loss = loss_of(trainer_pb2.ForwardBackwardHeader.FromString(command.header), self._sandbox)
        datums = {index: self._datum(command, index, loss) for index in schedule.datums_of(self._control.rank)}
        cached = None
        if not model.trains_vision:
            counts = {span.feature.digest: span.embedding_count for datum in datums.values() for span in datum.spans}
            cached = self._vision.lookup(counts)
        images = self._features.tensors_of(command.model_id, list(datums.values()), cached or {})
        return PreparedCall(command, model, alone, loss, datums, images, cached)

    def _tokens_of(self, command: ForwardBackward, step: Step, rank: int) -> int:
        return sum(command.sizes[index].token_count for index in step.datums[rank])

    def _most_tokens(self, call: PreparedCall, step: Step) -> int:
        """Of the ranks that make the passes of a step together: what recomputes, communicates twice."""
        ranks = [self._control.rank] if call.alone else range(len(step.datums))
        return max(self._tokens_of(call.command, step, rank) for rank in ranks)

    def _datum(self, command: ForwardBackward, index: int, loss: Loss) -> Datum:
        if command.decoded is not None:
            return command.decoded[index]
        return decode_datum(trainer_pb2.Datum.FromString(command.datums[index]), index, loss, self._limits)

    def _tower_steps(self, call: PreparedCall, schedule: Plan) -> list[bool]:
        """For each step, whether the ranks run the vision tower: the same on all of them. Collective."""
        if call.cached is None or not any(step.has_vision for step in schedule.steps):
            return [step.has_vision for step in schedule.steps]
        known = set(call.cached)
        needs = []
        for step in schedule.steps:
            own = (call.datums[index] for index in step.datums[self._control.rank])
            wanted = wanted_images(own, known)
            needs.append(bool(wanted))
            known |= {digest for digest, _ in wanted}
        return self._control.any_each(needs)

    def _compute(
        self, call: PreparedCall, schedule: Plan, towers: list[bool], recompute_above: float, result: RankResult
    ) -> None:
        batches: list[MicroBatchResult] = []

        def compute(step: Step, run_tower: bool) -> None:
            own = [call.datums[index] for index in step.datums[self._control.rank]]
            recompute = self._most_tokens(call, step) > recompute_above
            batch = self._layout.pack(own, call.images, run_tower, call.cached)
            with torch.set_grad_enabled(call.command.backward):
                logprobs_TK = self._module(batch, call.model.unembedding, call.cached, recompute, call.loss.temperature)
                if own:  # a rank without a datum computes a filler
                    result.count_experts(self._module.expert_loads.counts())
                total, found = _losses_of(batch, logprobs_TK, call.loss, result)
            if call.command.backward:
                torch.autograd.backward([total])
                call.model.collect_gradients()
            batches.append(found)

        def bring_to_host() -> None:
            for found in batches:
                result.add(found, call.loss.name, f"model {call.model.model_id!r} at step {call.model.step}")

        for step, run_tower in zip(schedule.steps, towers, strict=True):
            _guard(call.alone, result, partial(compute, step, run_tower))
            if step is not schedule.steps[-1] and not self._goes_on(call.loss, result):
                break
            if result.out_of_memory:
                break
        # Only now: looking at a result makes the device wait for us, and we have the next micro-batch to prepare.
        _guard(call.alone, result, bring_to_host)

    def _goes_on(self, loss: Loss, result: RankResult) -> bool:
        """Of a loss that may take so long: whether it has failed on no rank. Collective.

        No rank has more time left than another: however datums are spread, a call waits once for losses to be stopped.
        """
        if loss.seconds_left is None:
            return True
        left_us = self._control.minimum(-1 if result.failure else int(loss.seconds_left * 1e6))
        loss.limit_time(left_us / 1e6)
        return left_us >= 0


def _guard(alone: bool, result: RankResult, action: Callable[[], None]) -> None:
    """Notes that memory ran out in `action`, where no other rank is in the middle of it too."""
    if result.out_of_memory:
        return
    try:
        action()
    except Exception as error:
        if not (alone and is_out_of_memory(error)):
            raise
        result.run_out(error)


def _losses_of(batch: Batch, logprobs_TK: Tensor, loss: Loss, result: RankResult) -> tuple[Tensor, MicroBatchResult]:
    """The sum of the losses of a micro-batch, scalar with gradient, and what there is to tell of it.

    Where there is none, a zero that still depends on the model: all ranks must run backward together.
    """
    parts = batch.split_logprobs(logprobs_TK)
    rows = [part.detach() for part in parts]
    try:
        if result.failure is None and parts:
            values = loss.compute_each([datum.index for datum in batch.datums], parts, batch.inputs)
            losses = torch.stack([value.loss for value in values])
            measures = {
                name: torch.stack([value.metrics[name] for value in values]).detach() for name in values[0].metrics
            }
            return losses.sum(), MicroBatchResult(batch.datums, rows, losses.detach(), measures)
    except FoveaError as error:
        result.fail(error)
    return logprobs_TK.sum() * 0.0, MicroBatchResult(batch.datums, rows, None, {})
