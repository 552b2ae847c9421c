"""One forward_backward call on one rank: prepare and agree, then compute step by step with all ranks.

No rank may fail alone between the first collective and the last. The ranks therefore first do all work that depends on
input or on other services, and agree that it succeeded.

Two failures can still happen to one rank alone. All ranks then fail together at the end of the call. First, a loss or a
gradient may not be finite, which only the log-probabilities show. The rank then continues with a loss of zero. Second,
memory may run out. If the passes of a rank need no other rank, the rank then computes no more. If they do,
micro-batches that may not fit are refused beforehand; if memory runs out nevertheless, the trainer ends.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fovea.api.v1 import model_input_pb2, trainer_pb2
from fovea.wire.errors import FoveaError
from fovea.wire.tensors import FeatureTensors
from fovea_trainer.batches.datum_decoding import Datum, DatumLimits, decode_datum
from fovea_trainer.batches.datum_groups import DatumGroups, Share, allowed_sizes
from fovea_trainer.batches.micro_batch import Batch, BatchLayout, wanted_images
from fovea_trainer.batches.places import Plan, Step, plan
from fovea_trainer.batches.vision_cache import TensorFetcher, VisionOutput, VisionOutputCache, tower_calls
from fovea_trainer.command_queue import ForwardBackward
from fovea_trainer.loss_results import (
    ForwardBackwardResult,
    MicroBatchResult,
    RankResult,
    expert_loads,
    reduce_measures,
)
from fovea_trainer.losses import Loss, Sandbox, loss_of
from fovea_trainer.model.lora import LoraInjector
from fovea_trainer.model.memory_budget import Budgets, MemoryBudget
from fovea_trainer.model.packed_model import PackedModel
from fovea_trainer.model.sharding import ShardedModel
from fovea_trainer.model.small_passes import SmallPasses
from fovea_trainer.model.trained_model import AdapterModel, FullModel, TrainedModel
from fovea_trainer.ranks.control_group import ControlGroup, is_out_of_memory
from fovea_trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 67
"""A length that equals no other size of a model: torch.compile treats sizes that are equal once as always equal."""


@dataclass(frozen=True)
class PreparedCall:
    """The inputs of this rank's computation.

    Args:
        command: The command.
        model: The model. A call with `backward` adds to its gradients.
        alone: True if the passes need no other rank.
        loss: The loss.
        datums: This rank's datums, keyed by index.
        images: Tensors of the images that the tower may have to process, keyed by digest.
        cached: Known outputs of the frozen tower; None if the tower is trained.
    """

    command: ForwardBackward
    model: TrainedModel
    alone: bool
    loss: Loss
    datums: dict[int, Datum]
    images: dict[str, FeatureTensors]
    cached: dict[str, VisionOutput] | None

    @property
    def name(self) -> str:
        """The model and its step, for errors."""
        return f"model {self.model.model_id!r} at step {self.model.step}"


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
        injector: LoraInjector,
        settings: TrainerSettings,
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
        # Only a single rank records passes: with several, the recording would include the hooks of FSDP.
        records = sharded.mesh.size() == 1
        most_tokens = settings.recorded_tokens if sharded.computes_alone(False) else 0
        self.small_passes = SmallPasses(
            self._module, injector, most_tokens, records, memory.has_room_to_record, memory.has_room_to_share,
            memory.set_aside,
        )  # fmt: skip
        self._groups = DatumGroups(group_sizes(settings, self._module))

    def warm_up(self, model: TrainedModel) -> None:
        """Runs one pass without and one with gradients, so that the first call need not compile kernels. Collective."""
        model.activate()
        batch = self._layout.pack([Datum.blank(_WARM_UP_TOKENS)], {}, self._limits.vision is not None, None)
        with torch.no_grad():
            self._module(batch, model.unembedding, None)
        self._module(batch, model.unembedding, None).sum().backward()
        model.zero_gradients()

    def prepare(self) -> bool:
        """Starts the workers for traced losses. Returns True if those of all ranks are ready. Collective.

        Raises the errors of `Sandbox.prepare` on all ranks.
        """
        return self._control.minimum(int(self._control.agree(self._sandbox.prepare))) == 1

    def run(self, command: ForwardBackward, model: TrainedModel) -> ForwardBackwardResult:
        """Computes the loss; adds to the model's gradients if `backward` is set. Collective.

        An error is raised on all ranks. An adapter then has the gradients that it had before the call. Gradients of
        full parameters are not copied, so an error also drops the gradients of earlier calls.

        Raises:
            InvalidInput: A loss or its gradient is not finite, or a traced loss failed or exceeded its limits.
            ResourceExhausted: Memory ran out, or a datum may not fit.
            FeatureEvicted: A renderer no longer holds an image; see `TensorFetcher.tensors_of`.
        """
        if command.backward and command.drop_gradients:
            model.zero_gradients()
        self._memory.make_room(sum(size.token_count for size in command.sizes))
        budgets = self._memory.budgets(model.pending_bytes if command.backward else 0, model.trains_vision)
        schedule = self._plan(command, budgets)
        self._groups.open(step.ranks for step in schedule.steps)
        call = self._control.agree(lambda: self._prepare(command, model, schedule, budgets))
        seconds_left = call.loss.seconds_left
        try:
            own = self._attempt(call, schedule, partial(self._memory.recomputed_share, budgets=budgets))
            if own.out_of_memory and (not command.backward or model.restore_gradients()):
                reason = own.failure or "another rank ran out of memory"
                logger.warning("%s; retrying with the smallest micro-batches and recomputation", reason)
                schedule = plan(command.sizes, self._control.world_size, 1, 1)
                call.loss.limit_time(seconds_left)
                own = self._attempt(call, schedule, lambda _: 1.0)
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
        """Starts fetching the tensors that a later call may need.

        Skips images with a cached output. Callable from any thread.
        """
        self._features.fetch_ahead(
            [feature for feature in features if trains_vision or not self._vision.holds(feature.digest)]
        )

    def forget(self, model_id: str) -> None:
        """Drops the image tensors retained for a model's next call."""
        self._features.forget(model_id)

    def _plan(self, command: ForwardBackward, budgets: Budgets) -> Plan:
        """Plans the micro-batches. The assignment to ranks depends on the budgets only if ranks share datums."""
        return plan(command.sizes, self._control.world_size, budgets.tokens, budgets.patches, self._groups.sizes)

    def _share(self, command: ForwardBackward, step: Step) -> Share | None:
        """Returns this rank's part of a shared datum; None if it computes whole datums or a filler."""
        own = step.datums[self._control.rank]
        return self._groups.share(step.ranks, command.sizes[own[0]].token_count) if step.ranks > 1 and own else None

    def _own_images(self, command: ForwardBackward, step: Step, datums: Mapping[int, Datum]) -> list[Datum]:
        """Returns this rank's datums of a step, with the images alone that this rank computes."""
        own = [datums[index] for index in step.datums[self._control.rank]]
        share = self._share(command, step)
        return own if share is None else [share.with_own_images(datum) for datum in own]

    def _attempt(self, call: PreparedCall, schedule: Plan, share_of: Callable[[int], float]) -> RankResult:
        """Computes all micro-batches once.

        If memory ran out on any rank, `out_of_memory` is set on all ranks, and all are ready for another attempt.
        """
        towers = self._tower_steps(call, schedule)
        call.model.activate()
        if call.alone:
            self._sharded.gather()
        result = RankResult()
        self._compute(call, schedule, towers, share_of, result)
        if call.alone and any(self._control.any_each([result.out_of_memory])):
            result.run_out()
            self._sharded.abandon_pass()
            self._memory.collect()
        return result

    def _prepare(self, command: ForwardBackward, model: TrainedModel, schedule: Plan, budgets: Budgets) -> PreparedCall:
        alone = self._sharded.computes_alone(isinstance(model, FullModel)) and not schedule.shares_datums
        if command.backward:
            model.save_gradients(self._memory.device_for)
        if not alone:
            for step in schedule.steps:
                self._memory.check_fits(step.tokens_of(command.sizes, self._control.rank), budgets, step.ranks)
        return self.inputs(command, model, alone, schedule.datums_of(self._control.rank), schedule.steps)

    def inputs(
        self,
        command: ForwardBackward,
        model: TrainedModel,
        alone: bool,
        indices: Iterable[int],
        steps: Sequence[Step] | None = None,
    ) -> PreparedCall:
        """Decodes and fetches the inputs of some datums. Raises the errors of both. Not collective.

        Args:
            steps: The steps in which the datums are computed; None if this rank computes all of their images.
        """
        loss = loss_of(trainer_pb2.ForwardBackwardHeader.FromString(command.header), self._sandbox)
        datums = {index: self._datum(command, index, loss) for index in indices}
        own: Iterable[Datum] = datums.values()
        if steps is not None:
            own = (datum for step in steps for datum in self._own_images(command, step, datums))
        counts = {span.feature.digest: span.embedding_count for datum in own for span in datum.spans}
        cached = None if model.trains_vision else self._vision.lookup(counts)
        others = {span.feature.digest for datum in datums.values() for span in datum.spans} - counts.keys()
        images = self._features.tensors_of(command.model_id, list(datums.values()), others.union(cached or ()))
        return PreparedCall(command, model, alone, loss, datums, images, cached)

    def _max_tokens(self, call: PreparedCall, step: Step) -> int:
        """Returns the most tokens of any rank in a step, or this rank's own number if its passes need no other rank.

        Recomputation repeats the collectives of a pass, so ranks that share passes must all decide the same.
        """
        ranks = [self._control.rank] if call.alone else range(len(step.datums))
        return max(step.tokens_of(call.command.sizes, rank) for rank in ranks)

    def _datum(self, command: ForwardBackward, index: int, loss: Loss) -> Datum:
        if command.decoded is not None:
            return command.decoded[index]
        return decode_datum(trainer_pb2.Datum.FromString(command.datums[index]), index, loss, self._limits)

    def _tower_steps(self, call: PreparedCall, schedule: Plan) -> list[int]:
        """Returns the number of calls of the vision tower in each step. Collective.

        It is equal on ranks that share passes, because FSDP gathers the tower in each call.
        """
        if not any(step.has_vision for step in schedule.steps):
            return [0] * len(schedule.steps)
        known = None if call.cached is None else set(call.cached)
        counts = []
        for step in schedule.steps:
            wanted = wanted_images(self._own_images(call.command, step, call.datums), known)
            counts.append(len(tower_calls(call.images[digest] for digest, _ in wanted)))
            if known is not None:
                known |= {digest for digest, _ in wanted}
        return counts if call.alone else self._control.most_each(counts)

    def _compute(
        self,
        call: PreparedCall,
        schedule: Plan,
        towers: list[int],
        share_of: Callable[[int], float],
        result: RankResult,
    ) -> None:
        batches: list[MicroBatchResult] = []

        def compute(step: Step, call_count: int) -> None:
            own = [call.datums[index] for index in step.datums[self._control.rank]]
            recompute = share_of(self._max_tokens(call, step))
            share = self._share(call.command, step)
            if share is None:
                batch = self._layout.pack(own, call.images, call_count, call.cached)
            else:
                batch = self._layout.pack_part(own[0], share, call.images, call_count, call.cached)
            with torch.set_grad_enabled(call.command.backward):
                logprobs_TK = self._logprobs(call, batch, recompute)
                if own:  # a rank without a datum computes a filler
                    result.count_experts(self._module.expert_loads.counts())
                total, found = losses_of(batch, logprobs_TK, call.loss, result)
            if call.command.backward:
                torch.autograd.backward([total])
                call.model.collect_gradients()
            if share is None or share.is_first:
                batches.append(found)

        def bring_to_host() -> None:
            for found in batches:
                result.add(found, call.loss.name, call.name)

        for step, call_count in zip(schedule.steps, towers, strict=True):
            _guard(call.alone, result, partial(compute, step, call_count))
            if step is not schedule.steps[-1] and not self._should_continue(call.loss, result):
                break
            if result.out_of_memory:
                break
        # Results are read only after the loop. Reading waits for the device, so it would delay the preparation of the
        # next micro-batch.
        _guard(call.alone, result, bring_to_host)

    def _logprobs(self, call: PreparedCall, batch: Batch, recompute: float) -> Tensor:
        """Returns the log-probabilities of a micro-batch's targets, float32 [T, K], with gradients."""
        temperature = call.loss.temperature
        if (
            isinstance(call.model, AdapterModel)
            and call.cached is not None
            and self.small_passes.takes(batch, recompute)
        ):
            return self.small_passes.logprobs(batch, call.model.weights, call.cached, temperature)
        found: Tensor = self._module(batch, call.model.unembedding, call.cached, recompute, temperature)
        return found

    def _should_continue(self, loss: Loss, result: RankResult) -> bool:
        """Returns True if no rank has failed, or if the loss has no time limit. With a time limit it is collective.

        It also sets the time left of all ranks to the minimum. A call then waits for slow losses only once, for any
        distribution of the datums.
        """
        if loss.seconds_left is None:
            return True
        left_us = self._control.minimum(-1 if result.failure else int(loss.seconds_left * 1e6))
        loss.limit_time(left_us / 1e6)
        return left_us >= 0


