"""An adapter that does not fit on the device costs its own command, and what makes room needs no room."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fovea_tinyvlm
from fovea.wire.errors import ResourceExhausted
from fovea_trainer.command_queue import CreateModel, DeleteModel, OptimStep, SharedSteps
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.model.trained_model import TrainedModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine
from fovea_trainer.weights.host_memory import ModelResidence

NAMES = ("a", "b", "c")


class FullResidence(ModelResidence):
    """A device without room for model b; a CPU has no memory of its own that could be full."""

    used: list[str]

    def use(self, models: Iterable[TrainedModel]) -> None:
        """Notes the models, and refuses those with b."""
        self.used = [model.model_id for model in models]
        if "b" in self.used:
            raise ResourceExhausted("model 'b' does not fit")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TrainingEngine]:
    """An engine with three models."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    directory = fovea_tinyvlm.ensure()
    settings = TrainerSettings(model=str(directory), device="cpu", dtype="float32", recovery="", ranks=1)
    engine = TrainingEngine(settings, directory, ControlGroup(), torch.device("cpu"), None)
    for seed, name in enumerate(NAMES):
        engine.execute(CreateModel(name, LoraSettings(4, 8.0, seed, True, True, True, False)))
    yield engine
    engine.close()
    dist.destroy_process_group()


def _full(engine: TrainingEngine) -> FullResidence:
    engine._residence = FullResidence(torch.device("cpu"), 0, lambda: 0)
    return engine._residence


def test_steps_beside_a_model_without_room_are_taken(engine: TrainingEngine) -> None:
    _full(engine)
    steps = [OptimStep(name, Adam(learning_rate=0.01)) for name in NAMES]
    first, refused, last = engine.execute(SharedSteps(steps))
    assert isinstance(refused, ResourceExhausted)
    assert (first[1], last[1]) == (1, 1), "the number of steps of each"
    assert [engine.model(name).step for name in NAMES] == [1, 0, 1]
    with pytest.raises(ResourceExhausted, match="model 'b' does not fit"):
        engine.execute(steps[1])


def test_a_model_without_room_can_be_deleted(engine: TrainingEngine) -> None:
    residence = _full(engine)
    engine.execute(OptimStep("a", Adam(learning_rate=0.01)))
    assert residence.used == ["a"]
    engine.execute(DeleteModel("b"))
    assert residence.used == [], "no model is in use any more, so each may leave the device"
    assert sorted(engine.models) == ["a", "c"]
