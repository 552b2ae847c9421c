"""The served base models. Maps the name of each to its renderers, samplers, snapshots and trainer."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fovea.api.v1.weights_pb2 import LoraConfig
from fovea.wire.errors import InvalidInput, NotFound
from fovea_gateway.replicas.renderers import Renderers
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.replicas.samplers import Sampler, Samplers
from fovea_gateway.replicas.snapshot_pushes import Snapshots

_CHECK_S = 60.0
"""Deadline for a trainer to read the header of an adapter from storage, in seconds."""


@dataclass(frozen=True)
class BaseModel:
    """One base model.

    Attributes:
        name: The name that clients use.
        tokenizer_id: The tokenizer that clients should load.
        snapshots: The snapshots trained from this base model. They are pushed only to its own samplers.
        trainer: None if the base model is served for sampling only.
        is_sampled: Whether it has samplers, up or not. If not, it is served for training only.
    """

    name: str
    tokenizer_id: str
    renderers: Renderers
    samplers: Samplers
    snapshots: Snapshots
    trainer: TrainerLink | None
    is_sampled: bool = True

    def up_samplers(self) -> list[Sampler]:
        """Returns the samplers that currently accept requests."""
        return self.samplers.up

    @property
    def max_context_length(self) -> int:
        """The context length of its samplers in tokens; 0 until a sampler has answered."""
        return self.samplers.info.max_context_length if self.samplers.info else 0


class BaseModels:
    """All served base models, in the order of the settings. Call `start` before use.

    Args:
        models: At least one base model. The first is the default for requests that need not name one.
    """

    def __init__(self, models: Sequence[BaseModel]) -> None:
        self._by_name = {model.name: model for model in models}
        self.default = models[0]

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._by_name.values())

    @property
    def trainers(self) -> list[TrainerLink]:
        """The trainers of the base models that can be trained."""
        return [model.trainer for model in self if model.trainer is not None]

    def find(self, name: str) -> BaseModel | None:
        """Returns the base model with this name, or None if it is not served."""
        return self._by_name.get(name)

    def get(self, name: str) -> BaseModel:
        """Returns the base model with this name. Raises NotFound."""
        if (model := self.find(name)) is None:
            raise NotFound(f"base_model {name!r} is not served; use {_listed(self)}", field="base_model")
        return model

    def check_trained(self, name: str) -> None:
        """Raises NotFound for a base model that is not served, InvalidInput for one that is for sampling only."""
        if self.get(name).trainer is None:
            trained = [model for model in self if model.trainer is not None]
            fix = f"train {_listed(trained)}" if trained else "no base model here has a trainer"
            raise InvalidInput(f"base_model {name!r} is served for sampling only; {fix}", field="base_model")

    def check_sampled(self, name: str, field: str = "base_model") -> None:
        """Raises NotFound for a base model that is not served, and InvalidInput for one that is served for training
        only.

        Args:
            field: The request field with which the client chose the base model.
        """
        if not self.get(name).is_sampled:
            sampled = [model for model in self if model.is_sampled]
            fix = (
                f"sample {_listed(sampled)}" if sampled else "no base model here has a sampler (fovea up --samplers 1)"
            )
            raise InvalidInput(f"base_model {name!r} is served for training only; {fix}", field=field)

    async def check_adapter(self, name: str, uri: str, lora: LoraConfig) -> None:
        """Compares the header of an uploaded adapter with a base model, if the base model has a trainer.

        Raises NotFound for a base model that is not served, InvalidInput for the first tensor that does not fit, and
        Unavailable while the trainer does not answer.
        """
        if (trainer := self.get(name).trainer) is not None:
            await trainer.client.check_adapter(uri, lora, _CHECK_S)

    async def start(self) -> None:
        """Starts the trainers first, because the files of the other services are compared with theirs."""
        await asyncio.gather(*(trainer.start() for trainer in self.trainers))
        await asyncio.gather(*(part.start() for model in self for part in (model.renderers, model.samplers)))

    async def close(self) -> None:
        """Stops the health checks and closes the channels."""
        for model in self:
            await model.samplers.close()
            await model.renderers.close()
        for trainer in self.trainers:
            await trainer.close()


def _listed(models: "BaseModels | list[BaseModel]") -> str:
    return " or ".join(repr(model.name) for model in models)
