"""Small calls of several adapters in one pass, so that many tenants with small steps use the device together.

A call keeps its own loss, its own failure and its own result. Gradients are added to a model only after its call has
succeeded.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from fovea.wire.errors import FoveaError, NotFound
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import BatchLayout, fillers, wanted_images
from fovea_trainer.batches.places import Place, Share, power_of_two, slot_count
from fovea_trainer.batches.vision_cache import VisionOutputCache
from fovea_trainer.command_queue import ForwardBackward
from fovea_trainer.forward_backward import LossComputer, PreparedCall, losses_of
from fovea_trainer.loss_results import ForwardBackwardResult, RankResult, reduce_measures
from fovea_trainer.losses import Loss
from fovea_trainer.model.lora import LoraWeights
from fovea_trainer.model.memory_budget import MemoryBudget
from fovea_trainer.model.trained_model import AdapterModel, TrainedModel
from fovea_trainer.ranks.control_group import is_out_of_memory

logger = logging.getLogger(__name__)


class SharedCalls:
    """Runs small calls of different models together on a single rank.

    Args:
        computer: Computes calls alone.
        layout: Packs datums.
        vision: Known outputs of the frozen tower.
        memory: Memory of this rank.
    """

    def __init__(
        self, computer: LossComputer, layout: BatchLayout, vision: VisionOutputCache, memory: MemoryBudget
    ) -> None:
        self._computer, self._layout, self._vision, self._memory = computer, layout, vision, memory
        self._small_passes = computer.small_passes

    @property
    def most_tokens(self) -> int:
        """Most tokens of a pass that several calls share; 0 if each call has a pass of its own."""
        return self._small_passes.most_shared_tokens

    def share_of(self, model: TrainedModel, loss: Loss, datums: Sequence[Datum], backward: bool) -> Share | None:
        """Returns the conditions under which a call may share a pass; None if it computes alone. For any thread."""
        if not isinstance(model, AdapterModel) or model.trains_vision or loss.seconds_left is not None:
            return None
        return self._small_passes.share_of(model.weights, datums, loss.temperature, backward)

    def place_of(self, given: str, share: Share | None) -> Place | None:
        """Returns the place that an earlier result of a call has named; None if this trainer cannot use it. For any
        thread.
        """
        place = self._small_passes.place_of(given)
        return place if place and share and share.rows <= place.rows else None

    def run(
        self, commands: Sequence[ForwardBackward], models: Mapping[str, TrainedModel]
    ) -> list[ForwardBackwardResult | FoveaError]:
        """Computes calls of different models in as few passes as possible.

        Args:
            commands: Calls of which the first one's `share` takes all others, or one call with a `place`.
            models: All models, keyed by id.

        Returns:
            The result or the error of each call, in order. The errors are those of `LossComputer.run`, and NotFound.
        """
        left = [(command, models[command.model_id]) for command in commands if command.model_id in models]
        found: list[ForwardBackwardResult | FoveaError] = []
        while left:
            command, model = left[0]
            place, rows = command.place, max(one.share.rows for one, _ in left if one.share) if command.share else 0
            if place is None:
                most = min(len(left), self._most_slots(model, rows))
                place = Place(slot_count(most, rows) if most > 1 else 1, rows, 0)
            taken, left = left[: place.slots], left[place.slots :]
            found += self._shared(taken, place) if place.slots > 1 else [self._alone(command, model)]
        in_order = iter(found)
        return [next(in_order) if command.model_id in models else _unknown(command) for command in commands]

    def _alone(self, command: ForwardBackward, model: TrainedModel) -> ForwardBackwardResult | FoveaError:
        try:
            return self._computer.run(command, model)
        except FoveaError as error:
            return error

    def _shared(
        self, members: Sequence[tuple[ForwardBackward, TrainedModel]], place: Place
    ) -> list[ForwardBackwardResult | FoveaError]:
        """Computes calls in consecutive slots of one pass, from slot `first`; each alone if it does not fit."""
        prepared = [self._try_to_prepare(*member) for member in members]
        calls = [call for call in prepared if isinstance(call, PreparedCall)]
        if not self._fits(calls, place):
            return [self._alone(*member) for member in members]
        try:
            results = iter(self._shared_pass(calls, place) if calls else [])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("%d calls did not fit into one pass, so each is computed alone", len(calls))
            self._memory.collect()
            return [self._alone(*member) for member in members]
        return [next(results) if isinstance(one, PreparedCall) else one for one in prepared]

    def _fits(self, calls: Sequence[PreparedCall], place: Place) -> bool:
        patches = sum(size.patch_count for call in calls for size in call.command.sizes)
        slots = self._most_slots(calls[0].model, place.rows) if calls else place.slots
        return place.slots <= slots and patches <= self._memory.budgets(0, False).patches

    def _most_slots(self, model: TrainedModel, rows: int) -> int:
        """Returns the most slots of a pass with `rows` rows for each, a power of two, as memory allows it now."""
        budgets = self._memory.budgets(0, False)
        tokens = min(budgets.tokens, self._memory.recompute_above(budgets))
        slots = self._small_passes.slots_of(cast(AdapterModel, model).weights)
        while slots > 1 and slots * rows > tokens:
            slots //= 2
        return slots

    def _try_to_prepare(self, command: ForwardBackward, model: TrainedModel) -> PreparedCall | FoveaError:
        if command.backward and command.drop_gradients:
            model.zero_gradients()
        try:
            return self._computer.inputs(command, model, True, range(len(command.sizes)))
        except FoveaError as error:
            return error

    def _shared_pass(self, calls: Sequence[PreparedCall], place: Place) -> list[ForwardBackwardResult | FoveaError]:
        slots, rows, first = place.slots, place.rows, place.slot
        adapters: list[LoraWeights | None] = [None] * slots
        longest = power_of_two(max(size.token_count for call in calls for size in call.command.sizes))
        datums = fillers(first * rows, longest)
        spans = []
        for slot, call in enumerate(calls, first):
            adapters[slot] = cast(AdapterModel, call.model).weights
            spans.append(slice(len(datums), len(datums) + len(call.datums)))
            datums += call.datums.values()
            datums += fillers(rows - sum(size.token_count for size in call.command.sizes), longest)
        datums += fillers((slots - first - len(calls)) * rows, longest)
        cached = {digest: output for call in calls for digest, output in (call.cached or {}).items()}
        images = {digest: image for call in calls for digest, image in call.images.items()}
        backward, results = calls[0].command.backward, [RankResult() for _ in calls]
        batch = self._layout.pack(datums, images, bool(wanted_images(datums, cached)), cached)
        with torch.set_grad_enabled(backward):
            logprobs = self._small_passes.shared_logprobs(batch, adapters, cached, calls[0].loss.temperature)
            computed = [
                losses_of(batch, logprobs, call.loss, result, span)
                for call, result, span in zip(calls, results, spans, strict=True)
            ]
        if backward:
            torch.autograd.backward([torch.stack([total for total, _ in computed]).sum()])
        for call, result, (_, found) in zip(calls, results, computed, strict=True):
            result.add(found, call.loss.name, call.name)
        self._vision.store_all(cached)
        if backward:
            healthy = iter(result.failure is None for result in results)
            self._small_passes.add_gradients([weights if weights and next(healthy) else None for weights in adapters])
        return [
            _outcome(call, result, Place(slots, rows, slot))
            for slot, (call, result) in enumerate(zip(calls, results, strict=True), first)
        ]


def _outcome(call: PreparedCall, result: RankResult, place: Place) -> ForwardBackwardResult | FoveaError:
    if result.failure is not None:
        return result.failure
    if call.command.backward:
        call.model.gradients_added()
    tokens = sum(size.token_count for size in call.command.sizes)
    metrics = reduce_measures([result.measures]) | {"tokens:sum": float(tokens)}
    return ForwardBackwardResult(result.logprobs, metrics, tokens / place.rows, str(place))


def _unknown(command: ForwardBackward) -> NotFound:
    return NotFound(f"model_id {command.model_id!r} is unknown to this trainer", field="model_id")
