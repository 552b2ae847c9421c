"""Measures the time until new weights are sampled: `python -m benchmarks.push --up .fovea/up.json --ranks 8 32 0`.

Measures from the call of save_weights_and_get_sampling_client to the first token of the new weights, each time after an
optimizer step; rank 0 means all parameters. Meanwhile another tenant repeatedly requests one token of the base model
(not for rank 0, which replaces the base): its slowest answer is the cost of a push for others. With `--broadcast-gpus 0
1` the reference is a bare NCCL broadcast of the same bytes in the same run. With `--base` the trainer sends the base's
own weights: a full push of a model for which the trainer lacks the memory to train all parameters.
"""

import argparse
import asyncio
import os
import pathlib
import threading
import time
from typing import Any

import numpy as np
import tinker
from tinker import SamplingParams

from benchmarks.broadcast import broadcast_seconds
from benchmarks.client import Bench, datum, take_step
from benchmarks.figure import emit
from benchmarks.running import Running
from fovea.client.trainer import TrainerClient
from fovea.runtime import credentials

PAUSE = "fovea_sampler_pause_seconds_sum"
ONE_TOKEN = SamplingParams(max_tokens=1)


class Neighbour:
    """Another tenant that samples one token of the base model at a time. `latencies` are in seconds."""

    def __init__(self, bench: Bench) -> None:
        self._sampler: Any = bench.service.create_sampling_client(base_model=bench.model).result(600)
        self._prompt = bench.prompt(np.random.default_rng(8), 16)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.latencies: list[float] = []

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            begun = time.perf_counter()
            self._sampler.sample(self._prompt, 1, ONE_TOKEN).result(600)
            self.latencies.append(time.perf_counter() - begun)


def step(bench: Bench, training: tinker.TrainingClient, rng: np.random.Generator) -> None:
    """Changes the weights with one step."""
    take_step(training, [datum(bench.prompt(rng, 32), bench.tokens(rng, 32))], 1e-5)


def seconds_to_first_token(bench: Bench, training: tinker.TrainingClient, rng: np.random.Generator) -> float:
    """Takes one step, then returns the seconds of the push and the first sample."""
    step(bench, training, rng)
    prompt = bench.prompt(rng, 16)
    begun = time.perf_counter()
    sampler: Any = training.save_weights_and_get_sampling_client().result(600)
    sampler.sample(prompt, 1, ONE_TOKEN).result(600)
    return time.perf_counter() - begun


def measure(bench: Bench, fovea: Running, rank: int, repeats: int, gpus: list[int]) -> None:
    """Prints the figures of one rank."""
    rng = np.random.default_rng(3)
    training = bench.training(rank)
    seconds_to_first_token(bench, training, rng)
    sent, paused = fovea.total("trainer", "fovea_trainer_pushed_bytes_total"), fovea.total("sampler", PAUSE)
    found = [seconds_to_first_token(bench, training, rng) for _ in range(repeats)]
    size_bytes = (fovea.total("trainer", "fovea_trainer_pushed_bytes_total") - sent) / repeats
    sizes: dict[str, Any] = {"rank": rank, "model": fovea.model_name, "bytes": int(size_bytes)}
    reference = broadcast_seconds(gpus, int(size_bytes), repeats) if gpus else None
    emit("push.first_token", found, "s", reference, **sizes)
    emit("push.rate", [size_bytes / seconds / 1e9 for seconds in found], "GB/s", **sizes)
    if rank == 0:
        emit("push.pause", [(fovea.total("sampler", PAUSE) - paused) / repeats], "s", **sizes)
    else:
        with Neighbour(bench) as alone:
            time.sleep(2)
        with Neighbour(bench) as meanwhile:
            for _ in range(repeats):
                seconds_to_first_token(bench, training, rng)
        emit("push.neighbour", meanwhile.latencies, "s", alone.latencies, **sizes)
        emit("push.neighbour_slowest", [max(meanwhile.latencies)], "s", [max(alone.latencies)], **sizes)


async def push_base(fovea: Running, repeats: int) -> None:
    """Prints how long a push of the base's own weights takes; the first one, which computes digests, separately."""
    os.environ[credentials.SECRET_VARIABLE] = fovea.service_secret
    async with TrainerClient(fovea.addresses["trainer"]) as trainer:
        pushes = [
            await trainer.push_snapshot("", [fovea.addresses["sampler"]], timeout_s=300) for _ in range(repeats + 1)
        ]
    sizes: dict[str, Any] = {"model": fovea.model_name, "bytes": pushes[0].snapshot.size_bytes}
    emit("push.base.first", [pushes[0].total_s], "s", **sizes)
    emit("push.base", [push.total_s for push in pushes[1:]], "s", **sizes)
    emit("push.base.pause", [push.results[0].pause_s for push in pushes[1:]], "s", **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--up", type=pathlib.Path, default=pathlib.Path(".fovea/up.json"), help="file written by `fovea up`"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--base", action="store_true", help="also push the base's own weights")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--broadcast-gpus", type=int, nargs=2, default=[], help="GPUs of the bare NCCL broadcast")
    options = parser.parse_args()
    fovea = Running.read(options.up)
    for rank in options.ranks:
        with Bench.open(fovea.base_url) as bench:
            measure(bench, fovea, rank, options.repeats, options.broadcast_gpus)
    if options.base:
        asyncio.run(push_base(fovea, options.repeats))


if __name__ == "__main__":
    main()