def group_sizes(settings: TrainerSettings, module: PackedModel) -> list[int]:
    """Returns the numbers of ranks that can share a datum. Groups lie within a node."""
    if not module.family.can_share_datums(module.hf):
        return []
    most = min(settings.datum_ranks or settings.ranks, dist.get_world_size())
    return allowed_sizes(most, module.hf.config.get_text_config().num_attention_heads)


def _guard(alone: bool, result: RankResult, action: Callable[[], None]) -> None:
    """Runs `action`. Records an out-of-memory error if no other rank depends on these passes; else raises it."""
    if result.out_of_memory:
        return
    try:
        action()
    except Exception as error:
        if not (alone and is_out_of_memory(error)):
            raise
        result.run_out(error)


def losses_of(
    batch: Batch, logprobs_TK: Tensor, loss: Loss, result: RankResult, own: slice = slice(None)
) -> tuple[Tensor, MicroBatchResult]:
    """Returns the sum of the losses of a micro-batch, a scalar with gradient, and the results to report.

    Without a loss, the sum is a zero that depends on the model, because all ranks must run the backward pass.

    Args:
        own: The datums of the call.
    """
    datums, parts = batch.datums[own], batch.split_logprobs(logprobs_TK)[own]
    rows = [part.detach() for part in parts]
    try:
        if result.failure is None and parts:
            values = loss.compute_each([datum.index for datum in datums], parts, batch.inputs[own])
            losses = torch.stack([value.loss for value in values])
            measures = {
                name: torch.stack([value.metrics[name] for value in values]).detach() for name in values[0].metrics
            }
            return losses.sum(), MicroBatchResult(datums, rows, losses.detach(), measures)
    except FoveaError as error:
        result.fail(error)
    return logprobs_TK.sum() * 0.0, MicroBatchResult(datums, rows, None, {})
