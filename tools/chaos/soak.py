"""Hours of ordinary work: the memory of every process must stay flat, and answers must not become slower.

`python -m chaos.soak --hours 2`.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

import fovea_tinyvlm
from chaos.disk import LEAST_MIB
from chaos.history import History
from chaos.inventory import role
from chaos.run import client_names, run_clients
from chaos.stack import Stack, running

SAMPLE_S = 5.0
_MIB_AN_HOUR = 4096
WARM, FULL = 0.25, 0.5
"""Fractions of the run after which latencies and slopes are measured. Caches of a gigabyte take 48 minutes to fill."""
Samples = dict[str, list[tuple[float, float]]]


async def watch(stack: Stack, folder: Path, stop: Path, seconds: float) -> Samples:
    """Samples resident memory until the time is over, then stops the clients.

    Returns (seconds, MiB) of all processes of each role. Also writes each sample to memory.jsonl in `folder`, so that
    hours of data are not lost if this process dies.
    """
    samples: Samples = defaultdict(list)
    begun = time.monotonic()
    with (folder / "memory.jsonl").open("w", buffering=1) as lines:
        while (at_s := time.monotonic() - begun) < seconds:
            look: dict[str, float] = defaultdict(float)
            for process in stack.marked():
                with suppress(psutil.Error):
                    look[role(process)] += process.memory_info().rss / 2**20
            for name, mib in look.items():
                samples[name].append((at_s, mib))
            lines.write(json.dumps({"at_s": round(at_s, 1), "mib": look}) + "\n")
            await asyncio.sleep(SAMPLE_S)
    await asyncio.to_thread(stop.touch)
    return samples


def memory_lines(samples: Samples, seconds: float) -> list[str]:
    """Returns the final MiB, and the slope in MiB per hour after caches are full."""
    lines = []
    for name, points in sorted(samples.items()):
        full = [point for point in points if point[0] >= FULL * seconds]
        if len(full) > 1:
            slope = statistics.linear_regression(*zip(*full, strict=True)).slope * 3600
            lines.append(f"{name:60} {full[-1][1]:8.0f} MiB  {slope:+8.1f} MiB/h")
    return lines


def latency_lines(history: History, begun_s: float, seconds: float) -> list[str]:
    """Returns median and p99 of each operation, in the first and the last third after warming up."""
    warm_s = begun_s + WARM * seconds
    third_s = (1 - WARM) * seconds / 3
    lines = []
    for operation in sorted({one.operation for one in history.commands.values()}):
        done = [one for one in history.commands.values() if one.operation == operation and one.answers]
        took = [(one.invoked_s - warm_s, one.answers[0].at_s - one.invoked_s) for one in done]
        first = [s for at_s, s in took if 0 <= at_s < third_s]
        last = [s for at_s, s in took if 2 * third_s <= at_s < 3 * third_s]
        if min(len(first), len(last)) >= 10:
            words = (f"median {statistics.median(some):.3f} s, p99 {_p99(some):.3f} s" for some in (first, last))
            lines.append(f"{operation:18} first third {next(words)}; last third {next(words)} ({len(done)} in all)")
    return lines


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


async def soak(seconds: float, clients: int, folder: Path) -> int:
    """Runs the clients and prints the figures. Returns 0 if every command was answered, else 1."""
    disk_mib = LEAST_MIB + round(_MIB_AN_HOUR * seconds / 3600)
    async with running(folder, fovea_tinyvlm.ensure(), disk_mib=disk_mib) as stack:
        stop, begun_s = folder / "stop", time.monotonic()
        working = asyncio.create_task(run_clients(stack, folder / "soak", client_names(0, clients), stop, pause_s=0.2))
        samples = await watch(stack, folder, stop, seconds)
        exits = await working
    history = History.read(sorted((folder / "soak").glob("*.jsonl")))
    unanswered = sum(len(one.answers) != 1 or bool(one.answers[0].error) for one in history.commands.values())
    print(f"{seconds:.0f} s, {clients} clients, {len(history.commands)} commands, {unanswered} not answered")
    print(*memory_lines(samples, seconds), *latency_lines(history, begun_s, seconds), sep="\n")
    return 1 if unanswered or any(exits.values()) else 0


def main() -> int:
    """Runs the command. Returns exit code 0 if every command was answered, else 1."""
    parser = argparse.ArgumentParser(prog="python -m chaos.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    return asyncio.run(soak(given.hours * 3600, given.clients, Path(tempfile.mkdtemp(prefix="fovea-soak-"))))


if __name__ == "__main__":
    raise SystemExit(main())
