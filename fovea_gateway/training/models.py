"""Models, which clients train: who owns which, what state it is in, and when its trainer is gone; and their rows."""

import enum
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from fovea.api.v1 import weights_pb2
from fovea.client import TrainerClient
from fovea.wire.errors import BrokenOff, FailedPrecondition, FoveaError, ModelLost, NotFound, ResourceExhausted
from fovea_gateway.access.owners import Owners
from fovea_gateway.checkpoints.checkpoint import TRAINING
from fovea_gateway.checkpoints.checkpoint_registry import public_models, rows_of_model
from fovea_gateway.database.database import Database
from fovea_gateway.database.schema import custom_losses, journal, models, sessions
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.database.writer import Job
from fovea_gateway.replicas.trainer_link import TrainerLink

logger = logging.getLogger(__name__)

_UPDATE = sa.update(models).where(models.c.model_id == sa.bindparam("key"))


class ModelState(enum.StrEnum):
    """Where a model stands."""

    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    LOST = "lost"
    ENDED = "ended"


@dataclass(eq=False)
class Model:
    """One model in training, and what its queue of commands must remember.

    Attributes:
        lora: Its shape; rank 0 means that all parameters are trained.
        trainer_instance: The trainer that holds it; any other one does not. Empty while it is parked.
        state_reason: Why it failed, was lost or ended.
        next_seq_id: The next command in turn.
        next_snapshot: Number of the next snapshot, never used twice.
        failed_seq_id: A forward_backward that failed since the last step: the next step would be on partial gradients.
        is_accumulating: Whether a forward_backward has succeeded since the last step, taken or not. Until then, what
            gradients the trainer may hold are no part of the next step.
        journaled_since: The first command from which on all that changed it are in the journal; None of a trainer that
            keeps no recovery: then its memory alone has the model.
        model_files: Fingerprints of the base model's files, as of the trainer that made it.
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
    """Models by id, in memory while they are used, in the database always.

    Args:
        most_per_owner: How many of an owner the trainer may hold; 0 is no limit but its own.
        owners: May have other limits.
    """

    def __init__(self, database: Database, most_per_owner: int, owners: Owners) -> None:
        self._database, self._most_per_owner, self._owners = database, most_per_owner, owners
        self._models: dict[str, Model] = {}
        self._returning: set[str] = set()

    async def add(self, model: Model) -> Model:
        """Keeps a new model; returns the one that has its id already, if there is one."""
        if not await self._database.write(lambda connection: insert_row(connection, model)):
            return await self.load(model.model_id)
        self._models[model.model_id] = model
        return model

    async def get(self, owner: str, model_id: str) -> Model:
        """A model of the caller. Raises NotFound, also for somebody else's."""
        model = await self.load(model_id)
        if model.owner != owner:
            raise _unknown(model_id)
        return model

    async def load(self, model_id: str) -> Model:
        """A model by id, whoever owns it: from memory while it is used, else from its row. Raises NotFound."""
        model = self._models.get(model_id)
        if model is None:
            model = await self._database.read(lambda connection: get_row(connection, model_id))
            if model is None:
                raise _unknown(model_id)
        return model

    def use(self, model: Model) -> Model:
        """Keeps a model in memory until its session is over; returns the one that is there already, if it is."""
        return self._models.setdefault(model.model_id, model)

    def ready(self, base_model: str) -> list[Model]:
        """Models of a base model, in memory, that are being trained."""
        ready = (model for model in self._models.values() if model.state is ModelState.READY)
        return [model for model in ready if model.base_model == base_model]

    def find(self, model_id: str) -> Model | None:
        """A model that may be in use: None if it is not in memory."""
        return self._models.get(model_id)

    def forget(self, session_id: str) -> None:
        """Drops from memory the models of a session that is over."""
        for model_id in [one.model_id for one in self._models.values() if one.session_id == session_id]:
            del self._models[model_id]

    async def restore(self) -> None:
        """Reads the models that are in training, after a restart."""
        for model in await self._database.read(living_rows):
            self._models.setdefault(model.model_id, model)

    async def unfreed_sessions(self) -> list[str]:
        """The sessions that are over and own something all the same: an earlier gateway ended before it was freed."""
        return await self._database.read(ids_of_unfreed_sessions)

    async def of_session(self, session_id: str, base_model: str | None = None) -> list[str]:
        """Ids of a session's models, of all base models or of one."""
        return await self._database.read(lambda connection: ids_of_session(connection, session_id, base_model))

    def saving(self, model: Model) -> Job[None]:
        """A write of the model as it is now."""
        row = _to_row(model)  # now: a queued write must not see later changes

        def job(connection: Any) -> None:
            update_row(connection, row)

        return job

    async def save(self, model: Model) -> None:
        """Writes the model as it is now."""
        await self._database.write(self.saving(model))

    async def end(self, model: Model, reason: str) -> None:
        """Marks a model as over."""
        if model.state in (ModelState.CREATING, ModelState.READY):
            model.state, model.state_reason = ModelState.ENDED, reason
            await self.save(model)

    @contextmanager
    def returning(self, model: Model, trainer_instance: str) -> Iterator[None]:
        """Counts a model as one that the trainer holds, from now on. Raises as `check_share` does."""
        self.check_share(model, trainer_instance)
        self._returning.add(model.model_id)
        try:
            yield
        finally:
            self._returning.discard(model.model_id)

    def client_of(self, model: Model, trainer: TrainerLink) -> TrainerClient:
        """To be asked for right before each call: raises BrokenOff for a model that is not back in this trainer.

        A command may have waited since it was let to the trainer, for a turn, a renderer or room on a disk: if the
        trainer has restarted meanwhile, the model may be there, but not as its last command left it.
        """
        if model.trainer_instance != trainer.instance_id or model.model_id in self._returning:
            raise BrokenOff(f"model {model.model_id} is not back yet in the trainer, which restarted")
        return trainer.client

    def check_share(self, model: Model, trainer_instance: str) -> None:
        """Raises ResourceExhausted if this trainer holds, or is given, as many of the owner's models as it may."""
        held = [
            other
            for other in self._models.values()
            if other.owner == model.owner
            and (other.trainer_instance == trainer_instance or other.model_id in self._returning)
            and other.state in (ModelState.CREATING, ModelState.READY)
            and other is not model
        ]
        own = self._owners.of(model.owner).max_models
        limit, most = ("max_models", own) if own else ("max_models_per_owner", self._most_per_owner)
        if most and len(held) >= most:
            raise ResourceExhausted(
                f"this owner has {len(held)} models in the trainer; {limit} is {most}: "
                "save what is no longer trained and end its session",
                limit=limit,
            )

    async def lose(self, model: Model, reason: str) -> FoveaError:
        """Marks a model as lost; returns the error that says why and how to go on."""
        model.state, model.state_reason = ModelState.LOST, reason
        logger.error("model %s is lost: %s", model.model_id, reason)
        await self.save(model)
        return await self.lost_error(model)

    async def lost_error(self, model: Model, reason: str = "") -> FoveaError:
        """What to tell whoever uses a lost model."""
        saved = await self._database.read(lambda connection: rows_of_model(connection, model.model_id))
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


