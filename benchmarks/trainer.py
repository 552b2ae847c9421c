"""How fast is training? `python -m benchmarks.trainer --up .fovea/up.json --shape 4b --ranks 32 0`.

Datums have log-normal lengths, 64 to 4,096 tokens, half of them with one 448 x 448 image. The figures are tokens/s and
the model FLOPs utilisation of forward_backward and optim_step through the SDK: one step at a time, both calls submitted
together and awaited, and with the next step submitted before the last one is awaited, as a training loop would. FLOPs
are counted by benchmarks/flops.py. With `--plain-gpu 0` the references are the loops of benchmarks/plain_trainer.py,
packed and padded, on the same lengths; they run on that GPU while Fovea rests.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import tinker
from tinker import AdamParams, ForwardBackwardOutput, OptimStepResponse

from benchmarks.client import Bench, datum
from benchmarks.figure import emit
from benchmarks.flops import H200_BF16_FLOPS, IMAGE_SIDE, PATCHES, SIZES
from benchmarks.running import Running

_ADAM = AdamParams(learning_rate=1e-5)
Pending = tuple[tinker.APIFuture[ForwardBackwardOutput], tinker.APIFuture[OptimStepResponse]]


@dataclass(frozen=True)
class Step:
    """The datums of one step, and what they cost."""

    data: list[tinker.Datum]
    lengths: list[int]
    image_count: int


def lengths_of(rng: np.random.Generator, count: int) -> list[int]:
    """Log-normal with median 512, cut to 64 .. 4,096."""
    found: list[int] = np.clip(rng.lognormal(np.log(512), 1.0, count), 64, 4096).astype(int).tolist()
    return found


def make_step(bench: Bench, rng: np.random.Generator, count: int) -> Step:
    """Random datums, every other one with a picture where it fits."""
    data = []
    for index, length in enumerate(lengths_of(rng, count)):
        side = IMAGE_SIDE if index % 2 and length > 2 * PATCHES // 4 else 0
        text = length - (PATCHES // 4 + 2 if side else 0)
        data.append(datum(bench.prompt(rng, text // 2, side), bench.tokens(rng, text - text // 2)))
    images = sum(any(isinstance(chunk, tinker.types.ImageChunk) for chunk in one.model_input.chunks) for one in data)
    return Step(data, [one.model_input.length for one in data], images)


def submit(training: tinker.TrainingClient, step: Step) -> Pending:
    """Both calls of a step."""
    return training.forward_backward(step.data, "cross_entropy"), training.optim_step(_ADAM)


def await_both(pending: Pending) -> None:
    """Until the step is done."""
    for future in pending:
        future.result(600)


def seconds_alone(training: tinker.TrainingClient, steps: list[Step]) -> list[float]:
    """Of each step, submitted when the one before was done."""
    found = []
    for step in steps:
        begun = time.perf_counter()
        await_both(submit(training, step))
        found.append(time.perf_counter() - begun)
    return found


def seconds_ahead(training: tinker.TrainingClient, steps: list[Step]) -> float:
    """Of all steps after the first, each submitted while the one before runs."""
    pending = submit(training, steps[0])
    begun = 0.0
    for step in steps[1:]:
        following = submit(training, step)
        await_both(pending)
        begun = begun or time.perf_counter()
        pending = following
    await_both(pending)
    return time.perf_counter() - begun


def plain_seconds(model: str, gpu: str, rank: int, way: str, lengths: list[int]) -> list[float]:
    """Of each step of the loop written by hand."""
    command = [sys.executable, "-m", "benchmarks.plain_trainer", model, "--rank", str(rank), "--way", way]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    answer = subprocess.run(
        command, input=json.dumps(lengths), env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    found: list[float] = json.loads(answer.stdout.splitlines()[-1])["seconds"]
    return found


def measure(options: argparse.Namespace, fovea: Running, rank: int) -> None:
    """Prints the figures of one rank."""
    rng = np.random.default_rng(11)
    with Bench.open(fovea.base_url) as bench:
        training = bench.training(rank)
        steps = [make_step(bench, rng, options.datums) for _ in range(options.repeats)]
        seconds_alone(training, steps[:2])
        seconds = seconds_alone(training, steps)
        ahead = seconds_ahead(training, steps)
    tokens = [sum(step.lengths) for step in steps]
    flops = [SIZES[options.shape].flops(step.lengths, step.image_count, rank == 0) for step in steps]
    peak = H200_BF16_FLOPS * options.gpus
    sizes = {"shape": options.shape, "rank": rank, "datums": options.datums, "tokens": tokens[0]}
    sizes |= {"images": steps[0].image_count, "gpus": options.gpus}
    rates = [count / took for count, took in zip(tokens, seconds, strict=True)]
    shares = [done / took / peak for done, took in zip(flops, seconds, strict=True)]
    emit("trainer.tokens", rates, "token/s", **sizes)
    emit("trainer.mfu", shares, "of 989 TFLOP/s a GPU", **sizes)
    emit("trainer.tokens.ahead", [sum(tokens[1:]) / ahead], "token/s", **sizes)
    emit("trainer.mfu.ahead", [sum(flops[1:]) / ahead / peak], "of 989 TFLOP/s a GPU", **sizes)
    emit("trainer.memory", [fovea.total("trainer", "fovea_trainer_gpu_peak_bytes") / 2**30], "GiB", **sizes)
    for way in ("packed", "padded") if options.plain_gpu else ():
        plain = plain_seconds(fovea.model, options.plain_gpu, rank, way, steps[0].lengths)
        emit(f"trainer.tokens.against_{way}", rates, "token/s", [tokens[0] / took for took in plain], **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=pathlib.Path, default=pathlib.Path(".fovea/up.json"), help="what fovea up wrote")
    parser.add_argument("--shape", choices=SIZES, default="4b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32])
    parser.add_argument("--datums", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=1, help="that the trainer has")
    parser.add_argument("--plain-gpu", help="where the loops written by hand run")
    options = parser.parse_args()
    fovea = Running.read(options.up)
    for rank in options.ranks:
        measure(options, fovea, rank)


if __name__ == "__main__":
    main()
