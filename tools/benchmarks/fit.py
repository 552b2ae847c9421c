"""Compares how well adapters in bfloat16 and float32 fit a small set: `python -m benchmarks.fit DIRECTORY`.

Runs the trainer's engine in this process, on a GPU if there is one, without server or gateway. For each dtype of the
base, an adapter with the same seed memorizes a few random texts. The figure is the mean negative log-likelihood per
token over the last 20 steps, in nats; its `curve` has the steps 1, 11, 21 and so on. If gradients cannot resolve the
difference between a confident and a certain token, the curve stops at a floor. The spread between seeds, which choose
the texts and the adapter's start, shows the effect of rounding alone.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.figure import emit
from fovea.api.v1 import model_input_pb2, trainer_pb2
from fovea.wire import tensors
from fovea_trainer.batches.datum_decoding import DatumSize
from fovea_trainer.command_queue import CreateModel, DeleteModel, ForwardBackward, OptimStep
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine

_LAST = 20
_CURVE_STEP = 10


def load(directory: Path, dtype: str, device: torch.device) -> TrainingEngine:
    """Returns a warmed-up trainer of one rank."""
    settings = TrainerSettings(model=str(directory), ranks=1, dtype=dtype, max_lora_rank=128)  # type: ignore[arg-type]
    engine = TrainingEngine(settings, directory, ControlGroup(), device, None)
    engine.warm_up()
    return engine


def texts(seed: int, count: int, length: int, vocabulary_size: int) -> list[trainer_pb2.Datum]:
    """Returns random texts. Each token is the target of the one before it; the first eight are a prompt."""
    random = np.random.default_rng(seed)
    weights = np.ones(length, np.float32)
    weights[:7] = 0
    found = []
    for _ in range(count):
        tokens = random.integers(0, vocabulary_size, length + 1)
        inputs = {"target_tokens": tensors.encode(tokens[1:]), "weights": tensors.encode(weights)}
        rendered = model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(tokens[:-1]))
        found.append(trainer_pb2.Datum(input=rendered, loss_inputs=inputs))
    return found


def fit(engine: TrainingEngine, seed: int, options: argparse.Namespace) -> list[float]:
    """Returns the loss of each step in nats per token."""
    model_id = f"fit-{seed}"
    vocabulary_size = min(options.vocabulary, engine.limits.vocabulary_size)
    data = texts(seed, options.texts, options.length, vocabulary_size)
    header = trainer_pb2.ForwardBackwardHeader(
        model_id=model_id, loss_function="cross_entropy", backward=True, datum_count=len(data)
    )
    call = ForwardBackward(
        model_id=model_id,
        header=header.SerializeToString(),
        backward=True,
        drop_gradients=False,
        datums=[one.SerializeToString() for one in data],
        sizes=[DatumSize(options.length, 0)] * len(data),
    )
    engine.execute(CreateModel(model_id, LoraSettings(options.rank, 32.0, seed, True, True, True, False)))
    target_count = len(data) * (options.length - 7)
    curve = []
    for step in range(options.steps):
        warm = min(1.0, (step + 1) / 10)
        curve.append(engine.execute(call).metrics["loss:sum"] / target_count)
        engine.execute(OptimStep(model_id, Adam(options.rate * warm, 0.9, 0.95, 1e-8, 0.0, 0.0)))
    engine.execute(DeleteModel(model_id))
    return curve


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder of the base model")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--vocabulary", type=int, default=151_000, help="token ids are below it")
    parser.add_argument("--note", default="", help="note written into each line, such as the commit")
    options = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        device_id=device if is_gpu else None,
    )
    for dtype in options.dtypes:
        engine = load(options.directory, dtype, device)
        for seed in options.seeds:
            begun = time.perf_counter()
            curve = fit(engine, seed, options)
            emit(
                "fit.loss",
                curve[-_LAST:],
                "nats per token",
                dtype=dtype,
                seed=seed,
                steps=options.steps,
                rank=options.rank,
                rate=options.rate,
                tokens=options.texts * options.length,
                seconds=round(time.perf_counter() - begun, 1),
                note=options.note,
                curve=[float(f"{loss:.4g}") for loss in curve[::_CURVE_STEP]],
            )
        del engine
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