def id_of_model(session_id: str, model_seq_id: int) -> str:
    """The id that the SDK expects for a session's n-th model."""
    return f"{session_id}:train:{model_seq_id}"


def _unknown(model_id: str) -> FoveaError:
    return NotFound(f"there is no model {model_id!r}", field="model_id")


def insert_row(connection: sa.Connection, model: Model) -> bool:
    """Keeps a new model; False if its id is taken."""
    return insert_new(connection, models, _to_row(model))


def update_row(connection: sa.Connection, row: dict[str, Any]) -> None:
    """Writes a row made by `_to_row`."""
    connection.execute(_UPDATE, {**row, "key": row["model_id"]})


def get_row(connection: sa.Connection, model_id: str) -> Model | None:
    """A model by id."""
    row = (connection.execute(sa.select(models).where(models.c.model_id == model_id))).mappings().first()
    return _from_row(row) if row else None


def living_rows(connection: sa.Connection) -> list[Model]:
    """Models that are being made or trained."""
    states = [ModelState.CREATING.value, ModelState.READY.value]
    query = sa.select(models).where(models.c.state.in_(states))
    return [_from_row(row) for row in (connection.execute(query)).mappings()]


def ids_of_session(connection: sa.Connection, session_id: str, base_model: str | None = None) -> list[str]:
    """Ids of a session's models, of all base models or of one."""
    query = sa.select(models.c.model_id).where(models.c.session_id == session_id).order_by(models.c.created_at)
    if base_model is not None:
        query = query.where(models.c.base_model == base_model)
    return [row.model_id for row in connection.execute(query)]


def ids_of_over(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Those of some models that no trainer needs to hold any more."""
    states = [ModelState.FAILED.value, ModelState.LOST.value, ModelState.ENDED.value]
    query = sa.select(models.c.model_id).where(models.c.model_id.in_(model_ids) & models.c.state.in_(states))
    return list(connection.scalars(query))


def ids_of_ended_sessions(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Those of some models whose session is over."""
    joined = models.join(sessions, models.c.session_id == sessions.c.session_id)
    where = models.c.model_id.in_(model_ids) & sessions.c.ended_at.is_not(None)
    return list(connection.scalars(sa.select(models.c.model_id).select_from(joined).where(where)))


def known_ids(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Those of some models that have a row."""
    return list(connection.scalars(sa.select(models.c.model_id).where(models.c.model_id.in_(model_ids))))


def ids_of_unfreed_sessions(connection: sa.Connection) -> list[str]:
    """Sessions that are over, of which there are models in training, commands in the journal, or losses."""
    living = models.c.state.in_([ModelState.CREATING.value, ModelState.READY.value])
    owning = sa.union(
        sa.select(models.c.session_id).where(living),
        sa.select(journal.c.session_id),
        sa.select(custom_losses.c.session_id),
    )
    where = sessions.c.ended_at.is_not(None) & sessions.c.session_id.in_(owning)
    return list(connection.scalars(sa.select(sessions.c.session_id).where(where)))


def all_ids(connection: sa.Connection) -> list[str]:
    """Ids of all models that ever were."""
    return list(connection.scalars(sa.select(models.c.model_id)))


def rows_of_owner(
    connection: sa.Connection, owner: str, limit: int, offset: int, with_public: bool = False
) -> tuple[list[Model], int]:
    """A page of an owner's models, latest request first, and how many there are in all.

    Args:
        with_public: Also those of others that have a published checkpoint.
    """
    where = models.c.owner == owner
    if with_public:
        where |= models.c.model_id.in_(public_models(time.time()))
    query = sa.select(models).where(where).order_by(models.c.last_request_at.desc())
    page = [_from_row(row) for row in (connection.execute(query.limit(limit).offset(offset))).mappings()]
    counting = sa.select(sa.func.count()).select_from(models).where(where)
    return page, (connection.execute(counting)).scalar_one()


def _to_row(model: Model) -> dict[str, Any]:
    return {**vars(model), "lora": model.lora.SerializeToString(), "state": model.state.value}


def _from_row(row: Any) -> Model:
    lora = weights_pb2.LoraConfig.FromString(row["lora"])
    return Model(**{**row, "lora": lora, "state": ModelState(row["state"])})
