"""Small calls of several adapters in one pass.

A small pass takes about the same time for one call as for sixteen, so tenants with small steps share it. Each call has
its own loss and its own result, and it may fail while the others succeed. Gradients are added to a model only after its
call has succeeded.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from fovea.wire.errors import FoveaError
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import BatchLayout, fillers, wanted_images
from fovea_trainer.batches.places import PassTerms, Place, packed_order, power_of_two, slot_count
from fovea_trainer.batches.vision_cache import VisionOutputCache
from fovea_trainer.command_queue import ForwardBackward
from fovea_trainer.forward_backward import LossComputer, PreparedCall, losses_of
from fovea_trainer.loss_results import ForwardBackwardResult, RankResult, reduce_measures
from fovea_trainer.losses import Loss
from fovea_trainer.losses.custom import Custom
from fovea_trainer.model.lora import LoraWeights
from fovea_trainer.model.memory_budget import MemoryBudget
from fovea_trainer.model.sharding import ShardedModel
from fovea_trainer.model.trained_model import AdapterModel, TrainedModel, unknown_model
from fovea_trainer.ranks.control_group import ControlGroup, is_out_of_memory

logger = logging.getLogger(__name__)


Outcomes = dict[int, ForwardBackwardResult | FoveaError]
"""The result or the error of each call, keyed by the index of the call."""


@dataclass(frozen=True)
class Member:
    """One of the calls that `SharedCalls.run` received.

    Args:
        index: Its index in that list.
        command: The call.
        model: Its model.
    """

    index: int
    command: ForwardBackward
    model: TrainedModel


class SharedCalls:
    """Runs small calls of different models together.

    With several ranks, the calls are dealt to the ranks. A rank computes each of its calls whole, without the others.
    On a CPU it then sends the gradients to rank 0, which would have computed the call alone: a sum of several calls has
    other bits if ranks first add up parts of it.

    Args:
        computer: Computes the calls that share no pass.
        sharded: The base model. Each rank must be able to compute a pass without the others.
        control: Control group of the rank's thread.
        layout: Packs datums.
        vision: Known outputs of the frozen tower.
        memory: Memory of this rank.
    """

    def __init__(
        self,
        computer: LossComputer,
        sharded: ShardedModel,
        control: ControlGroup,
        layout: BatchLayout,
        vision: VisionOutputCache,
        memory: MemoryBudget,
    ) -> None:
        self._computer, self._sharded, self._control = computer, sharded, control
        self._layout, self._vision, self._memory = layout, vision, memory
        self._small_passes = computer.small_passes
        self._for_rank_0: dict[str, Tensor] = {}
        """Gradients that this rank has computed and rank 0 adds up, keyed by model."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of a shared pass; 0 if this trainer shares none."""
        return self._small_passes.most_shared_tokens

    def share_of(self, model: TrainedModel, loss: Loss, datums: Sequence[Datum], backward: bool) -> PassTerms | None:
        """Returns the conditions under which a call may share a pass; None if it may not. For any thread."""
        if not isinstance(model, AdapterModel) or model.trains_vision or isinstance(loss, Custom):
            return None
        if model.weights.flat.device.type == "cpu" and self._control.world_size > 1 and len(datums) > 1:
            return None  # A CPU has equal bits with and without sharing, but not if datums are spread over ranks.
        return self._small_passes.share_of(model.weights, datums, loss.temperature, backward)

    def place_of(self, given: str, share: PassTerms | None) -> Place | None:
        """Returns the place in which a call must run again. For any thread.

        Args:
            given: The place that the call's first result named, as text; possibly not a place.
            share: The conditions of the call, from `share_of`.

        Returns:
            The place; None if the call computes alone, because it did so before or because its place does not exist.
        """
        place = Place.parse(given, self.most_tokens, self._control.world_size)
        return place if place and share and share.rows <= place.rows else None

    def run(
        self, commands: Sequence[ForwardBackward], models: Mapping[str, TrainedModel]
    ) -> list[ForwardBackwardResult | FoveaError]:
        """Computes calls of different models in as few passes as possible. Collective.

        Args:
            commands: Calls that fit together, as the `share` of the first one says; or one call with a `place`.
            models: All models, keyed by id.

        Returns:
            On rank 0, the result or the error of each call, in order. Errors are those of `LossComputer.run`, and
            NotFound if the model does not exist.
        """
        members = [Member(index, command, models[command.model_id]) for index, command in enumerate(commands)
                   if command.model_id in models]  # fmt: skip
        for member in members:
            if member.command.backward and member.command.drop_gradients:
                member.model.zero_gradients()
        # A model may have been created anew, with other settings, since its call was checked.
        sharing = [one for one in members if _layout_of(one.model) == _layout_of(members[0].model) is not None]
        parts = self._control.gather(self._on_this_rank(sharing) if sharing else ({}, False))
        found = {index: outcome for part, _ in parts for index, outcome in part.items()}
        ranks = {
            index: None if isinstance(outcome, FoveaError) else rank
            for rank, (part, _) in enumerate(parts)
            for index, outcome in part.items()
        }
        ranks, out_of_memory = self._control.broadcast((ranks, any(ran for _, ran in parts)))
        if out_of_memory:  # on every rank, because the ranks gather parameters together
            self._sharded.abandon_pass()
            self._memory.collect()
        for member in members:
            if member.index not in ranks:
                found[member.index] = self._alone(member)
            elif member.command.backward and (rank := ranks[member.index]) is not None:
                self._bring_gradients(cast(AdapterModel, member.model), rank)
                member.model.gradients_added()  # on every rank, although one rank has them
        self._for_rank_0.clear()
        return [
            found[index] if index in found else unknown_model(command.model_id)
            for index, command in enumerate(commands)
        ]

    def _bring_gradients(self, model: AdapterModel, source: int) -> None:
        """Adds the gradients of a call on a CPU to those of rank 0, if rank `source` has computed them. Collective."""
        total = model.weights.flat_grad
        if source == 0 or total.device.type != "cpu":
            return
        if self._control.rank == source:
            dist.send(self._for_rank_0[model.model_id], 0)
        elif self._control.rank == 0:
            received = torch.empty_like(total)
            dist.recv(received, source)
            total.add_(received)

    def _on_this_rank(self, members: Sequence[Member]) -> tuple[Outcomes, bool]:
        """Computes the calls of this rank that fit into shared passes. Collective.

        Returns:
            The outcomes so far, and True if memory ran out. All ranks must then call `abandon_pass`.
        """
        self._sharded.gather()
        self._memory.make_room(sum(size.token_count for member in members for size in member.command.sizes))
        budgets = self._memory.budgets(0, False)
        most_tokens = 0 if self._memory.recomputed_share(1, budgets) else budgets.tokens
        found: Outcomes = {}
        try:
            for own, place in self._passes(members, most_tokens):
                found |= self._shared(own, place, most_tokens, budgets.patches)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            logger.warning("calls did not fit into one pass, so each is computed alone: %s", reason)
            return found, True
        return found, False

    def _passes(self, members: Sequence[Member], most_tokens: int) -> Iterator[tuple[Sequence[Member], Place]]:
        """Yields the calls of each shared pass of this rank, and the place of the first of them."""
        rank = self._control.rank
        if (place := members[0].command.place) is not None:
            if place.device_rank == rank:
                yield members, place
            return
        rows = max(member.command.share.rows for member in members if member.command.share)
        left = list(members[rank :: self._control.world_size])
        while left:
            count = min(len(left), self._most_slots(left[0].model, rows, most_tokens))
            slots = slot_count(count, rows) if count > 1 else 1
            if slots > 1 or self._control.world_size > 1:  # a single rank gains nothing with one call
                yield left[:slots], Place(slots, rows, 0, rank)
            left = left[slots:]

    def _most_slots(self, model: TrainedModel, rows: int, most_tokens: int) -> int:
        """Returns the most slots, each of `rows` rows, for which a pass has memory now: a power of two."""
        slots = self._small_passes.slots_of(cast(AdapterModel, model).weights)
        while slots > 1 and slots * rows > most_tokens:
            slots //= 2
        return slots

    def _alone(self, member: Member) -> ForwardBackwardResult | FoveaError:
        try:
            return self._computer.run(member.command, member.model)
        except FoveaError as error:
            return error

    def _shared(self, members: Sequence[Member], place: Place, most_tokens: int, most_patches: int) -> Outcomes:
        """Computes calls in one pass, in consecutive slots. Returns no outcomes if memory does not suffice.

        Args:
            place: The slot of the first call.
        """
        patches = sum(size.patch_count for member in members for size in member.command.sizes)
        if place.slots * place.rows > most_tokens or patches > most_patches:
            return {}
        if place.slots > self._most_slots(members[0].model, place.rows, most_tokens):
            return {}
        prepared = {member.index: self._try_to_prepare(member.command, member.model) for member in members}
        calls = [call for call in prepared.values() if isinstance(call, PreparedCall)]
        results = iter(self._shared_pass(calls, place) if calls else [])
        return {index: next(results) if isinstance(one, PreparedCall) else one for index, one in prepared.items()}

    def _try_to_prepare(self, command: ForwardBackward, model: TrainedModel) -> PreparedCall | FoveaError:
        found: list[PreparedCall] = []
        indices = range(len(command.sizes))
        error = self._control.error_of(lambda: found.append(self._computer.inputs(command, model, True, indices)))
        return error or found[0]

    def _shared_pass(self, calls: Sequence[PreparedCall], place: Place) -> list[ForwardBackwardResult | FoveaError]:
        slots, rows, first = place.slots, place.rows, place.slot
        adapters: list[LoraWeights | None] = [None] * slots
        longest = power_of_two(max(size.token_count for call in calls for size in call.command.sizes))
        datums = fillers(first * rows, longest)
        spans = []
        for slot, call in enumerate(calls, first):
            adapters[slot] = cast(AdapterModel, call.model).weights
            spans.append(slice(len(datums), len(datums) + len(call.datums)))
            datums += [call.datums[index] for index in packed_order(call.datums, call.command.sizes)]
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
            self._add_gradients(calls, results, adapters)
        return [
            _outcome(call, result, replace(place, slot=slot))
            for slot, (call, result) in enumerate(zip(calls, results, strict=True), first)
        ]

    def _add_gradients(
        self, calls: Sequence[PreparedCall], results: Sequence[RankResult], adapters: Sequence[LoraWeights | None]
    ) -> None:
        """Adds or sets aside the gradients of the calls of the last pass that succeeded."""
        healthy = iter(result.failure is None for result in results)
        used = [weights if weights and next(healthy) else None for weights in adapters]
        if self._control.rank == 0 or calls[0].model.gradients()[0].device.type != "cpu":
            return self._small_passes.add_gradients(used)
        names = [call.model.model_id for call, result in zip(calls, results, strict=True) if result.failure is None]
        for name, gradients in zip(names, self._small_passes.gradients(used), strict=True):
            self._for_rank_0[name] = gradients.clone()
        return None


def _layout_of(model: TrainedModel) -> Hashable:
    """Returns the layout of an adapter that can share a pass; None for other models."""
    return model.weights.layout if isinstance(model, AdapterModel) and not model.trains_vision else None


def _outcome(call: PreparedCall, result: RankResult, place: Place) -> ForwardBackwardResult | FoveaError:
    if result.failure is not None:
        return result.failure
    tokens = sum(size.token_count for size in call.command.sizes)
    metrics = reduce_measures([result.measures]) | {"tokens:sum": float(tokens)}
    return ForwardBackwardResult(result.logprobs, metrics, tokens / place.rows, str(place))
