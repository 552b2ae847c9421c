"""Measures the downtime when one gateway takes over from another: `python -m benchmarks.failover`.

Runs two gateway processes on PostgreSQL with fake services, behind a switch that routes connections to the ready
gateway. Five clients, one of them the official SDK, train and sample and check every answer. The active gateway is
killed (SIGKILL) or stopped (SIGTERM). The figure is the longest time without an answer for a client that asks every 10
ms.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from benchmarks.figure import emit
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.test_postgresql import Cluster, Load, check_once, hand_over, kill, slow_down, stop
from tests.postgresql import Server, find_programs

_WAYS = {"killed": kill, "stopped": stop}


async def measure(server: Server, way: str, times: int) -> None:
    """Prints the figure for one signal."""
    with tempfile.TemporaryDirectory() as folder:
        stand = Stand(Path(folder))
        await stand.start_fakes()
        for fake in (stand.trainer, stand.sampler):
            slow_down(fake, 0.05)
        cluster = Cluster(stand, server.new_url())
        await cluster.service.start()
        try:
            load = Load(cluster)
            gaps = await hand_over(cluster, load, _WAYS[way], times)
            check_once(cluster, load)
        finally:
            await cluster.stop()
            await stand.stop_fakes()
    steps = load.steps + load.sdk_rounds
    emit("gateway.failover", gaps, "s", way=way, steps=steps, samples=len(load.samples), lost=0, worst=max(gaps))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    programs = find_programs()
    if programs is None:
        raise SystemExit("no PostgreSQL server is installed; install Debian's package postgresql")
    server = Server(programs)
    try:
        server.create()
        server.start()
        for way in _WAYS:
            asyncio.run(measure(server, way, options.times))
        server.stop()
    finally:
        server.remove()


if __name__ == "__main__":
    main()
