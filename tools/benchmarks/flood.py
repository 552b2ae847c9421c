"""Measures whether one tenant's flood of requests slows another: `python -m benchmarks.flood --up STATE_DIR/up.json`.

Two owners with equal weight and their own keys use the SDK. The quiet one is measured alone and then next to the
flooding one, in one run. Samples: the flooding owner has thousands queued. The quiet owner first sends one after
another, which gives the 99th percentile, and then as many at once as it can use, which gives its share of all tokens.
Training: the flooding owner has several models with queued forward_backwards. The quiet one takes steps with one model,
then sends as fast as it can.

Start Fovea with `FOVEA_API_KEY="quiet=tml-quiet flood=tml-flood" fovea up`.
"""

import argparse
import itertools
import multiprocessing
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

_SETTLE_S = 3.0
"""Seconds in which the flood's samples fill the sampler."""


class Load:
    """Requests kept in flight, and the tokens of those that finished.

    Args:
        submit: Sends a request and returns its future.
        tokens: Tokens per request.
        in_flight: Number of requests at once.
    """

    def __init__(self, submit: Callable[[int], "Future[Any]"], tokens: int, in_flight: int) -> None:
        self._submit, self._tokens = submit, tokens
        self._room = threading.Semaphore(in_flight)
        self.done = 0

    def run(self, until: Callable[[], bool], tell: Callable[[int], None] = lambda done: None) -> None:
        """Keeps requests in flight until a time. Calls `tell` with the tokens of finished ones."""
        for number in itertools.count():
            while not self._room.acquire(timeout=0.1):
                tell(self.done)
            tell(self.done)
            if until():
                return
            self._submit(number).add_done_callback(self._end)

    def _end(self, ended: "Future[Any]") -> None:
        self.done += self._tokens
        self._room.release()


@contextmanager
def flooding(kind: str, base_url: str, options: argparse.Namespace) -> Iterator[Callable[[], int]]:
    """Runs the flooding tenant in its own process, once its first requests have finished; yields its token counter."""
    context = multiprocessing.get_context("spawn")
    done, stopping = context.Value("q", 0), context.Event()
    process = context.Process(target=_flood, args=(kind, base_url, options, done, stopping), daemon=True)
    process.start()
    while not done.value:
        time.sleep(0.1)
    try:
        yield lambda: int(done.value)
    finally:
        stopping.set()
        process.join(600)


def _flood(kind: str, base_url: str, options: argparse.Namespace, done: Any, stopping: Any) -> None:
    def tell(tokens: int) -> None:
        done.value = tokens

    with Bench.open(base_url, options.flood_key) as bench:
        if kind == "samples":
            load = samples(bench, options, options.queued)
        else:
            load = losses(bench, [bench.training(options.rank) for _ in range(options.models)], options)
        load.run(stopping.is_set, tell)


def share(load: Load, flood: Callable[[], int], seconds: float) -> float:
    """Returns the quiet tenant's share of both tenants' tokens while it sends as much as it can."""
    stopping = threading.Event()
    thread = threading.Thread(target=load.run, args=(stopping.is_set,))
    thread.start()
    while not load.done:
        time.sleep(0.05)
    before = load.done, flood()
    time.sleep(seconds)
    own, other = load.done - before[0], flood() - before[1]
    stopping.set()
    thread.join()
    return own / max(own + other, 1)


def samples(bench: Bench, options: argparse.Namespace, in_flight: int) -> Load:
    """Returns a load of samples from one client."""
    rng, params = np.random.default_rng(1), types.SamplingParams(max_tokens=options.new_tokens)
    prompts = [bench.prompt(rng, options.prompt_tokens) for _ in range(64)]
    tokens = options.prompt_tokens + options.new_tokens
    return Load(lambda n: bench.sampler.sample(prompts[n % 64], 1, params).future(), tokens, in_flight)


def losses(bench: Bench, models: list[tinker.TrainingClient], options: argparse.Namespace) -> Load:
    """Returns a load of forward_backwards over several models of one client, two in flight per model."""
    data = batch(bench, options)
    return Load(
        lambda n: models[n % len(models)].forward_backward(data, "cross_entropy").future(),
        options.datums * options.length,
        2 * len(models),
    )


def batch(bench: Bench, options: argparse.Namespace) -> list[types.Datum]:
    """Returns a batch of random text."""
    rng, half = np.random.default_rng(2), options.length // 2
    return [datum(bench.prompt(rng, half), bench.tokens(rng, options.length + 1 - half)) for _ in range(options.datums)]


def timed(act: Callable[[], Any], count: int) -> list[float]:
    """Returns the seconds of each of `count` sequential calls."""
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


def measure_samples(quiet: Bench, base_url: str, options: argparse.Namespace) -> None:
    """Measures sequential samples, alone and next to the flood, then many at once next to it."""
    params = types.SamplingParams(max_tokens=options.new_tokens)
    prompt = quiet.prompt(np.random.default_rng(3), options.prompt_tokens)

    def one() -> None:
        quiet.sampler.sample(prompt, 1, params).result(600)

    timed(one, 5)
    alone = timed(one, options.repeats)
    with flooding("samples", base_url, options) as flood:
        time.sleep(_SETTLE_S)
        beside = timed(one, options.repeats)
        part = share(samples(quiet, options, options.asked), flood, options.window)
    sizes = {"queued": options.queued, "asked": options.asked, "new_tokens": options.new_tokens}
    report("samples", alone, beside, part, sizes)


def measure_training(quiet: Bench, base_url: str, options: argparse.Namespace) -> None:
    """Does the same with training steps."""
    own, data = quiet.training(options.rank), batch(quiet, options)

    def step() -> None:
        take_step(own, data, 1e-5)

    timed(step, 3)
    alone = timed(step, options.steps)
    with flooding("losses", base_url, options) as flood:
        beside = timed(step, options.steps)
        part = share(losses(quiet, [own], options), flood, options.window)
    report("steps", alone, beside, part, {"models": options.models, "datums": options.datums, "length": options.length})


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=Path, default=Path(".fovea/up.json"), help="written by `fovea up`")
    parser.add_argument("--quiet-key", default="tml-quiet")
    parser.add_argument("--flood-key", default="tml-flood")
    parser.add_argument("--queued", type=int, default=1000, help="samples that the flooding tenant keeps queued")
    parser.add_argument(
        "--asked", type=int, default=400, help="samples that the quiet tenant keeps queued in the share measurement"
    )
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=60, help="number of sequential samples")
    parser.add_argument("--models", type=int, default=4, help="models of the flooding tenant; the quiet one has one")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--datums", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="number of sequential steps")
    parser.add_argument("--window", type=float, default=15.0, help="seconds in which shares are counted")
    parser.add_argument("--only", choices=("samples", "training"))
    options = parser.parse_args()
    base_url = Running.read(options.up).base_url
    with Bench.open(base_url, options.quiet_key) as quiet:
        if options.only != "samples":
            measure_training(quiet, base_url, options)
        if options.only != "training":
            measure_samples(quiet, base_url, options)


if __name__ == "__main__":
    main()
