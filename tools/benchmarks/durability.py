"""Measures the cost of writing each answer to disk before it is sent: `python -m benchmarks.durability`.

Runs a real gateway process with fake services, on SQLite with `synchronous=FULL`, which is the default, and with
NORMAL, which loses the last commits in a power cut. Measures both in turns: samples submitted per second by 50 clients
at once (with grouped commits) and by one client (each sample waits for its own commit), and samples finished and
fetched per second.
"""

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

import sqlalchemy as sa

from benchmarks.figure import emit
from benchmarks.gateway_polls import Client, gateway, serve_fakes
from fovea_gateway.__main__ import main as run_gateway

_WAYS = ("FULL", "NORMAL")
_ONE_CLIENT = 300


def serve(synchronous: str) -> None:
    """Runs a gateway like `python -m fovea_gateway`, with another SQLite sync mode."""

    def configure(connection: Any, record: Any, *_: object) -> None:
        if not record.info.get("is_configured"):
            connection.execute(f"PRAGMA synchronous={synchronous}")
            record.info["is_configured"] = True

    sa.event.listen(sa.pool.Pool, "checkout", configure)
    run_gateway()


async def measure(fakes: Pipe, addresses: Sequence[str], synchronous: str, count: int) -> dict[str, float]:
    """Returns samples per second."""
    async with gateway(addresses, ["-m", "benchmarks.durability", "serve", synchronous]) as (port, _):
        fakes.send("shut")
        many, one = Client(port, count), Client(port, _ONE_CLIENT)
        await many.open()
        await one.open()
        seconds = {"submitted_by_50": await _timed(many.submit(0))}
        seconds["submitted_by_1"] = await _timed(one.submit(0, 1))
        fakes.send("open")
        seconds["ended_and_fetched"] = await _timed(many.wait_together())
        await one.wait_together()
        many.close()
        one.close()
    counts = {"submitted_by_50": count, "submitted_by_1": _ONE_CLIENT, "ended_and_fetched": count}
    return {name: counts[name] / spent for name, spent in seconds.items()}


async def _timed(work: Awaitable[Any]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def run(fakes: Pipe, count: int, repeats: int) -> None:
    """Measures both ways in turns and prints the figures."""
    addresses = await asyncio.to_thread(fakes.recv)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for _ in range(repeats):
        for way in _WAYS:
            found[way].append(await measure(fakes, addresses, way, count))
    full, normal = (found[way] for way in _WAYS)
    for name in full[0]:
        values, others = ([one[name] for one in some] for some in (full, normal))
        emit(f"gateway.durability.{name}", values, "1/s", others, synchronous="FULL", other="NORMAL", samples=count)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_fakes, args=(theirs,), daemon=True)
    process.start()
    try:
        asyncio.run(run(ours, options.samples, options.repeats))
    finally:
        ours.send(None)
        process.join(10)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        way = sys.argv[2]
        del sys.argv[1:3]
        serve(way)
    else:
        main()
