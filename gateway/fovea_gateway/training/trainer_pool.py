"""The trainers of one base model: the trainer of each model, and the moves of models between trainers.

A new model goes to the trainer with the least queued work, then with the fewest bytes of models. It stays there until
the trainer is drained or lost, and another trainer is up. Then it continues in that one: the shared recovery storage
has its newest durable point, and the journal has the later commands. Each trainer has its own queues.
"""

import logging
from collections.abc import Iterable

import sqlalchemy as sa

from fovea.wire.errors import FoveaError, SessionEnded
from fovea_gateway.database.schema import drained_trainers
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.training.models import LIVING, Model, Models, ModelState
from fovea_gateway.training.residency import Homes, TrainerSide

logger = logging.getLogger(__name__)


def read_drained(connection: sa.Connection) -> list[str]:
    """Returns the addresses of the trainers that an operator drains."""
    return list(connection.scalars(sa.select(drained_trainers.c.address)))


class TrainerPool(Homes):
    """The choice of homes, and the moves between them."""

    def __init__(self, models: Models) -> None:
        super().__init__(models)
        self._refused_by: dict[str, set[str]] = {}

    def move(self, model: Model, side: TrainerSide) -> None:
        """Gives a model another home than `side`. Does nothing if it has one already."""
        if self._homes.get(model.model_id, side) is side:
            chosen = self._holder(model)
            if chosen is None or chosen is side or not chosen.link.up:
                chosen = self._place(model, but=side)
            self._homes[model.model_id] = chosen
            logger.info("model %s moves from %s to %s", model.model_id, side.link.address, chosen.link.address)

    def try_elsewhere(self, model: Model, side: TrainerSide) -> bool:
        """Gives a new model that a trainer has refused for lack of room another home. Returns False once all trainers
        have refused it.
        """
        refused = self._refused_by.setdefault(model.model_id, set())
        refused.add(side.link.address)
        if any(other.link.address not in refused for other in self._open(but=side)):
            self.move(model, side)
            return True
        del self._refused_by[model.model_id]
        return False

    def drain(self, addresses: Iterable[str]) -> None:
        """Marks exactly these trainers as draining."""
        chosen = set(addresses)
        for side in self.sides:
            side.link.set_draining(side.link.address in chosen)

    async def sweep(self) -> None:
        """Moves idle models from trainers that are draining or lost, frees copies that a lost trainer still holds, and
        restores models. A single trainer needs only `Residency.sweep`.
        """
        for model_id, side in list(self._homes.items()):
            model = self._models.find(model_id)
            if model is None or model.state not in LIVING:
                self._homes.pop(model_id, None)
            elif model_id not in self._running and self.leaves(model, side.link):
                await self._move_idle(model, side)
        for side in self.sides:
            if side.link.up and side.link.info is not None:
                await self._free_copies(side, side.link.info.model_ids)
            await side.residency.sweep()

    async def park(self, model: Model) -> int:
        """Parks a model in storage; see `Residency.park`."""
        return await self.side_of(model).residency.park(model)

    async def abandon(self, model_ids: Iterable[str], error: SessionEnded) -> None:
        """Cancels the moves of models of an ended session and fails the commands that wait for them."""
        ended = list(model_ids)
        for side in self.sides:
            await side.residency.abandon(ended, error)

    def forget(self, model_ids: Iterable[str]) -> None:
        """Drops the records of ended models from memory."""
        ended = list(model_ids)
        for model_id in ended:
            self._homes.pop(model_id, None)
            self._refused_by.pop(model_id, None)
        for side in self.sides:
            side.residency.forget(ended)

    async def stop(self) -> None:
        """Cancels all moves at the end of the process."""
        for side in self.sides:
            await side.residency.stop()

    async def _move_idle(self, model: Model, side: TrainerSide) -> None:
        if side.link.up and model.state is ModelState.READY and model.trainer_instance == side.link.instance_id:
            try:
                await side.residency.park(model)
            except FoveaError as error:
                logger.warning("model %s cannot leave trainer %s yet: %s", model.model_id, side.link.address, error)
                return
        if model.model_id not in self._running and self._models.find(model.model_id) is model:
            self.move(model, side)

    async def _free_copies(self, side: TrainerSide, held: Iterable[str]) -> None:
        """Makes a trainer that came back free its copies of models that continue elsewhere."""
        for model_id in held:
            model, home = self._models.find(model_id), self._homes.get(model_id)
            instance = model.trainer_instance if model is not None else ""
            if model is not None and home not in (None, side) and instance not in ("", side.link.instance_id):
                await side.residency.free_copy(model)

    def _choose(self, model: Model) -> TrainerSide:
        return self._holder(model) or self._place(model)

    def _find(self, model_id: str) -> TrainerLink:
        model = self._models.find(model_id)
        if model is not None and model.state in LIVING:
            return self.side_of(model).link
        return min(self._open() or self.sides, key=lambda side: side.queue.queued_s).link

    def leaves(self, model: Model, link: TrainerLink) -> bool:
        if not self.is_plural:
            return False
        side = self.side_of(model)
        if side.link is not link:
            return True
        others = self._open(but=side)
        is_held = bool(model.trainer_instance) and any(
            other.link.instance_id == model.trainer_instance for other in others
        )
        return is_held or (bool(others) and (link.is_draining or link.is_lost))

    def _open(self, but: TrainerSide | None = None) -> list[TrainerSide]:
        """Returns the trainers that may receive models."""
        return [side for side in self.sides if side is not but and side.link.up and not side.link.is_draining]

    def _holder(self, model: Model) -> TrainerSide | None:
        held = (side for side in self.sides if model.trainer_instance == side.link.instance_id)
        return next(held, None) if model.trainer_instance else None

    def _place(self, model: Model, but: TrainerSide | None = None) -> TrainerSide:
        # After a restart of the gateway, a trainer that has not answered yet may hold the model.
        unknown = [side for side in self.sides if model.trainer_instance and side.link.info is None]
        if but is None and (waited := next((side for side in unknown if not side.link.is_lost), None)):
            return waited
        candidates = self._open(but) or [side for side in self.sides if side is not but] or self.sides
        return min(candidates, key=lambda side: self._load(side, model))

    def _load(self, side: TrainerSide, model: Model) -> tuple[bool, bool, bool, int, float, int]:
        """Returns the order in which trainers are chosen for a model: lower is better."""
        info = side.link.info
        there = [other for other in self._placed(side) if other is not model]
        is_full = any(other.state is ModelState.READY and not other.lora.rank for other in there)
        is_blocked = is_full or (bool(there) and not model.lora.rank)
        has_no_place = info is not None and 0 < info.max_models <= len(there)
        size = sum(map(self._bytes, there)) / ((info.memory_total_bytes if info is not None else 0) or 1)
        is_refused = side.link.address in self._refused_by.get(model.model_id, ())
        return is_refused, is_blocked, has_no_place, round(side.queue.queued_s), size, len(there)

    def _placed(self, side: TrainerSide) -> list[Model]:
        """Returns the models with this home that are in the trainer or on their way; not the parked ones."""
        found = (self._models.find(model_id) for model_id, home in self._homes.items() if home is side)
        return [
            model
            for model in found
            if model is not None
            and model.state in LIVING
            and (model.trainer_instance or model.model_id in self._running)
        ]

    def _bytes(self, model: Model) -> float:
        """Returns the bytes of a model as its trainer reports them, or an estimate by the rank of its adapter."""
        for side in self.sides:
            if side.link.info is not None and (known := side.link.info.model_bytes.get(model.model_id, 0)):
                return float(known)
        return model.lora.rank * self._bytes_per_rank()

    def _bytes_per_rank(self) -> float:
        for side in self.sides:
            for model_id, size in side.link.info.model_bytes.items() if side.link.info is not None else ():
                known = self._models.find(model_id)
                if known is not None and known.lora.rank:
                    return size / known.lora.rank
        return 1.0
