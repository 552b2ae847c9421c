"""Measures the speed of training: `python -m benchmarks.trainer --up .fovea/up.json --shape 4b --ranks 32 0`.

Datums have log-normal lengths of 64 to 4,096 tokens; half of them have one 448 x 448 image. The figures are tokens/s
and the model FLOPs utilisation of forward_backward and optim_step through the SDK: one step at a time, with both calls
submitted together and then awaited; and with the next step submitted before the last one is awaited, as a training loop
would. tools/benchmarks/flops.py counts the FLOPs: of mixtures of experts those of active parameters (4 N per token with
adapters), and again including the adapter. With `--plain-gpu 0` the references are the loops of
benchmarks/plain_trainer.py, packed and padded, on the same lengths. They run on that GPU while Fovea is idle, with
micro-batches of `--plain-tokens`: Fovea's own size does not fit their memory, because they store more per token and all
logits at once.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker import AdamParams, ForwardBackwardOutput, OptimStepResponse

from benchmarks.client import Bench, datum
from benchmarks.family_shapes import SHAPES, size_of
from benchmarks.figure import emit
from benchmarks.flops import H200_BF16_FLOPS, IMAGE_SIDE, SIZES, FamilySize
from benchmarks.running import Running

_ADAM = AdamParams(learning_rate=1e-5)
Pending = tuple[tinker.APIFuture[ForwardBackwardOutput], tinker.APIFuture[OptimStepResponse]]


@dataclass(frozen=True)
class Step:
    """The datums of one step, and their cost."""

    data: list[tinker.Datum]
    lengths: list[int]
    image_count: int


def lengths_of(rng: np.random.Generator, count: int) -> list[int]:
    """Returns log-normal lengths with median 512, clipped to 64 .. 4,096."""
    found: list[int] = np.clip(rng.lognormal(np.log(512), 1.0, count), 64, 4096).astype(int).tolist()
    return found


def make_step(bench: Bench, sizes: np.random.Generator, count: int) -> Step:
    """Returns random datums with lengths from `sizes`, half of them with an image if it fits. No two runs share any."""
    data, rng = [], np.random.default_rng()
    for index, length in enumerate(lengths_of(sizes, count)):
        image = bench.image_tokens(IMAGE_SIDE) + len(bench.before_picture) + len(bench.after)
        side = IMAGE_SIDE if index % 2 and length > 2 * image else 0
        text = length - (image if side else 0)
        data.append(datum(bench.prompt(rng, text // 2, side), bench.tokens(rng, text - text // 2)))
    images = sum(any(isinstance(chunk, tinker.types.ImageChunk) for chunk in one.model_input.chunks) for one in data)
    return Step(data, [one.model_input.length for one in data], images)


def submit(training: tinker.TrainingClient, step: Step) -> Pending:
    """Submits both calls of a step."""
    return training.forward_backward(step.data, "cross_entropy"), training.optim_step(_ADAM)


def await_both(pending: Pending) -> None:
    """Waits until the step is done."""
    for future in pending:
        future.result(600)


def seconds_alone(training: tinker.TrainingClient, steps: list[Step]) -> list[float]:
    """Returns the seconds of each step, submitted after the previous one was done."""
    found = []
    for step in steps:
        begun = time.perf_counter()
        await_both(submit(training, step))
        found.append(time.perf_counter() - begun)
    return found


def seconds_ahead(training: tinker.TrainingClient, steps: list[Step]) -> float:
    """Returns the seconds of all steps after the first, each submitted while the previous one runs."""
    pending = submit(training, steps[0])
    begun = 0.0
    for step in steps[1:]:
        following = submit(training, step)
        await_both(pending)
        begun = begun or time.perf_counter()
        pending = following
    await_both(pending)
    return time.perf_counter() - begun


def plain_loop(options: argparse.Namespace, model: str, rank: int, way: str, lengths: list[int]) -> dict[str, Any]:
    """Runs the handwritten loop. Returns the seconds of each step, and the peak memory in GiB."""
    command = [sys.executable, "-m", "benchmarks.plain_trainer", model, "--rank", str(rank), "--way", way]
    command += ["--tokens", str(options.plain_tokens)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": options.plain_gpu}
    answer = subprocess.run(
        command, input=json.dumps(lengths), env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace, fovea: Running, rank: int) -> None:
    """Prints the figures of one rank."""
    rng, repeats = np.random.default_rng(11), options.repeats
    size = SIZES[options.shape] if options.shape in SIZES else size_of(options.shape)
    with Bench.open(fovea.base_url) as bench:
        training = bench.training(rank)
        # Every image is new, because the outputs of a frozen tower are cached, which would save work.
        warm_up, steps, more = (
            [make_step(bench, rng, options.datums) for _ in range(n)] for n in (2, repeats, repeats)
        )
        seconds_alone(training, warm_up)
        seconds = seconds_alone(training, steps)
        ahead = seconds_ahead(training, more)
    tokens, tokens_ahead = ([sum(step.lengths) for step in part] for part in (steps, more))
    flops, flops_ahead = (
        [size.flops(step.lengths, step.image_count, rank == 0) for step in part] for part in (steps, more)
    )
    peak = H200_BF16_FLOPS * options.gpus
    sizes = {"shape": options.shape, "rank": rank, "datums": options.datums, "tokens": tokens[0]}
    sizes |= {"images": steps[0].image_count, "gpus": options.gpus}
    rates = [count / took for count, took in zip(tokens, seconds, strict=True)]
    shares = [done / took / peak for done, took in zip(flops, seconds, strict=True)]
    emit("trainer.tokens", rates, "token/s", **sizes)
    emit("trainer.mfu", shares, "of 989 TFLOP/s a GPU", **sizes)
    if rank and isinstance(size, FamilySize):
        counted = [size.flops(step.lengths, step.image_count, False, rank) for step in steps]
        whole = [done / took / peak for done, took in zip(counted, seconds, strict=True)]
        emit("trainer.mfu.with_adapter", whole, "of 989 TFLOP/s a GPU", **sizes)
    emit("trainer.tokens.ahead", [sum(tokens_ahead[1:]) / ahead], "token/s", **sizes)
    emit("trainer.mfu.ahead", [sum(flops_ahead[1:]) / ahead / peak], "of 989 TFLOP/s a GPU", **sizes)
    emit("trainer.memory", [fovea.total("trainer", "fovea_trainer_gpu_peak_bytes") / 2**30], "GiB", **sizes)
    for way in ("packed", "padded") if options.plain_gpu else ():
        plain = plain_loop(options, fovea.model, rank, way, steps[0].lengths)
        reference = [tokens[0] / took for took in plain["seconds"]]
        facts = {"plain_tokens": options.plain_tokens, "plain_gib": round(plain["peak_gib"], 1)}
        emit(f"trainer.tokens.against_{way}", rates, "token/s", reference, **sizes, **facts)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--up", type=pathlib.Path, default=pathlib.Path(".fovea/up.json"), help="file written by `fovea up`"
    )
    parser.add_argument("--shape", choices=(*SIZES, *SHAPES), default="4b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32])
    parser.add_argument("--datums", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs of the trainer")
    parser.add_argument("--plain-gpu", help="GPU of the handwritten loops")
    parser.add_argument(
        "--plain-tokens", type=int, default=6144, help="tokens of a micro-batch in the handwritten loops"
    )
    options = parser.parse_args()
    fovea = Running.read(options.up)
    for rank in options.ranks:
        measure(options, fovea, rank)


if __name__ == "__main__":
    main()
