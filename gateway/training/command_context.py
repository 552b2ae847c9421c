"""What the training commands share: the services and registries, and what a command hands back."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from gateway.checkpoints.checkpoint_registry import Checkpoints
from gateway.database.writer import Job
from gateway.futures.future import Pending
from gateway.replicas.trainer_link import TrainerLink
from gateway.sampling.sampling_sessions import Sampling
from gateway.training.batches import Batches
from gateway.training.model_rows import Model
from gateway.training.models import Models


@dataclass(frozen=True)
class Context:
    """Handed to every command.

    Attributes:
        freed: Waits until the models of sessions that ended before now are freed.
        timeout_s: Deadline of one call to the trainer.
        patience_s: How long a command that loses nothing by it waits for a trainer that restarts.
    """

    models: Models
    checkpoints: Checkpoints
    batches: Batches
    trainer: TrainerLink
    sampling: Sampling
    freed: Callable[[], Awaitable[None]]
    timeout_s: float
    patience_s: float


@dataclass
class Done:
    """What a command produced: records for the client, writes to be kept together with them, and what comes after."""

    result: list[Message]
    effects: list[Job[Any]] = field(default_factory=list)
    afterwards: list[Callable[[], Awaitable[None]]] = field(default_factory=list)


Command = Callable[[Context, Model, Pending, bytes], Awaitable[Done]]
