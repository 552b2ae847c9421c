"""Residency: decides which models are in the trainer, restores them there, and parks them.

Commands, snapshot pushes and sampling ask this module before they use a model. If the trainer keeps recovery, they wait
for the model without a time limit, until the session ends. If it does not, its models are lost when the trainer process
ends.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import (
    BrokenOff,
    FailedPrecondition,
    FoveaError,
    ModelLost,
    ResourceExhausted,
    SessionEnded,
    StorageBehind,
    Unavailable,
)
from fovea_gateway import gateway_metrics as metrics
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.replicas.snapshot_pushes import RestoreInProgress
from fovea_gateway.sessions.future import Done, Kind, Pending, QueueState, State
from fovea_gateway.training.journal import Journal
from fovea_gateway.training.models import Model, Models, ModelState
from fovea_gateway.training.trainer_queue import Replay, TrainerQueue

logger = logging.getLogger(__name__)

_CHANGING = (Kind.OPTIM_STEP, Kind.LOAD_STATE)
"""Commands that change the weights. If the outcome of such a command cannot be learned, the model is lost."""
_LOOK_S = 1.0
_AGAIN_S = 0.2
_FULL_S = 2.0
"""Pauses in seconds: between two looks at the trainer, before an interrupted restore is retried, and while the trainer
is full.
"""


class HandedOver(Exception):
    """A command must run in another trainer, because its model continues there. Nothing is lost."""


@dataclass(frozen=True)
class TrainerSide:
    """The components that work with one trainer.

    Attributes:
        commands: The function that runs each kind of command there.
    """

    link: TrainerLink
    queue: TrainerQueue
    residency: "Residency"
    commands: dict[Kind, Callable[[Model, Pending, bytes], Awaitable[Done]]] = field(default_factory=dict)


class Homes(ABC):
    """The trainers of one base model, and the home of each model among them. Add at least one side before use."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.sides: list[TrainerSide] = []
        self._homes: dict[str, TrainerSide] = {}
        self._running: set[str] = set()

    @property
    def is_plural(self) -> bool:
        """True if there are several trainers, so that models can move."""
        return len(self.sides) > 1

    @property
    def instances(self) -> set[str]:
        """The ids of the present instances of all trainers."""
        return {side.link.instance_id for side in self.sides} - {""}

    def side_of(self, model: Model) -> TrainerSide:
        """Returns the home of a model. A model without one gets the trainer that holds it, or the best one."""
        side = self._homes.get(model.model_id)
        if side is None:
            side = self._homes[model.model_id] = self._choose(model)
        return side

    def is_home(self, model: Model, link: TrainerLink) -> bool:
        """Returns whether a model belongs to a trainer and may be restored there while no command asks for it."""
        return self.side_of(model).link is link and not (self.is_plural and model.model_id in self._running)

    def find_trainer(self, model_id: str) -> TrainerLink:
        """Returns the trainer that pushes a model's snapshots, or any for an unknown model or an empty id."""
        home = self._homes.get(model_id)
        return home.link if home is not None and (home.link.up or not self.is_plural) else self._find(model_id)

    async def check_snapshots(self, model_id: str) -> None:
        """Raises RestoreInProgress while a model is being restored or its trainer does not answer."""
        if (model := self._models.find(model_id)) is not None:
            await self.side_of(model).residency.check_snapshots(model_id)

    @contextmanager
    def running(self, model: Model) -> Iterator[None]:
        """Keeps sweeps from moving a model until its command has ended and is stored."""
        self._running.add(model.model_id)
        try:
            yield
        finally:
            self._running.discard(model.model_id)

    @abstractmethod
    def _choose(self, model: Model) -> TrainerSide:
        """Returns the trainer for a model without a home."""

    @abstractmethod
    def _find(self, model_id: str) -> TrainerLink:
        """Does the work of `find_trainer` for a model without a home that is up."""

    @abstractmethod
    def leaves(self, model: Model, link: TrainerLink) -> bool:
        """Returns whether a model should continue in another trainer than this one."""


