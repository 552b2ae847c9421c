"""Models that clients train, with their owners and states, and the database rows of models."""

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from fovea.api.v1 import weights_pb2
from fovea.client import TrainerClient
from fovea.wire.errors import BrokenOff, FailedPrecondition, FoveaError, ModelLost, NotFound, ResourceExhausted
from fovea_gateway.access.owners import Owners, in_projects, require_projects
from fovea_gateway.checkpoints.checkpoint import TRAINING
from fovea_gateway.checkpoints.checkpoint_registry import public_models, rows_of_model
from fovea_gateway.database.database import Database, Job
from fovea_gateway.database.schema import custom_losses, journal, models, sessions
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.replicas.replicas import TrainerLink

logger = logging.getLogger(__name__)

_NAMED = 3
"""The most sessions that an error names."""
_UPDATE = sa.update(models).where(models.c.model_id == sa.bindparam("key"))


class ModelState(enum.StrEnum):
    """The state of a model."""

    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    LOST = "lost"
    ENDED = "ended"


LIVING = (ModelState.CREATING, ModelState.READY)
IS_LIVING = models.c.state.in_([state.value for state in LIVING])
"""The condition on rows of models that are being created or trained."""


@dataclass(eq=False)
class Model:
    """One model in training, and the state of its command queue.

    Attributes:
        lora: The shape of the adapter; rank 0 means that all parameters are trained.
        trainer_instance: The trainer process that holds the model. Empty while the model is parked.
        state_reason: The reason why the model failed, was lost or ended.
        next_seq_id: The seq_id of the next command.
        next_snapshot: The number of the next snapshot. A number is never used twice.
        failed_seq_id: A forward_backward that failed since the last step. The next step would use partial gradients.
        is_accumulating: Whether a forward_backward has succeeded since the last optim_step, successful or failed. While
            this is False, gradients that the trainer may hold do not belong to the next step.
        journaled_since: The journal contains all changes from this seq_id on. None if the trainer keeps no recovery:
            then the model exists only in the trainer's memory.
        model_files: Fingerprints of the base model's files, as reported by the trainer that created the model.
    """

    model_id: str
    session_id: str
    owner: str
    base_model: str
    lora: weights_pb2.LoraConfig
    user_metadata: dict[str, Any]
    trainer_instance: str = ""
    state: ModelState = ModelState.CREATING
    state_reason: str = ""
    next_seq_id: int = 0
    next_snapshot: int = 1
    failed_seq_id: int | None = None
    failed_reason: str = ""
    is_accumulating: bool = False
    journaled_since: int | None = None
    model_files: dict[str, str] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    last_request_at: float = field(default_factory=time.time)


