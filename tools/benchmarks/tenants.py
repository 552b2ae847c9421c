"""Measures how tenants share a trainer: `python -m benchmarks.tenants --up STATE_DIR/up.json --tenants 1 2 4 8`.

Each tenant is a session with its own LoRA model. It takes the same steps in its own thread, as fast as it gets answers:
forward_backward and optim_step, submitted together and then both awaited. The figures are the total datums/s against
those of a single tenant in the same run, in turns; the seconds of a step; fairness, the steps/s of the fastest tenant
over the slowest's, 1 at best; and the fraction of time in which the trainer ran commands, which shows how much more
tenants could gain by filling gaps.

With `--sample`, each step is followed by a sampling client of the new weights, which draws that many tokens. With
`--kill-after`, the trainer is killed once in each round of several tenants; a step that fails ends the program. While
several tenants run, the program reads each second how far storage is behind and how much memory the trainer takes.
"""

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import tinker

from benchmarks.client import Bench, datum, take_step
from benchmarks.figure import emit, quantile
from benchmarks.running import Running, busy


@dataclass
class Tenant:
    """A model and the data of its next step."""

    bench: Bench
    training: tinker.TrainingClient
    data: list[tinker.Datum]
    sampled_tokens: int

    @classmethod
    def open(cls, base_url: str, options: argparse.Namespace, number: int) -> "Tenant":
        """Opens a session with a model and random text."""
        bench = Bench.open(base_url, options.api_key)
        rng = np.random.default_rng(number)
        half = options.length // 2
        data = [
            datum(bench.prompt(rng, half), bench.tokens(rng, options.length + 1 - half)) for _ in range(options.datums)
        ]
        assert all(one.model_input.length == options.length for one in data)
        return cls(bench, bench.training(options.rank), data, options.sample)

    def take_steps(self, count: int, least_s: float, start: threading.Barrier) -> list[float]:
        """Takes at least `count` steps, and further ones until `least_s` seconds have passed.

        Starts together with the other tenants. Returns the seconds of each step.
        """
        start.wait()
        seconds: list[float] = []
        end = time.perf_counter() + least_s
        while len(seconds) < count or time.perf_counter() < end:
            begun = time.perf_counter()
            take_step(self.training, self.data, 1e-5)
            if self.sampled_tokens:
                self._sample()
            seconds.append(time.perf_counter() - begun)
        return seconds

    def _sample(self) -> None:
        sampling = self.training.save_weights_and_get_sampling_client().result(600)
        settings = tinker.SamplingParams(max_tokens=self.sampled_tokens)
        answer = sampling.sample(self.data[0].model_input, num_samples=1, sampling_params=settings).result(600)
        assert answer.sequences[0].tokens


@dataclass
class Rounds:
    """Measurements for one number of tenants, one entry per round."""

    datum_rates: list[float] = field(default_factory=list)
    unfairness: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    busy_shares: list[float] = field(default_factory=list)
    cores: list[dict[str, float]] = field(default_factory=list)
    storage: list["Storage"] = field(default_factory=list)

    def add(
        self, times: Sequence[Sequence[float]], datum_count: int, trainer_s: float, cores: dict[str, float]
    ) -> None:
        """Adds one round: seconds of each step of each tenant, datums of a step, seconds of the trainer's commands."""
        whole = [sum(steps) for steps in times]
        self.datum_rates.append(sum(map(len, times)) * datum_count / max(whole))
        paces = [len(steps) / seconds for steps, seconds in zip(times, whole, strict=True)]
        self.unfairness.append(max(paces) / min(paces))
        self.steps.append(quantile([seconds for steps in times for seconds in steps], 0.5))
        self.busy_shares.append(trainer_s / max(whole))
        self.cores.append(cores)


@dataclass
class Storage:
    """The largest values that were seen while tenants ran."""

    lag_s: float = 0.0
    waiting_gib: float = 0.0
    host_gib: float = 0.0

    def read(self, up: Path) -> None:
        """Reads the trainer's metrics and the resident memory of its processes."""
        try:
            running = Running.read(up)
            self.lag_s = max(self.lag_s, running.total("trainer", "fovea_trainer_durable_lag_seconds"))
            waiting = running.total("trainer", "fovea_trainer_durable_waiting_bytes")
            used = sum(one.memory_info().rss for one in trainer_processes(running))
        except (OSError, psutil.NoSuchProcess):
            return  # it starts again
        self.waiting_gib, self.host_gib = max(self.waiting_gib, waiting / 2**30), max(self.host_gib, used / 2**30)

    @contextmanager
    def watched(self, up: Path, kill_after_s: float) -> Iterator[None]:
        """Reads each second, and kills the trainer after `kill_after_s` seconds unless that is 0."""
        ended = threading.Event()

        def watch() -> None:
            kill_at = time.perf_counter() + kill_after_s if kill_after_s else float("inf")
            while not ended.wait(1.0):
                self.read(up)
                if time.perf_counter() > kill_at:
                    kill_at = float("inf")
                    kill_trainer(up)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def trainer_processes(running: Running) -> list[psutil.Process]:
    """Returns the trainer's process and its children."""
    if not (pid := running.pids["trainer"]):
        return []
    service = psutil.Process(pid)
    return [service, *service.children(recursive=True)]