class Residency:
    """The moves of models into and out of one trainer. At most one task moves a model at a time.

    Args:
        homes: The homes of all models of the base model.
        patience_s: Seconds that a command sent by an earlier process waits for a trainer that keeps no recovery.
    """

    def __init__(
        self,
        base_model: str,
        models: Models,
        journal: Journal,
        replay: Replay,
        trainer: TrainerLink,
        homes: Homes,
        patience_s: float,
    ) -> None:
        self._base_model, self._homes = base_model, homes
        self._models, self._journal, self._replay, self._trainer = models, journal, replay, trainer
        self._patience_s = patience_s
        self._moves: dict[str, asyncio.Task[Any]] = {}
        self._doing: dict[str, str] = {}
        self._over: dict[str, SessionEnded] = {}
        self._not_before: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        # The restores of this process that have begun: an interrupted one goes on from the trainer's state.
        self._begun: set[tuple[str, str]] = set()

    async def require(self, model: Model, pending: Pending) -> None:
        """Returns once the trainer holds a model in the state in which its last command left it.

        Raises ModelLost if the model cannot be restored, FailedPrecondition if the trainer has other model files than
        the model was trained with, SessionEnded, and HandedOver if the model continues in another trainer.
        """
        if model.journaled_since is None:
            if not self._holds(model):
                was_sent = pending.state is State.RUNNING
                await self._require_kept_in_memory(model, pending.submission.kind, was_sent, self._patience_s)
            return
        while True:
            if self._homes.leaves(model, self._trainer) and await self._part(model, pending):
                raise HandedOver
            info = await self._present(model, pending)
            if self._holds(model):
                return
            move = self._moves.get(model.model_id) or self._begin(model, self._restore(model, info))
            pending.progress.queue(lambda: self._doing.get(model.model_id, "queued"), QueueState.PAUSED)
            await asyncio.wait((move,))
            self._check_open(model)
            if not move.cancelled() and (error := move.exception()):
                await self._tolerate(model, error)

    async def recover(self, model: Model, pending: Pending, error: FoveaError, asked: str) -> None:
        """Handles a failed call. If the command should run again, returns once the trainer has the model; otherwise
        raises.

        Args:
            asked: The trainer instance that was called.
        """
        instance = await self._trainer.look_again()
        is_same = instance == asked
        if isinstance(error, ModelLost) or (is_same and not isinstance(error, BrokenOff)):
            raise error
        await asyncio.sleep(_AGAIN_S)
        if model.journaled_since is not None:
            await self.require(model, pending)
        else:
            await self._require_kept_in_memory(model, pending.submission.kind, was_sent=True, patience_s=0.0)

    async def pause(self, model: Model, seconds: float) -> None:
        """Waits before a command is retried. Raises SessionEnded, within a second, when the session ends."""
        ends_at = time.monotonic() + seconds
        while (left_s := ends_at - time.monotonic()) > 0:
            self._check_open(model)
            await asyncio.sleep(min(left_s, _LOOK_S))
        self._check_open(model)

    async def check_snapshots(self, model_id: str) -> None:
        """Raises RestoreInProgress while a model and those of its snapshots that are not durable are being restored."""
        model = self._models.find(model_id)
        if model is None or model.journaled_since is None or model.state is not ModelState.READY:
            return
        if model_id in self._moves or not self._trainer.up or self._is_away(model):
            words = self._doing.get(model_id, f"the trainer at {self._trainer.address} is away; waiting for it")
            raise RestoreInProgress(words)

    async def sweep(self) -> None:
        """Starts to restore models that another trainer instance held and for which no client waits, two at a time."""
        for model in self._models.ready(self._base_model):
            if not self._homes.is_home(model, self._trainer):
                continue
            is_due = time.monotonic() >= self._not_before.get(model.model_id, 0.0)
            is_free = is_due and model.model_id not in self._moves and len(self._moves) < 2
            info = self._trainer.info if self._trainer.up else None
            if is_free and info is not None and model.journaled_since is not None and self._is_away(model):
                self._begin(model, self._restore(model, info))

    async def park(self, model: Model) -> int:
        """Makes the trainer store a model and free its memory. Returns the stored bytes.

        Raises FoveaError if the trainer cannot store it, and Unavailable while the model is being moved or the trainer
        is away.
        """
        if model.model_id in self._moves or not self._trainer.up or self._is_away(model):
            raise Unavailable(
                f"model {model.model_id} cannot be parked now: it is moving, or its trainer is down or has restarted"
            )
        size_bytes: int = await self._begin(model, self._park(model))
        return size_bytes

    async def free_copy(self, model: Model) -> None:
        """Makes the trainer free a model that another trainer holds. The recovery data stays."""
        if model.model_id not in self._moves:
            await asyncio.wait((self._begin(model, self._free_copy(model)),))

    async def abandon(self, model_ids: Iterable[str], error: SessionEnded) -> None:
        """Cancels the moves of models of an ended session and fails the commands that wait for them."""
        moves = []
        for model_id in model_ids:
            self._over[model_id] = error
            if move := self._moves.get(model_id):
                move.cancel()
                moves.append(move)
        await asyncio.gather(*moves, return_exceptions=True)

    def forget(self, model_ids: Iterable[str]) -> None:
        """Drops the records of ended models from memory."""
        for model_id in model_ids:
            self._over.pop(model_id, None)
            self._not_before.pop(model_id, None)
            self._refusals.pop(model_id, None)
        ended = set(model_ids)
        self._begun = {(model_id, instance) for model_id, instance in self._begun if model_id not in ended}

    async def stop(self) -> None:
        """Cancels all moves at the end of the process. The next process starts them anew."""
        moves = list(self._moves.values())
        for move in moves:
            move.cancel()
        await asyncio.gather(*moves, return_exceptions=True)

    def _holds(self, model: Model) -> bool:
        """Returns whether the trainer answers and has a model that is not being moved."""
        is_there = self._trainer.up and model.trainer_instance == self._trainer.instance_id
        return is_there and model.model_id not in self._moves

    def _is_away(self, model: Model) -> bool:
        """Returns whether an earlier trainer instance held this model. False for a parked model."""
        info = self._trainer.info
        return info is not None and model.trainer_instance not in ("", info.instance_id)

    def _check_open(self, model: Model) -> None:
        if error := self._over.get(model.model_id):
            raise error

    async def _present(self, model: Model, pending: Pending) -> trainer_pb2.GetTrainerInfoResponse:
        """Returns the trainer's info once the trainer answers."""
        while True:
            self._check_open(model)
            try:
                return await self._trainer.require(_LOOK_S)
            except Unavailable as error:
                pending.progress.wait_on(
                    f"{error.message}: waiting for the trainer, nothing is lost", QueueState.PAUSED
                )
                if self._homes.leaves(model, self._trainer):
                    raise HandedOver from None

    async def _part(self, model: Model, pending: Pending) -> bool:
        """Prepares a model to continue in another trainer: parks it if this one has it. Returns whether it may leave.

        If the trainer cannot store the model, its commands continue here.
        """
        pending.progress.wait_on("this model moves to another trainer, nothing is lost", QueueState.PAUSED)
        if move := self._moves.get(model.model_id):
            await asyncio.wait((move,))
            self._check_open(model)
        if not self._trainer.up or model.trainer_instance != self._trainer.instance_id:
            return True
        move = self._begin(model, self._park(model))
        await asyncio.wait((move,))
        self._check_open(model)
        return not move.cancelled() and (move.exception() is None or not self._trainer.up)

    def _begin(self, model: Model, move: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(move, name=f"moving {model.model_id}")
        self._moves[model.model_id] = task

        def end(task: asyncio.Task[Any]) -> None:
            del self._moves[model.model_id]
            self._doing.pop(model.model_id, None)
            if not task.cancelled() and (error := task.exception()):
                self._not_before[model.model_id] = time.monotonic() + _FULL_S
                reason = str(error)
                if self._refusals.get(model.model_id) != reason:  # Moves are retried: log a reason once.
                    logger.warning("could not move model %s: %s", model.model_id, reason)
                self._refusals[model.model_id] = reason

        task.add_done_callback(end)
        return task

    async def _restore(self, model: Model, info: trainer_pb2.GetTrainerInfoResponse) -> None:
        started = time.perf_counter()
        self._check_files(model, info)

        def report(words: str) -> None:
            self._doing[model.model_id] = words

        with self._models.restoring(model, self._homes.instances):
            begun = model.model_id, info.instance_id
            if self._homes.is_plural and begun not in self._begun:
                await self._free_copy(model)  # An earlier copy lacks what the model learned elsewhere.
                self._begun.add(begun)
            try:
                count = await self._replay.restore(model, report)
            except ModelLost as error:
                raise await self._models.lose(model, error.message) from None
            self._begun.discard(begun)
            model.trainer_instance = info.instance_id
        await self._models.save(model)
        self._refusals.pop(model.model_id, None)
        seconds = time.perf_counter() - started
        metrics.RESTORE_SECONDS.observe(seconds)
        logger.info("model %s is restored after %.2f s; %d commands ran again", model.model_id, seconds, count)

    async def _free_copy(self, model: Model) -> None:
        if model.model_id in (await self._trainer.client.info()).model_ids:
            logger.warning("trainer %s frees its old copy of model %s", self._trainer.address, model.model_id)
            await self._trainer.client.delete_model(model.model_id, keeps_recovery=True)

    async def _park(self, model: Model) -> int:
        self._doing[model.model_id] = "this model was parked and is being restored"
        kept = await self._trainer.client.park_model(model.model_id)
        model.trainer_instance = ""
        await self._models.save(model)
        logger.info("model %s is parked: %d bytes", model.model_id, kept.size_bytes)
        return kept.size_bytes

    async def _tolerate(self, model: Model, error: BaseException) -> None:
        """Handles a failed move. Waits and returns if another attempt may succeed; otherwise raises the error."""
        if isinstance(error, ModelLost) or not isinstance(error, Unavailable | ResourceExhausted):
            raise error
        if isinstance(error, ResourceExhausted):
            reason = "" if isinstance(error, StorageBehind) else "the trainer has no room for this model now: "
            self._doing[model.model_id] = f"{reason}{error.message}"
            await asyncio.sleep(_FULL_S)
            return
        await self._trainer.look_again()
        await asyncio.sleep(_AGAIN_S)

    def _check_files(self, model: Model, info: trainer_pb2.GetTrainerInfoResponse) -> None:
        unlike = [name for name, print_ in model.model_files.items() if info.model_files.get(name, print_) != print_]
        if unlike:
            raise FailedPrecondition(
                f"the trainer at {self._trainer.address} returned with another {unlike[0]} than the one on which model "
                f"{model.model_id} was trained: start it with the original model"
            )

    async def _require_kept_in_memory(self, model: Model, kind: Kind, was_sent: bool, patience_s: float) -> None:
        """Does the work of `require` for a trainer without recovery.

        Raises ModelLost if the trainer does not answer or has restarted. Marks the model as lost after a restart, or
        if the outcome of a change of its weights is unknown.
        """
        is_unknown = was_sent and kind in _CHANGING
        try:
            info = await self._trainer.require(patience_s if is_unknown else 0.0)
        except Unavailable as error:
            raise await (self._models.lose if is_unknown else self._models.lost_error)(model, error.message) from None
        if info.instance_id != model.trainer_instance:
            reason = f"the trainer at {self._trainer.address} that held model {model.model_id} restarted"
            raise await self._models.lose(model, reason)
