"""A Fovea that runs on this machine, from its `up.json`: addresses, and the CPU time that it uses."""

import json
import os
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

import fovea

fovea.bypass_proxies()


@dataclass(frozen=True)
class Running:
    """Addresses (host:port), process ids and metrics URLs by service, and the secret for calls to services."""

    base_url: str
    model: str
    model_name: str
    addresses: dict[str, str]
    pids: dict[str, int]
    metrics: dict[str, str]
    service_secret: str

    @classmethod
    def read(cls, path: Path) -> "Running":
        """Reads the `up.json` in the state folder of `fovea up`."""
        state = json.loads(path.read_text())
        services = state["services"]
        return cls(
            base_url=state["base_url"],
            model=state["model"],
            model_name=state["model_name"],
            addresses={name: service["address"] for name, service in services.items()},
            pids={name: service["pid"] for name, service in services.items()},
            metrics={name: service["metrics"] for name, service in services.items()},
            service_secret=state["service_secret"],
        )

    def total(self, service: str, sample: str, **labels: str) -> float:
        """Returns the sum of a service's Prometheus samples with this name and these labels."""
        return metric_total(self.metrics[service], sample, **labels)

    @contextmanager
    def cores(self) -> Iterator[dict[str, float]]:
        """Yields a dict that is filled at the end: cores that each service kept busy meanwhile, and `client`, this
        process.

        Child processes are counted separately, in sum: the sampler's engine as `sampler.children`.
        """
        pids = {"client": os.getpid(), **self.pids}
        processes = {name: [psutil.Process(pid)] for name, pid in pids.items()}
        children = {f"{name}.children": one[0].children(recursive=True) for name, one in processes.items()}
        processes |= {name: some for name, some in children.items() if some}
        found: dict[str, float] = {}
        begun, before = time.perf_counter(), {name: cpu_seconds(some) for name, some in processes.items()}
        yield found
        seconds = time.perf_counter() - begun
        found.update({name: (cpu_seconds(some) - before[name]) / seconds for name, some in processes.items()})


def metric_total(url: str, sample: str, **labels: str) -> float:
    """Returns the sum of the Prometheus samples on a page with this name and these labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        found = [one for family in families for one in family.samples if one.name == sample]
    return float(sum(one.value for one in found if labels.items() <= one.labels.items()))


def busy(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median cores of each process over rounds, without idle processes."""
    medians = {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in rounds[0]}
    return {name: round(cores, 2) for name, cores in medians.items() if cores >= 0.01}


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Returns the CPU seconds that processes have used since they started; 0 for one that has ended meanwhile."""
    total = 0.0
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total
