"""Faults of a simulated world: at random times, alone and in pairs, each undone after a while."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from chaos.simulation.world import RENDERER, ROUTER, SAMPLERS, World

logger = logging.getLogger("faults")

_MOST_FAULTS = 5
_PAUSE_S = 6.0
_PAIRS = 0.3
"""Fraction of faults that occur during another one."""
_LOSSES = (0.0, 0.02, 0.1)


class Nemesis:
    """Makes faults while clients work.

    Attributes:
        count: Number of faults made.
        last_s: When the last one was undone.
    """

    def __init__(self, world: World) -> None:
        self._world, self._chance = world, world.chance
        self.count, self.last_s = 0, 0.0
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill_gateway, self._kill_gateway, self._restart_gateway, self._kill_trainer, self._kill_trainer,
            self._kill_sampler, self._kill_renderer, self._freeze, self._cut, self._hang, self._slow_down,
            self._break_off, self._fill_disk, self._evict,
        ]  # fmt: skip
        if len(world.trainer_addresses) > 1:
            self._kinds += [self._kill_trainer, self._drain_trainer, self._drain_trainer, self._cut_trainer]
        if world.server is not None:
            self._kinds += [
                self._swap_gateways, self._swap_gateways, self._kill_router, self._cut_router, self._cut_database,
                self._cut_database, self._restart_database, self._slow_database, self._lose_commit, self._lose_commit,
            ]  # fmt: skip
        world.network.losses = self._chance.choice(_LOSSES)

    async def run(self) -> None:
        """Makes all faults. Returns when all are undone."""
        planned = self._chance.randint(1, _MOST_FAULTS)
        under_way: list[asyncio.Task[None]] = []
        while self.count < planned:
            await asyncio.sleep(self._chance.uniform(0.0, _PAUSE_S))
            under_way.append(asyncio.create_task(self._make(self._chance.choice(self._kinds))))
            if self._chance.random() > _PAIRS:
                await asyncio.gather(*under_way)
        await asyncio.gather(*under_way)
        self._world.network.losses = 0.0
        self.last_s = self._world.now()

    async def _make(self, fault: Callable[[], Awaitable[None]]) -> None:
        self.count += 1
        number, name = self.count, fault.__name__.strip("_").replace("_", " ")
        logger.info("fault %d: %s", number, name)
        await fault()
        logger.info("fault %d is undone", number)

    async def _for_a_while(self, most_s: float) -> None:
        await asyncio.sleep(self._chance.choice((0.01, 0.3, 1.0)) * self._chance.uniform(0.0, most_s))

    async def _kill_gateway(self) -> None:
        await self._kill(self._choose(self._world.gateway_addresses), 10.0)

    async def _kill_trainer(self) -> None:
        await self._kill(self._choose_trainer(), 60.0)

    def _choose_trainer(self) -> str:
        return self._choose(self._world.trainer_addresses)

    def _choose(self, addresses: Sequence[str]) -> str:
        return self._chance.choice(addresses) if len(addresses) > 1 else addresses[0]

    async def _drain_trainer(self) -> None:
        """Drains a trainer for a while, as `fovea drain` does."""
        address = self._choose_trainer()
        self._world.files.write("INSERT OR IGNORE INTO drained_trainers VALUES (?)", address)
        await self._for_a_while(60.0)
        self._world.files.write("DELETE FROM drained_trainers WHERE address = ?", address)

    async def _cut_trainer(self) -> None:
        await self._cut_off(self._choose_trainer())

    async def _kill_sampler(self) -> None:
        await self._kill(self._chance.choice(SAMPLERS), 60.0)

    async def _kill_renderer(self) -> None:
        await self._kill(RENDERER, 20.0)

    async def _kill(self, address: str, most_s: float) -> None:
        if address in self._world.processes:  # otherwise another fault already killed it
            self._world.kill(address)
            await self._for_a_while(most_s)
            self._world.start(address)

    async def _restart_gateway(self) -> None:
        address = self._choose(self._world.gateway_addresses)
        if address in self._world.processes:
            await self._world.stop_gateway(address)
            await self._for_a_while(5.0)
            if address not in self._world.processes:
                self._world.start(address)

    async def _swap_gateways(self) -> None:
        """Kills two gateways and starts them in a random order, so that each may own the shard of the other."""
        chosen = self._chance.sample(self._world.gateway_addresses, 2)
        killed = [address for address in chosen if address in self._world.processes]
        for address in killed:
            self._world.kill(address)
        await self._for_a_while(10.0)
        for address in self._chance.sample(killed, len(killed)):
            self._world.start(address)
            await asyncio.sleep(self._chance.choice((0.0, 1.0)))

    async def _kill_router(self) -> None:
        await self._kill(ROUTER, 10.0)

    async def _cut_router(self) -> None:
        await self._cut_off(ROUTER)

    async def _cut_database(self) -> None:
        """Cuts a gateway or the router off from the database. The server ends its sessions at once, or later."""
        server, address = self._world.server, self._choose((*self._world.gateway_addresses, ROUTER))
        assert server is not None
        host = address.partition(":")[0]
        server.cut.add(host)
        lost = server.sessions_of(host)
        for session in lost:
            session.lose()
        await asyncio.sleep(self._chance.choice((0.0, 1.0)) * self._chance.uniform(0.0, 25.0))
        for session in lost:
            server.end(session)
        await self._for_a_while(20.0)
        server.cut.discard(host)

    async def _restart_database(self) -> None:
        server = self._world.server
        assert server is not None
        server.is_down = True
        server.end_all()
        await self._for_a_while(20.0)
        server.is_down = False

    async def _slow_database(self) -> None:
        self._world.database_s = self._chance.uniform(0.05, 1.0)
        await self._for_a_while(20.0)
        self._world.database_s = 0.0

    async def _lose_commit(self) -> None:
        """Breaks a gateway's connection to the database during its next commit, before or after it takes place."""
        server, address = self._world.server, self._choose(self._world.gateway_addresses)
        assert server is not None
        for session in server.sessions_of(address.partition(":")[0]):
            session.last_commit = self._chance.random() < 0.5

    async def _freeze(self) -> None:
        """Stops a process, as with SIGSTOP."""
        process = self._world.processes.get(self._chance.choice(self._world.addresses))
        if process is not None and process.frozen is None:
            process.freeze()
            await self._for_a_while(20.0)
            process.thaw()

    async def _cut(self) -> None:
        """Makes calls to one service fail at once."""
        await self._cut_off(self._chance.choice(self._world.addresses))

    async def _cut_off(self, address: str) -> None:
        self._world.network.cut.add(address)
        self._world.network.break_off(address)
        await self._for_a_while(30.0)
        self._world.network.cut.discard(address)

    async def _hang(self) -> None:
        """Delays all messages to and from one service."""
        address, event = self._chance.choice(self._world.addresses), asyncio.Event()
        self._world.network.hanging[address] = event
        await self._for_a_while(20.0)
        event.set()
        if self._world.network.hanging.get(address) is event:
            del self._world.network.hanging[address]

    async def _slow_down(self) -> None:
        address = self._chance.choice(self._world.addresses)
        self._world.network.slow[address] = self._chance.uniform(0.1, 3.0)
        await self._for_a_while(30.0)
        self._world.network.slow.pop(address, None)

    async def _break_off(self) -> None:
        """Breaks the connections to one service."""
        self._world.network.break_off(self._chance.choice(self._world.addresses))

    async def _fill_disk(self) -> None:
        self._world.files.fill()
        await self._for_a_while(30.0)
        self._world.files.make_room()

    async def _evict(self) -> None:
        """Makes a sampler drop all adapters, as for lack of memory."""
        self._world.samplers[self._chance.choice(SAMPLERS)].adapters.clear()
