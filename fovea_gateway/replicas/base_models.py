"""The base models that are served, and the parts of each: who renders, samples and trains it. The one place that maps a
name to them.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fovea.wire.errors import InvalidInput, NotFound
from fovea_gateway.replicas.renderers import Renderers
from fovea_gateway.replicas.samplers import Sampler, Samplers
from fovea_gateway.replicas.snapshot_pushes import Snapshots
from fovea_gateway.replicas.trainer_link import TrainerLink


@dataclass(frozen=True)
class BaseModel:
    """One base model.

    Attributes:
        name: What clients call it.
        tokenizer_id: Tokenizer that clients are told to load.
        snapshots: What was trained from it; pushed to its own samplers alone.
        trainer: None if it is served for sampling only.
        is_sampled: Whether it has samplers, be they up or not; else it is served for training only.
    """

    name: str
    tokenizer_id: str
    renderers: Renderers
    samplers: Samplers
    snapshots: Snapshots
    trainer: TrainerLink | None
    is_sampled: bool = True

    def up_samplers(self) -> list[Sampler]:
        """Its samplers that take requests now."""
        return self.samplers.up

    @property
    def max_context_length(self) -> int:
        """Positions that its samplers take; 0 before one was seen."""
        return self.samplers.info.max_context_length if self.samplers.info else 0


class BaseModels:
    """All of them, in the order of the settings. Call `start` before use.

    Args:
        models: At least one; the first is the default where a client need not name any.
    """

    def __init__(self, models: Sequence[BaseModel]) -> None:
        self._by_name = {model.name: model for model in models}
        self.default = models[0]

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self._by_name.values())

    @property
    def trainers(self) -> list[TrainerLink]:
        """Of those that can be trained."""
        return [model.trainer for model in self if model.trainer is not None]

    def find(self, name: str) -> BaseModel | None:
        """A base model by name; None if it is not served."""
        return self._by_name.get(name)

    def get(self, name: str) -> BaseModel:
        """A base model by name. Raises NotFound."""
        if (model := self.find(name)) is None:
            raise NotFound(f"base_model {name!r} is not served; here it is {_listed(self)}", field="base_model")
        return model

    def check_trained(self, name: str) -> None:
        """Raises NotFound for a base model that is not served, InvalidInput for one that is for sampling only."""
        if self.get(name).trainer is None:
            trained = [model for model in self if model.trainer is not None]
            fix = f"train {_listed(trained)}" if trained else "no base model here has a trainer"
            raise InvalidInput(f"base_model {name!r} is served for sampling only; {fix}", field="base_model")

    def check_sampled(self, name: str, field: str = "base_model") -> None:
        """Raises NotFound for a base model that is not served, InvalidInput for one that is for training only.

        Args:
            field: What the client chose it by.
        """
        if not self.get(name).is_sampled:
            sampled = [model for model in self if model.is_sampled]
            fix = (
                f"sample {_listed(sampled)}" if sampled else "no base model here has a sampler (fovea up --samplers 1)"
            )
            raise InvalidInput(f"base_model {name!r} is served for training only; {fix}", field=field)

    async def start(self) -> None:
        """Trainers first: whose files the others must have."""
        await asyncio.gather(*(trainer.start() for trainer in self.trainers))
        await asyncio.gather(*(part.start() for model in self for part in (model.renderers, model.samplers)))

    async def close(self) -> None:
        """Stops watching and closes the channels."""
        for model in self:
            await model.samplers.close()
            await model.renderers.close()
        for trainer in self.trainers:
            await trainer.close()


def _listed(models: "BaseModels | list[BaseModel]") -> str:
    return " or ".join(repr(model.name) for model in models)
