"""The registry of models: who owns which, what state it is in, and when the trainer that held it is gone."""

import logging
import time
from typing import Any

from fovea.wire.errors import FailedPrecondition, FoveaError, ModelLost, NotFound, ResourceExhausted
from gateway.checkpoints import checkpoint_rows
from gateway.database.database import Database
from gateway.database.writer import Job
from gateway.identity import TRAINING, Caller
from gateway.training import model_rows as rows
from gateway.training.model_rows import Model, ModelState

logger = logging.getLogger(__name__)


class Models:
    """Models by id, in memory while they are used, in the database always.

    Args:
        most_per_owner: How many of an owner the trainer may hold; 0 is no limit but its own.
    """

    def __init__(self, database: Database, most_per_owner: int) -> None:
        self._database, self._most_per_owner = database, most_per_owner
        self._models: dict[str, Model] = {}

    async def add(self, model: Model) -> Model:
        """Keeps a new model; returns the one that has its id already, if there is one."""
        if not await self._database.write(lambda connection: rows.insert(connection, model)):
            return await self.load(model.model_id)
        self._models[model.model_id] = model
        return model

    async def get(self, caller: Caller, model_id: str) -> Model:
        """A model of the caller. Raises NotFound, also for somebody else's."""
        model = await self.load(model_id)
        if model.owner != caller.owner:
            raise _unknown(model_id)
        return model

    async def load(self, model_id: str) -> Model:
        """A model by id, whoever owns it: from memory while it is used, else from its row. Raises NotFound."""
        model = self._models.get(model_id)
        if model is None:
            model = await self._database.read(lambda connection: rows.get(connection, model_id))
            if model is None:
                raise _unknown(model_id)
        return model

    def use(self, model: Model) -> Model:
        """Keeps a model in memory until its session is over; returns the one that is there already, if it is."""
        return self._models.setdefault(model.model_id, model)

    def find(self, model_id: str) -> Model | None:
        """A model that may be in use: None if it is not in memory."""
        return self._models.get(model_id)

    def forget(self, session_id: str) -> None:
        """Drops from memory the models of a session that is over."""
        for model_id in [one.model_id for one in self._models.values() if one.session_id == session_id]:
            del self._models[model_id]

    async def restore(self) -> None:
        """Reads the models that are in training, after a restart."""
        for model in await self._database.read(rows.living):
            self._models.setdefault(model.model_id, model)

    async def orphans(self) -> set[str]:
        """The sessions that are over and have models in training all the same: an earlier gateway was stopped first."""
        living = [model.model_id for model in await self._database.read(rows.living)]
        over = await self._database.read(lambda connection: rows.of_ended_sessions(connection, living))
        return {self._models[model_id].session_id for model_id in over}

    async def of_session(self, session_id: str) -> list[str]:
        """Ids of a session's models."""
        return await self._database.read(lambda connection: rows.of_session(connection, session_id))

    def saving(self, model: Model) -> Job[None]:
        """A write of the model as it is now."""
        row = rows.frozen(model)

        def job(connection: Any) -> None:
            rows.save(connection, row)

        return job

    async def save(self, model: Model) -> None:
        """Writes the model as it is now."""
        await self._database.write(self.saving(model))

    def touch(self, model: Model) -> None:
        """Notes that a request named the model; written with the next change."""
        model.last_request_at = time.time()

    async def end(self, model: Model, reason: str) -> None:
        """Marks a model as over."""
        if model.state in (ModelState.CREATING, ModelState.READY):
            model.state, model.state_reason = ModelState.ENDED, reason
            await self.save(model)

    def check_share(self, model: Model, trainer_instance: str) -> None:
        """Raises ResourceExhausted if this trainer holds, or is making, as many of the owner's models as it may."""
        held = [
            other
            for other in self._models.values()
            if (other.owner, other.trainer_instance) == (model.owner, trainer_instance)
            and other.state in (ModelState.CREATING, ModelState.READY)
            and other is not model
        ]
        if self._most_per_owner and len(held) >= self._most_per_owner:
            raise ResourceExhausted(
                f"this owner has {len(held)} models in the trainer; max_models_per_owner is {self._most_per_owner}: "
                "save what is no longer trained and end its session",
                limit="max_models_per_owner",
            )

    async def mark_lost(self, model: Model, trainer: str) -> FoveaError:
        """Marks a model as lost with its trainer; returns the error that says how to go on."""
        model.state = ModelState.LOST
        model.state_reason = f"the trainer at {trainer} that held model {model.model_id} restarted"
        logger.error("model %s is lost: the trainer restarted", model.model_id)
        return await self.lost_error(model)

    async def lost_error(self, model: Model, reason: str = "") -> FoveaError:
        """What to tell whoever uses a lost model."""
        saved = await self._database.read(lambda connection: checkpoint_rows.of_model(connection, model.model_id))
        path = next((checkpoint.path for checkpoint in saved if checkpoint.segment == TRAINING), None)
        if path:
            advice = f"Go on from its last checkpoint: create_training_client_from_state_with_optimizer({path!r})"
        else:
            advice = "It has no checkpoint: start again, and call save_state now and then"
        return ModelLost(f"{reason or model.state_reason}; its weights since the last save are gone. {advice}")

    async def check_ready(self, model: Model) -> None:
        """Raises the reason for which commands of this model cannot run."""
        if model.state is ModelState.LOST:
            raise await self.lost_error(model)
        if model.state is not ModelState.READY:
            words = {ModelState.CREATING: "was not created", ModelState.FAILED: "could not be created"}
            state = words.get(model.state, "has ended")
            raise FailedPrecondition(f"model {model.model_id} {state}: {model.state_reason or 'no create_model came'}")


def _unknown(model_id: str) -> FoveaError:
    return NotFound(f"there is no model {model_id!r}", field="model_id")