class Models:
    """All models, by id. Each has a row in the database; those in use are also in memory.

    Args:
        most_per_owner: The maximum number of models of one owner in the trainer; 0 means only the trainer's limit.
        owners: Supplies the limits of owners that have their own.
        elsewhere: Returns how many models of an owner the gateways of other shards have in the trainers.
    """

    def __init__(
        self, database: Database, most_per_owner: int, owners: Owners, elsewhere: Callable[[str], int] = lambda _: 0
    ) -> None:
        self._database, self._most_per_owner, self._owners = database, most_per_owner, owners
        self._elsewhere = elsewhere
        self._models: dict[str, Model] = {}
        self._being_restored: set[str] = set()

    async def add(self, model: Model) -> Model:
        """Adds a new model. Returns the existing model if there is one with this id."""
        if not await self._database.write(lambda connection: insert_row(connection, model)):
            return await self.load(model.model_id)
        self._models[model.model_id] = model
        return model

    async def get(self, owner: str, model_id: str) -> Model:
        """Returns a model of the caller. Raises NotFound if there is none, or if it belongs to another owner."""
        model = await self.load(model_id)
        if model.owner != owner:
            raise _unknown(model_id)
        return model

    async def load(self, model_id: str) -> Model:
        """Returns a model by id for any owner, from memory if it is in use, otherwise from its row. Raises NotFound."""
        model = self._models.get(model_id)
        if model is None:
            model = await self._database.read(lambda connection: get_row(connection, model_id))
            if model is None:
                raise _unknown(model_id)
        return model

    def use(self, model: Model) -> Model:
        """Holds a model in memory until its session ends. Returns the instance that is in memory already, if there is
        one.
        """
        return self._models.setdefault(model.model_id, model)

    def ready(self, base_model: str) -> list[Model]:
        """Returns the models of a base model that are in memory and in training."""
        ready = (model for model in self._models.values() if model.state is ModelState.READY)
        return [model for model in ready if model.base_model == base_model]

    def held_by_owner(self) -> dict[str, int]:
        """Returns how many models each owner has in trainers, those on their way included."""
        living = (model for model in self._models.values() if model.state in LIVING)
        return Counter(each.owner for each in living if each.trainer_instance or each.model_id in self._being_restored)

    def find(self, model_id: str) -> Model | None:
        """Returns a model if it is in memory, otherwise None."""
        return self._models.get(model_id)

    def forget(self, session_id: str) -> None:
        """Drops from memory the models of a session that has ended."""
        for model_id in [one.model_id for one in self._models.values() if one.session_id == session_id]:
            del self._models[model_id]

    async def restore(self) -> None:
        """Reads the models in training from the database after a restart."""
        for model in await self._database.read(living_rows):
            self._models.setdefault(model.model_id, model)

    async def unfreed_sessions(self) -> list[str]:
        """Returns ended sessions that still own something, because an earlier gateway stopped before it freed them."""
        return await self._database.read(ids_of_unfreed_sessions)

    async def of_session(self, session_id: str, base_model: str | None = None) -> list[str]:
        """Returns the ids of a session's models, optionally only those of one base model."""
        return await self._database.read(lambda connection: ids_of_session(connection, session_id, base_model))

    def saving(self, model: Model) -> Job[None]:
        """Returns a job that writes the state that the model has now."""
        row = _to_row(model)  # Copy it now: a queued write must not include later changes.

        def job(connection: Any) -> None:
            update_row(connection, row)

        return job

    async def save(self, model: Model) -> None:
        """Writes the model's current state."""
        await self._database.write(self.saving(model))

    async def end(self, model: Model, reason: str) -> None:
        """Marks a model as ended if it is being created or trained."""
        if model.state in LIVING:
            model.state, model.state_reason = ModelState.ENDED, reason
            await self.save(model)

    @contextmanager
    def restoring(self, model: Model, instances: Collection[str]) -> Iterator[None]:
        """Counts a model as held by a trainer while it is being restored. Raises as `check_share` does."""
        self.check_share(model, instances)
        self._being_restored.add(model.model_id)
        try:
            yield
        finally:
            self._being_restored.discard(model.model_id)

    def client_of(self, model: Model, trainer: TrainerLink) -> TrainerClient:
        """Returns the trainer's client. Call this right before each call to the trainer.

        Raises BrokenOff if the model is not back in this trainer yet. Since the model was checked, the command may have
        waited for its turn, a renderer or disk space. If the trainer restarted in that time, it may have the model, but
        not in the state in which the model's last command left it.
        """
        if model.trainer_instance != trainer.instance_id or model.model_id in self._being_restored:
            raise BrokenOff(
                f"model {model.model_id} is not back yet: its trainer restarted, or it is moving to another trainer"
            )
        return trainer.client

    def check_share(self, model: Model, instances: Collection[str]) -> None:
        """Raises ResourceExhausted if these trainers hold or restore as many of the owner's models as they may."""
        held = [
            other
            for other in self._models.values()
            if other.owner == model.owner
            and (other.trainer_instance in instances or other.model_id in self._being_restored)
            and other.state in LIVING
            and other is not model
        ]
        own = self._owners.of(model.owner).max_models
        limit, most = ("max_models", own) if own else ("max_models_per_owner", self._most_per_owner)
        count = len(held) + self._elsewhere(model.owner)
        if most and count >= most:
            sessions = ", ".join(sorted({other.session_id for other in held})[:_NAMED])
            raise ResourceExhausted(
                f"this owner has {count} models in the trainer; {limit} is {most}: save the models that you no longer "
                f"train and end their sessions (fovea sessions end ID){': ' if sessions else ''}{sessions}",
                limit=limit,
            )

    async def lose(self, model: Model, reason: str) -> FoveaError:
        """Marks a model as lost. Returns the error that states the reason and how to continue."""
        model.state, model.state_reason = ModelState.LOST, reason
        logger.error("model %s is lost: %s", model.model_id, reason)
        await self.save(model)
        return await self.lost_error(model)

    async def lost_error(self, model: Model, reason: str = "") -> FoveaError:
        """Returns the error for a use of a lost model."""
        saved = await self._database.read(lambda connection: rows_of_model(connection, model.model_id))
        path = next((checkpoint.path for checkpoint in saved if checkpoint.segment == TRAINING), None)
        if path:
            advice = f"Continue from its last checkpoint: create_training_client_from_state_with_optimizer({path!r})"
        else:
            advice = "It has no checkpoint: start again, and call save_state regularly"
        return ModelLost(f"{reason or model.state_reason}; its weights since the last save are gone. {advice}")

    async def check_ready(self, model: Model) -> None:
        """Raises ModelLost or FailedPrecondition, with the reason, if commands of this model cannot run."""
        if model.state is ModelState.LOST:
            raise await self.lost_error(model)
        if model.state is not ModelState.READY:
            words = {ModelState.CREATING: "was not created", ModelState.FAILED: "could not be created"}
            state = words.get(model.state, "has ended")
            raise FailedPrecondition(
                f"model {model.model_id} {state}: {model.state_reason or 'create_model was never received'}"
            )


