"""How long until new weights are sampled? `python -m benchmarks.push --up .fovea/up.json --ranks 8 32 0`.

From the call of save_weights_and_get_sampling_client to the first token made with the new weights, after an optimizer
step each time; rank 0 means all parameters. Meanwhile another tenant asks for one token of the base model again and
again (not for rank 0, which replaces the base): its slowest answer is what a push costs others. With
`--broadcast-gpus 0 1` the reference is a bare NCCL broadcast of as many bytes in the same run.
"""

import argparse
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

PAUSE = "fovea_sampler_pause_seconds_sum"
ONE_TOKEN = SamplingParams(max_tokens=1)


class Neighbour:
    """Another tenant, who samples one token of the base model at a time; `latencies` in seconds."""

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
    """Changes the weights."""
    take_step(training, [datum(bench.prompt(rng, 32), bench.tokens(rng, 32))], 1e-5)


def seconds_to_first_token(bench: Bench, training: tinker.TrainingClient, rng: np.random.Generator) -> float:
    """One step, then the measured push and sample."""
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


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=pathlib.Path, default=pathlib.Path(".fovea/up.json"), help="what fovea up wrote")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--broadcast-gpus", type=int, nargs=2, default=[], help="for the bare NCCL broadcast")
    options = parser.parse_args()
    fovea = Running.read(options.up)
    for rank in options.ranks:
        with Bench.open(fovea.base_url) as bench:
            measure(bench, fovea, rank, options.repeats, options.broadcast_gpus)


if __name__ == "__main__":
    main()
