"""Measures the downtime when one gateway takes over from another: `python -m benchmarks.failover`.

Runs two gateway processes on PostgreSQL with fake services, behind a switch that routes connections to the ready
gateway. Five clients, one of them the official SDK, train and sample and check every answer. The active gateway is
killed (SIGKILL) or stopped (SIGTERM). The figure is the longest time without an answer for a client that asks every 10
ms.

With `--shards`, it instead runs two gateways with a shard each, a third one that waits, and a router. It kills the
owners of the shards in turn. The figures are the longest times without an answer for a client of the killed gateway's
shard, and for one of the other shard.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.figure import emit
from fovea_gateway.database.ownership import Directory, shard_of
from tests.contract.gateway.conftest import Stand
from tests.contract.gateway.requests import Rest
from tests.contract.gateway.test_postgresql import (
    CLIENTS,
    Cluster,
    Load,
    Patient,
    Probe,
    check_once,
    hand_over,
    kill,
    slow_down,
    stop,
)
from tests.contract.gateway.test_process import Process
from tests.contract.gateway.test_shards import Front
from tests.postgresql import Server, running_postgresql
from tests.waiting import eventually

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


class ShardProbe(Probe):
    """A client of one session that asks for something small every 10 ms.

    Args:
        url: URL of a router.
        session_id: The session.
    """

    def __init__(self, url: str, session_id: str) -> None:
        super().__init__(url)
        self._session_id, self.answers = session_id, 0

    async def ask(self, http: httpx.AsyncClient) -> bool:
        """Returns whether a heartbeat of the session was answered."""
        is_answered = (await http.post("session_heartbeat", json={"session_id": self._session_id})).status_code == 200
        self.answers += is_answered
        return is_answered


class PatientFront(Front):
    """A router for clients that repeat refused requests."""

    def http(self, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
        """Returns a client."""
        return super().http(transport or Patient())


class Gateways:
    """Gateways of two shards, which replace each other behind a router."""

    def __init__(self, stand: Stand, url: str) -> None:
        self.front = PatientFront(url, stand)
        self.load = Load(self.front)  # type: ignore[arg-type]
        self._stand, self._url = stand, url
        self._running: list[Process] = []
        self._directory = Directory(url)

    async def start(self, route: str = "sessions") -> Process:
        """Starts a gateway, and waits until a route answers. One without a shard answers `healthz` only."""
        gateway = Process(self._stand)
        self._running.append(gateway)
        await gateway.start(route, database_url=self._url, shards=2, log_level="WARNING")
        return gateway

    async def owner(self, shard: int) -> Process:
        """Returns the gateway that owns a shard."""
        await self._directory.look()
        port = (await self._directory.owner(shard)).rest.rpartition(":")[2]
        (found,) = [each for each in self._running if str(each.port) == port]
        return found

    async def replace(self, shard: int, probes: Sequence[ShardProbe]) -> list[float]:
        """Kills the owner of a shard. Returns the longest pause of each probe in seconds."""
        killed, successor = await self.owner(shard), await self.start("healthz")

        async def has_changed() -> bool:
            return await self.owner(shard) is successor

        async with probes[0].watching(), probes[1].watching():
            await kill(killed)
            await eventually(has_changed, 120)
            steps, answers = self.load.steps, [probe.answers for probe in probes]
            await eventually(lambda: self.load.steps > steps + 2 * CLIENTS, 120)
            await eventually(lambda: all(one.answers > n for one, n in zip(probes, answers, strict=True)), 120)
        return [probe.longest_s for probe in probes]

    async def stop(self) -> None:
        """Ends all processes."""
        await self.front.stop()
        await self._directory.close()
        for gateway in self._running:
            if gateway.process is not None and gateway.process.returncode is None:
                await kill(gateway)


async def measure_shards(server: Server, times: int) -> None:
    """Prints the figures of both shards."""
    with tempfile.TemporaryDirectory() as folder:
        stand, pauses = Stand(Path(folder)), list[list[float]]()
        await stand.start_fakes()
        for fake in (stand.trainer, stand.sampler):
            slow_down(fake, 0.05)
        gateways = Gateways(stand, server.new_url())
        load = gateways.load

        async def replace() -> None:
            await eventually(lambda: load.steps > CLIENTS and load.sdk_rounds > 0, 120)
            async with gateways.front.http() as http:
                sessions = {(await Rest(http).open_session()) for _ in range(8)}
            by_shard = {shard_of(each): each for each in sessions}
            probes = [ShardProbe(gateways.front.url, by_shard[shard]) for shard in range(2)]
            for number in range(times):
                found = await gateways.replace(number % 2, probes)
                pauses.append(found if number % 2 == 0 else found[::-1])

        try:
            for _ in range(2):
                await gateways.start()
            await gateways.front.start(2)
            await load.run(replace)
            check_once(gateways.front, load)  # type: ignore[arg-type]
        finally:
            await gateways.stop()
            await stand.stop_fakes()
    steps = load.steps + load.sdk_rounds
    for shard, seconds in zip(("killed", "other"), zip(*pauses, strict=True), strict=True):
        sizes = {"way": "killed", "steps": steps, "samples": len(load.samples), "lost": 0, "worst": max(seconds)}
        emit("gateway.failover.shards", seconds, "s", shard=shard, **sizes)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="Number of gateways that end in each way. Default: 5.")
    parser.add_argument("--shards", action="store_true", help="Kill gateways with a shard each, behind a router.")
    options = parser.parse_args()
    with running_postgresql() as server:
        if options.shards:
            asyncio.run(measure_shards(server, options.times))
        for way in () if options.shards else _WAYS:
            asyncio.run(measure(server, way, options.times))


if __name__ == "__main__":
    main()