def id_of_model(session_id: str, model_seq_id: int) -> str:
    """Returns the id that the SDK expects for the n-th model of a session."""
    return f"{session_id}:train:{model_seq_id}"


def _unknown(model_id: str) -> FoveaError:
    return NotFound(f"there is no model {model_id!r}", field="model_id")


def insert_row(connection: sa.Connection, model: Model) -> bool:
    """Inserts a new model. Returns False if its id is in use."""
    return insert_new(connection, models, _to_row(model))


def update_row(connection: sa.Connection, row: dict[str, Any]) -> None:
    """Updates a model from a row made by `_to_row`."""
    connection.execute(_UPDATE, {**row, "key": row["model_id"]})


def get_row(connection: sa.Connection, model_id: str) -> Model | None:
    """Returns a model by id, or None."""
    row = (connection.execute(sa.select(models).where(models.c.model_id == model_id))).mappings().first()
    return _from_row(row) if row else None


def living_rows(connection: sa.Connection) -> list[Model]:
    """Returns the models that are being created or trained."""
    query = sa.select(models).where(IS_LIVING)
    return [_from_row(row) for row in (connection.execute(query)).mappings()]


def ids_of_session(connection: sa.Connection, session_id: str, base_model: str | None = None) -> list[str]:
    """Returns the ids of a session's models, optionally only those of one base model."""
    query = sa.select(models.c.model_id).where(models.c.session_id == session_id).order_by(models.c.created_at)
    if base_model is not None:
        query = query.where(models.c.base_model == base_model)
    return [row.model_id for row in connection.execute(query)]


def ids_of_over(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Returns those of the given models that no trainer needs to hold any more."""
    states = [ModelState.FAILED.value, ModelState.LOST.value, ModelState.ENDED.value]
    query = sa.select(models.c.model_id).where(models.c.model_id.in_(model_ids) & models.c.state.in_(states))
    return list(connection.scalars(query))


def ids_of_ended_sessions(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Returns those of the given models that belong to an ended session."""
    joined = models.join(sessions, models.c.session_id == sessions.c.session_id)
    where = models.c.model_id.in_(model_ids) & sessions.c.ended_at.is_not(None)
    return list(connection.scalars(sa.select(models.c.model_id).select_from(joined).where(where)))


def known_ids(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Returns those of the given models that have a row."""
    return list(connection.scalars(sa.select(models.c.model_id).where(models.c.model_id.in_(model_ids))))


def ids_of_unfreed_sessions(connection: sa.Connection) -> list[str]:
    """Returns the ended sessions that still have models in training, commands in the journal, or losses."""
    living = models.c.state.in_([ModelState.CREATING.value, ModelState.READY.value])
    owning = sa.union(
        sa.select(models.c.session_id).where(living),
        sa.select(journal.c.session_id),
        sa.select(custom_losses.c.session_id),
    )
    where = sessions.c.ended_at.is_not(None) & sessions.c.session_id.in_(owning)
    return list(connection.scalars(sa.select(sessions.c.session_id).where(where)))


def all_ids(connection: sa.Connection) -> list[str]:
    """Returns the ids of all models, past and present."""
    return list(connection.scalars(sa.select(models.c.model_id)))


def rows_of_owner(
    connection: sa.Connection, owner: str, limit: int, offset: int, with_public: bool = False, project_id: str = ""
) -> tuple[list[Model], int]:
    """Returns a page of an owner's models, latest request first, and the total number of models.

    Args:
        with_public: Whether to include other owners' models that have a published checkpoint.
        project_id: Returns only the owner's models in this project. Raises NotFound if the owner has no such project.
    """
    where = models.c.owner == owner
    if with_public:
        where |= models.c.model_id.in_(public_models(time.time()))
    if project_id:
        require_projects(connection, owner, [project_id], "project_id")
        where &= in_projects(models.c.session_id, [project_id]) & (models.c.owner == owner)
    query = sa.select(models).where(where).order_by(models.c.last_request_at.desc())
    page = [_from_row(row) for row in (connection.execute(query.limit(limit).offset(offset))).mappings()]
    counting = sa.select(sa.func.count()).select_from(models).where(where)
    return page, (connection.execute(counting)).scalar_one()


def _to_row(model: Model) -> dict[str, Any]:
    return {**vars(model), "lora": model.lora.SerializeToString(), "state": model.state.value}


def _from_row(row: Any) -> Model:
    lora = weights_pb2.LoraConfig.FromString(row["lora"])
    return Model(**{**row, "lora": lora, "state": ModelState(row["state"])})