def kill_trainer(up: Path) -> None:
    """Kills the trainer's processes, of which some may end with the others."""
    for one in trainer_processes(Running.read(up)):
        with suppress(psutil.NoSuchProcess):
            one.kill()


def measure(tenants: Sequence[Tenant], steps: int, least_s: float = 0.0) -> list[list[float]]:
    """Returns the seconds of each step of each tenant, with all tenants at once."""
    start = threading.Barrier(len(tenants))
    with ThreadPoolExecutor(len(tenants)) as pool:
        return list(pool.map(lambda tenant: tenant.take_steps(steps, least_s, start), tenants))


def command_seconds(running: Running) -> float:
    """Returns the seconds for which the trainer has run losses and steps since its start."""
    return sum(
        running.total("trainer", "fovea_trainer_command_seconds_sum", command=name)
        for name in ("ForwardBackward", "OptimStep")
    )


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Adds the options of the tenants' models and steps.

    Args:
        command: The command that started the Fovea.
    """
    parser.add_argument("--up", type=Path, default=Path(".fovea/up.json"), help=f"written by `{command}`")
    parser.add_argument("--api-key", default="tml-local")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--datums", type=int, default=16, help="datums of a tenant's step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a datum")
    parser.add_argument("--steps", type=int, default=8, help="the fewest steps of each tenant in a round")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="the shortest round with several tenants. With many, storage admits models in turns, so a few steps of "
        "each show the wait of the last one rather than the throughput",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sample", type=int, default=0, help="tokens drawn from the new weights after each step")


def settle(running: Running) -> None:
    """Waits until all states are durable, so that storage does not owe a round the states of an earlier one."""
    while running.total("trainer", "fovea_trainer_durable_lag_seconds"):
        time.sleep(0.5)


def report(count: int, rounds: Rounds, alone: Rounds, model: str, options: argparse.Namespace) -> None:
    """Prints the figures for one number of tenants."""
    sizes = {
        "tenants": count,
        "datums": options.datums,
        "length": options.length,
        "rank": options.rank,
        "steps": options.steps,
        "seconds": options.seconds,
        "sampled_tokens": options.sample,
        "killed_after_s": options.kill_after if count > 1 else 0.0,
        "model": Path(model).name,
    }
    rates, steps = (alone.datum_rates, alone.steps) if count > 1 else (None, None)
    emit("tenants.datums", rounds.datum_rates, "datum/s", rates, **sizes, busy_cores=busy(rounds.cores))
    emit("tenants.step", rounds.steps, "s", steps, **sizes)
    if not sizes["killed_after_s"]:  # a restarted trainer counts its commands from 0
        emit("tenants.trainer_busy", rounds.busy_shares, "of time", **sizes)
    if count > 1:
        emit("tenants.slowest_over_fastest", rounds.unfairness, "ratio", **sizes)
        emit("tenants.durable_lag", [one.lag_s for one in rounds.storage], "s", **sizes)
        emit("tenants.snapshots_waiting", [one.waiting_gib for one in rounds.storage], "GiB", **sizes)
        emit("tenants.trainer_memory", [one.host_gib for one in rounds.storage], "GiB", **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 2, 4, 8], help="1 is always measured")
    add_options(parser, "fovea up")
    parser.add_argument("--kill-after", type=float, default=0.0, help="seconds after which a round kills the trainer")
    options = parser.parse_args()
    running = Running.read(options.up)
    counts = sorted({1, *options.tenants})
    tenants = [Tenant.open(running.base_url, options, number) for number in range(counts[-1])]
    measure(tenants, 1)  # warms up
    found = {count: Rounds() for count in counts}
    for _ in range(options.repeats):
        for count in counts:
            running = Running.read(options.up)  # a restarted trainer has another process id
            settle(running)
            before, storage = command_seconds(running), Storage()
            kill_after = options.kill_after if count > 1 else 0.0
            with running.cores() as cores, storage.watched(options.up, kill_after):
                times = measure(tenants[:count], options.steps, options.seconds if count > 1 else 0.0)
            found[count].storage.append(storage)
            found[count].add(times, options.datums, command_seconds(running) - before, cores)
    for count in counts:
        report(count, found[count], found[1], running.model, options)
    for tenant in tenants:
        tenant.bench.service.close("success")


if __name__ == "__main__":
    main()
