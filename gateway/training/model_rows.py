"""Rows of models."""

import enum
import time
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from fovea.api.v1 import weights_pb2
from gateway.checkpoints.checkpoint_rows import public_models
from gateway.database.schema import models, sessions
from gateway.database.sql_engine import insert_new

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
    """One model in training, and what its line of commands must remember.

    Attributes:
        lora: Its shape; rank 0 means that all parameters are trained.
        trainer_instance: The trainer that holds it; any other one does not.
        state_reason: Why it failed, was lost or ended.
        next_seq_id: The next command in turn.
        next_snapshot: Number of the next snapshot, never used twice.
        failed_seq_id: A forward_backward that failed since the last step: the next step would be on partial gradients.
        is_accumulating: Whether a forward_backward has succeeded since the last step, taken or not. Until then, what
            gradients the trainer may hold are no part of the next step.
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
    created_at: float = field(default_factory=time.time)
    last_request_at: float = field(default_factory=time.time)


def _to_row(model: Model) -> dict[str, Any]:
    return {**vars(model), "lora": model.lora.SerializeToString(), "state": model.state.value}


def _from_row(row: Any) -> Model:
    lora = weights_pb2.LoraConfig.FromString(row["lora"])
    return Model(**{**row, "lora": lora, "state": ModelState(row["state"])})


def insert(connection: sa.Connection, model: Model) -> bool:
    """Keeps a new model; False if its id is taken."""
    return insert_new(connection, models, _to_row(model))


def save(connection: sa.Connection, row: dict[str, Any]) -> None:
    """Writes a row made by `frozen`."""
    connection.execute(_UPDATE, {**row, "key": row["model_id"]})


def frozen(model: Model) -> dict[str, Any]:
    """The row of a model as it is now, so that a queued write does not see later changes."""
    return _to_row(model)


def get(connection: sa.Connection, model_id: str) -> Model | None:
    """A model by id."""
    row = (connection.execute(sa.select(models).where(models.c.model_id == model_id))).mappings().first()
    return _from_row(row) if row else None


def living(connection: sa.Connection) -> list[Model]:
    """Models that are being made or trained."""
    states = [ModelState.CREATING.value, ModelState.READY.value]
    query = sa.select(models).where(models.c.state.in_(states))
    return [_from_row(row) for row in (connection.execute(query)).mappings()]


def of_session(connection: sa.Connection, session_id: str) -> list[str]:
    """Ids of a session's models."""
    query = sa.select(models.c.model_id).where(models.c.session_id == session_id).order_by(models.c.created_at)
    return [row.model_id for row in connection.execute(query)]


def over(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Those of some models that no trainer needs to hold any more."""
    states = [ModelState.FAILED.value, ModelState.LOST.value, ModelState.ENDED.value]
    query = sa.select(models.c.model_id).where(models.c.model_id.in_(model_ids) & models.c.state.in_(states))
    return list(connection.scalars(query))


def of_ended_sessions(connection: sa.Connection, model_ids: list[str]) -> list[str]:
    """Those of some models whose session is over."""
    joined = models.join(sessions, models.c.session_id == sessions.c.session_id)
    where = models.c.model_id.in_(model_ids) & sessions.c.ended_at.is_not(None)
    return list(connection.scalars(sa.select(models.c.model_id).select_from(joined).where(where)))


def all_ids(connection: sa.Connection) -> list[str]:
    """Ids of all models that ever were."""
    return list(connection.scalars(sa.select(models.c.model_id)))


def of_owner(
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
