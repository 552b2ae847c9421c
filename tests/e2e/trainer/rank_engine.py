"""One rank's engine in its own process, without a server, which exposes gradients and master weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fovea.api.v1 import trainer_pb2
from fovea_trainer.batches.datum_decoding import decode_datum
from fovea_trainer.command_queue import CreateModel, DeleteModel, ForwardBackward, OptimStep
from fovea_trainer.losses import loss_of
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.model.sharding import full_of
from fovea_trainer.model.trained_model import FullModel, TrainedModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine
from tests import ranks

MODEL = "m"


@dataclass(frozen=True)
class Call:
    """One training run.

    Args:
        lora: The adapter; None for full parameters.
        datums: Serialized cross_entropy datums, all used in each step.
        steps: Number of steps.
        adam: The optimizer's parameters in each step.
    """

    lora: LoraSettings | None
    datums: list[bytes]
    steps: int
    adam: Adam


def run_ranks(
    model_dir: Path, settings: dict[str, Any], calls: list[Call], world_size: int, scratch: Path
) -> list[dict[str, Any]]:
    """Trains in `count` processes with these settings of the trainer; returns the result of `train` for each call."""
    scratch.mkdir()
    ranks.run_ranks(_rank, world_size, world_size, model_dir, settings, calls, scratch)
    found: list[dict[str, Any]] = torch.load(scratch / "result", weights_only=True)
    return found


def train(engine: TrainingEngine, call: Call) -> dict[str, Any]:
    """Returns the gradients of the first step, losses and metrics of each step, and the final float32 weights."""
    engine.execute(CreateModel(MODEL, call.lora))
    model = engine.model(MODEL)
    header = trainer_pb2.ForwardBackwardHeader(
        model_id=MODEL, loss_function="cross_entropy", backward=True, datum_count=len(call.datums)
    )
    messages = [trainer_pb2.Datum.FromString(datum) for datum in call.datums]
    sizes = [decode_datum(datum, 0, loss_of(header), engine.limits).size for datum in messages]
    command = ForwardBackward(
        model_id=MODEL,
        header=header.SerializeToString(),
        backward=True,
        drop_gradients=False,
        datums=call.datums,
        sizes=sizes,
    )
    gradients: dict[str, Tensor] = {}
    metrics, losses = [], []
    for _ in range(call.steps):
        losses.append(engine.execute(command).metrics.get("loss:sum"))
        gradients = gradients or dict(_summed(model))
        metrics.append(engine.execute(OptimStep(MODEL, call.adam))[0])
    optimized = list(model.masters.values()) if isinstance(model, FullModel) else [model.weights.flat]  # type: ignore[attr-defined]
    found = {"gradients": gradients, "losses": losses, "metrics": metrics, "weights": dict(_whole(model, optimized))}
    engine.execute(DeleteModel(MODEL))
    return found


def _summed(model: TrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Returns the whole gradients: copies, summed as the step sums them."""
    copies = [gradient.detach().clone() for gradient in model.gradients()]
    if isinstance(model, FullModel):
        model._sharded.sum_over_replicas(copies)
    else:
        model.weights.sum_over_ranks(*copies)  # type: ignore[attr-defined]
    return _whole(model, copies)


def _whole(model: TrainedModel, tensors: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Returns the parts of all ranks, concatenated."""
    if isinstance(model, FullModel):
        for name, local in zip(model.masters, tensors, strict=True):
            yield name, full_of(local.clone(), model.shards[name])
    else:
        (flat,) = (tensor.detach().clone() for tensor in tensors)
        yield from model.weights.named(model.weights.whole(flat))  # type: ignore[attr-defined]


def _rank(rank: int, world_size: int, model_dir: Path, given: dict[str, Any], calls: list[Call], scratch: Path) -> None:
    """Runs one rank; rank 0 writes the result of `train` for each call."""
    torch.set_num_threads(1)
    meeting, minutes = dist.FileStore(str(scratch / "meeting"), world_size), timedelta(minutes=2)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=minutes)
    settings = TrainerSettings(model=str(model_dir), device="cpu", **given)
    engine = TrainingEngine(settings, model_dir, ControlGroup(), torch.device("cpu"), None)
    engine.warm_up()
    found = [train(engine, call) for call in calls]
    if rank == 0:
        torch.save(found, scratch / "result")
    dist.barrier()
    dist.destroy_process_group()
