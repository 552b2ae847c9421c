"""Does a tenant that floods a Fovea hurt another? `python -m benchmarks.flood --up STATE_DIR/up.json`.

Two owners of equal weight, each with a key of its own, through the SDK. The quiet one is measured alone and then beside
the other, in one run. Samples: the flooding one has thousands queued; the quiet one sends one after another, whose 99th
percentile counts, and then as many at once as it can use, whose share of all tokens counts. Training: the flooding one
has several models with forward_backwards queued; the quiet one takes steps with one model, then sends with several.

Start Fovea with `FOVEA_API_KEY="quiet=tml-quiet flood=tml-flood" fovea up`.
"""

import argparse
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from benchmarks.client import Bench, datum, take_step
from benchmarks.figure import emit, quantile
from benchmarks.running import Running


class Load:
    """Requests kept in flight by a thread, and the tokens of those that ended.

    Args:
        submit: Sends one; its future ends when it is done.
        tokens: Of each.
        in_flight: How many at once.
    """

    def __init__(self, submit: Callable[[int], "Future[Any]"], tokens: int, in_flight: int) -> None:
        self._submit, self._tokens = submit, tokens
        self._room = threading.Semaphore(in_flight)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done = 0

    @contextmanager
    def running(self, after: int = 1) -> Iterator["Load"]:
        """Keeps them in flight, from when `after` of them have ended, to the end of the block."""
        self._thread.start()
        while self.done < after * self._tokens:
            time.sleep(0.05)
        try:
            yield self
        finally:
            self._stopping.set()
            self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            self._room.acquire()
            if self._stopping.is_set():
                return
            self._submit(number).add_done_callback(self._end)

    def _end(self, ended: "Future[Any]") -> None:
        self.done += self._tokens
        self._room.release()


def share(quiet: Load, flood: Load, seconds: float) -> float:
    """The quiet one's part of the tokens of both in a span of time."""
    before = quiet.done, flood.done
    time.sleep(seconds)
    own, other = quiet.done - before[0], flood.done - before[1]
    return own / max(own + other, 1)


def samples(bench: Bench, options: argparse.Namespace, in_flight: int) -> Load:
    """Samples of one client."""
    rng, params = np.random.default_rng(1), types.SamplingParams(max_tokens=options.new_tokens)
    prompts = [bench.prompt(rng, options.prompt_tokens) for _ in range(64)]
    tokens = options.prompt_tokens + options.new_tokens
    return Load(lambda n: bench.sampler.sample(prompts[n % 64], 1, params).future(), tokens, in_flight)


def losses(bench: Bench, models: list[tinker.TrainingClient], options: argparse.Namespace) -> Load:
    """forward_backwards over several models of one client, two of each in flight."""
    data = batch(bench, options)
    return Load(
        lambda n: models[n % len(models)].forward_backward(data, "cross_entropy").future(),
        options.datums * options.length,
        2 * len(models),
    )


def batch(bench: Bench, options: argparse.Namespace) -> list[types.Datum]:
    """Random text."""
    rng, half = np.random.default_rng(2), options.length // 2
    return [datum(bench.prompt(rng, half), bench.tokens(rng, options.length + 1 - half)) for _ in range(options.datums)]


def timed(act: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of so many, one after another."""
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        act()
        found.append(time.perf_counter() - begun)
    return found


def report(name: str, alone: list[float], beside: list[float], part: float, sizes: dict[str, Any]) -> None:
    """Prints the figures of one kind of work."""
    emit(f"flood.{name}.p50", [quantile(beside, 0.5)], "s", [quantile(alone, 0.5)], **sizes)
    emit(f"flood.{name}.p99", [quantile(beside, 0.99)], "s", [quantile(alone, 0.99)], **sizes)
    emit(f"flood.{name}.share", [part], "of the tokens", **sizes)


def measure_samples(quiet: Bench, flood: Bench, options: argparse.Namespace) -> None:
    """One after another, alone and beside the flood; then many at once beside it."""
    params = types.SamplingParams(max_tokens=options.new_tokens)
    prompt = quiet.prompt(np.random.default_rng(3), options.prompt_tokens)

    def one() -> None:
        quiet.sampler.sample(prompt, 1, params).result(600)

    timed(one, 5)
    alone = timed(one, options.repeats)
    with samples(flood, options, options.queued).running(after=options.queued // 20) as flooding:
        beside = timed(one, options.repeats)
        with samples(quiet, options, options.queued).running() as asking:
            part = share(asking, flooding, options.window)
    report("samples", alone, beside, part, {"queued": options.queued, "new_tokens": options.new_tokens})


def measure_training(quiet: Bench, flood: Bench, options: argparse.Namespace) -> None:
    """The same with steps."""
    own = [quiet.training(options.rank) for _ in range(options.models)]
    others = [flood.training(options.rank) for _ in range(options.models)]
    data = batch(quiet, options)

    def step() -> None:
        take_step(own[0], data, 1e-5)

    timed(step, 3)
    alone = timed(step, options.steps)
    with losses(flood, others, options).running() as flooding:
        beside = timed(step, options.steps)
        with losses(quiet, own[:1], options).running() as asking:
            part_of_one = share(asking, flooding, options.window)
        with losses(quiet, own, options).running() as asking:
            part = share(asking, flooding, options.window)
    sizes = {"models": options.models, "datums": options.datums, "length": options.length}
    report("steps", alone, beside, part, sizes)
    emit("flood.steps.share_of_one_model", [part_of_one], "of the tokens", **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=Path, default=Path(".fovea/up.json"), help="written by `fovea up`")
    parser.add_argument("--quiet-key", default="tml-quiet")
    parser.add_argument("--flood-key", default="tml-flood")
    parser.add_argument("--queued", type=int, default=1000, help="samples of the flooding tenant at any time")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=60, help="samples one after another")
    parser.add_argument("--models", type=int, default=4, help="of each tenant")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--datums", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="one after another")
    parser.add_argument("--window", type=float, default=15.0, help="seconds in which shares are counted")
    parser.add_argument("--only", choices=("samples", "training"))
    options = parser.parse_args()
    base_url = Running.read(options.up).base_url
    with Bench.open(base_url, options.quiet_key) as quiet, Bench.open(base_url, options.flood_key) as flood:
        if options.only != "samples":
            measure_training(quiet, flood, options)
        if options.only != "training":
            measure_samples(quiet, flood, options)


if __name__ == "__main__":
    main()
