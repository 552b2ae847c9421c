"""A model: what a client trains."""

import enum
import time
from dataclasses import dataclass, field
from typing import Any

from fovea.api.v1 import weights_pb2


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


def id_of_model(session_id: str, model_seq_id: int) -> str:
    """The id that the SDK expects for a session's n-th model."""
    return f"{session_id}:train:{model_seq_id}"
