"""On a CPU, a call has the same bits alone and beside calls of other models: results, gradients and the next step."""

import json
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fovea_tinyvlm
from fovea.api.v1 import model_input_pb2, trainer_pb2
from fovea.wire import tensors
from fovea_trainer.batches.datum_decoding import decode_datum
from fovea_trainer.command_queue import CommandQueue, CreateModel, DeleteModel, ForwardBackward, Job, OptimStep
from fovea_trainer.losses import loss_of
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.rank_worker import _together
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine
from tests.ranks import run_ranks

CALLS = {
    "unsorted": (4, [[40, 17, 30], [9], [12, 60]]),
    "as many": (4, [[75], [33, 20], [70]]),
    "of 256 rows": (4, [[250], [30], [20]]),
    "of 192 rows": (4, [[180], [25, 8], [29]]),
    "again 192": (4, [[190], [31], [200]]),
    "of rank 3": (3, [[60, 61], [22], [14, 9]]),
    "and rank 3": (3, [[70], [22, 9, 30], [8]]),
    "of rank 1": (1, [[30], [20, 35], [21]]),
    "and rank 1": (1, [[28], [20], [40]]),
}
"""The rank of each model's adapter, and the tokens of each datum of each call before a step."""


def _command(engine: TrainingEngine, name: str, lengths: list[int], seed: int) -> ForwardBackward:
    random = np.random.default_rng(seed)
    messages = []
    for length in lengths:
        tokens, targets = random.integers(0, 200, (2, length))
        given = {"target_tokens": targets, "weights": random.normal(size=length).astype(np.float32)}
        messages.append(
            trainer_pb2.Datum(
                input=model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(tokens.tolist())),
                loss_inputs={key: tensors.encode(value) for key, value in given.items()},
            )
        )
    header = trainer_pb2.ForwardBackwardHeader(
        model_id=name, loss_function="cross_entropy", backward=True, datum_count=len(messages)
    )
    loss = loss_of(header)
    decoded = [decode_datum(datum, index, loss, engine.limits) for index, datum in enumerate(messages)]
    share = engine.shared.share_of(engine.model(name), loss, decoded, True)
    sizes = [datum.size for datum in decoded]
    return ForwardBackward(name, header.SerializeToString(), True, False, [], sizes, decoded, share)


def _create(engine: TrainingEngine) -> None:
    for seed, (name, (rank, _)) in enumerate(CALLS.items()):
        engine.execute(CreateModel(name, LoraSettings(rank, 8.0, seed, True, True, True, False)))
        flat: Any = engine.model(name).weights  # type: ignore[attr-defined]
        with torch.no_grad():  # so that both factors have gradients
            flat.flat.add_(torch.randn(len(flat.flat), generator=torch.Generator().manual_seed(seed)) / 7)


def _found(engine: TrainingEngine, together: bool) -> dict[str, Any]:
    """Returns log-probabilities and metrics of each call, and weights and moments after a step, as text."""
    _create(engine)
    found: dict[str, Any] = {name: [] for name in CALLS}
    for number in range(3):
        commands = [_command(engine, name, calls[number], number) for name, (_, calls) in CALLS.items()]
        for group in _groups(commands) if together else [[one] for one in commands]:
            results = engine.execute(_together(list(group)))
            if dist.get_rank() == 0:
                for command, result in zip(group, results if len(group) > 1 else [results], strict=True):
                    rows = [values.tobytes().hex() for _, values in sorted(result.logprobs.items())]
                    found[command.model_id].append([rows, result.metrics])
    for name in CALLS:
        (metrics, *_) = engine.execute(OptimStep(name, Adam(learning_rate=0.02)))
        model: Any = engine.model(name)
        state = [model.weights.flat.detach(), *(one for held in model.optimizer.moments() for one in held.values())]
        found[name].append([metrics, *(sha256(one.numpy().tobytes()).hexdigest() for one in state)])
        engine.execute(DeleteModel(name))
    return found


def _groups(commands: list[ForwardBackward]) -> list[list[ForwardBackward]]:
    """Returns the calls that the trainer groups if all of them wait."""
    queue = CommandQueue(60)
    groups: list[Any] = []
    for command in commands:
        queue._jobs.put(Job(command, Future()))
    while sum(map(len, groups)) < len(commands):
        groups.append([job.command for job in queue.next()])
    return groups


def _rank(rank: int, size: int, directory: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    settings = TrainerSettings(model=str(directory), device="cpu", dtype="float32", recovery="", ranks=size)
    engine = TrainingEngine(settings, directory, ControlGroup(), torch.device("cpu"), None)
    engine.warm_up()
    found = [_found(engine, together) for together in (False, True)]
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_bits_of_a_call_do_not_depend_on_its_neighbours(size: int, tmp_path: Path) -> None:
    run_ranks(_rank, size, size, fovea_tinyvlm.ensure("qwen3_vl"), tmp_path)
    alone, beside = json.loads((tmp_path / "found").read_text())
    for name, calls in alone.items():
        assert beside[name][:3] == calls[:3], f"results of the model {name!r}"
        assert beside[name][3] == calls[3], f"metrics, weights and moments of the model {name!r} after its step"
