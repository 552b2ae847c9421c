"""How long a small step takes: `python -m benchmarks.small_steps --up STATE_DIR/up.json`.

A step is forward_backward and optim_step through the SDK. Figures, in seconds: a step that is awaited before the next,
the median; the mean of steps that are all submitted at once, against the mean of awaited ones in turns; and the
trainer's own time of a forward_backward. With few tokens the arithmetic is short, so these figures show what the host,
the gateway and the client add.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from benchmarks.client import Bench, datum, take_step
from benchmarks.figure import emit
from benchmarks.running import Running

SHAPES = ((1, 32), (1, 2048), (16, 128), (64, 128))
"""Datums of a step, and tokens of each."""
_WARM_UP = 4


def trainer_seconds(running: Running) -> tuple[float, float]:
    """Returns the seconds that the trainer has spent in forward_backward commands, and their number."""
    name, label = "fovea_trainer_command_seconds", {"command": "ForwardBackward"}
    return running.total("trainer", f"{name}_sum", **label), running.total("trainer", f"{name}_count", **label)


def awaited_seconds(training: tinker.TrainingClient, data: list[types.Datum], steps: int) -> list[float]:
    """Returns the seconds of each step when each is awaited before the next."""
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        take_step(training, data, 1e-5)
        seconds.append(time.perf_counter() - begun)
    return seconds


def ahead_seconds(training: tinker.TrainingClient, data: list[types.Datum], steps: int) -> float:
    """Returns the seconds of a step when all steps are submitted at once."""
    begun = time.perf_counter()
    waiting: list[tinker.APIFuture] = []
    for _ in range(steps):
        waiting.append(training.forward_backward(data, "cross_entropy"))
        waiting.append(training.optim_step(types.AdamParams(learning_rate=1e-5)))
    for future in waiting:
        future.result(600)
    return (time.perf_counter() - begun) / steps


def measure(bench: Bench, running: Running, options: argparse.Namespace) -> None:
    """Prints the figures of each shape."""
    rng, training = np.random.default_rng(1), bench.training(options.rank)
    for count, length in SHAPES:
        half = length // 2
        data = [datum(bench.prompt(rng, half), bench.tokens(rng, length + 1 - half)) for _ in range(count)]
        for _ in range(_WARM_UP):
            take_step(training, data, 1e-5)
        before, seconds, ahead = trainer_seconds(running), [], []
        for _ in range(options.repeats):  # in turns, so that both see the same durable points and neighbours
            seconds.append(awaited_seconds(training, data, options.steps))
            ahead.append(ahead_seconds(training, data, options.steps))
        after = trainer_seconds(running)
        sizes = {"datums": count, "length": length, "rank": options.rank, "model": Path(running.model).name}
        sizes["steps"] = options.steps
        emit("small_steps.step", [one for each in seconds for one in each], "s", **sizes)
        emit("small_steps.trainer", [(after[0] - before[0]) / (after[1] - before[1])], "s", **sizes)
        emit("small_steps.ahead", ahead, "s", list(map(statistics.mean, seconds)), **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=Path, default=Path(".fovea/up.json"), help="written by `fovea up`")
    parser.add_argument("--api-key", default="tml-local")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    running = Running.read(options.up)
    with Bench.open(running.base_url, options.api_key) as bench:
        measure(bench, running, options)


if __name__ == "__main__":
    main()
