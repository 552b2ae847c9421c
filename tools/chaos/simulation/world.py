"""The world of one seed: the services of a Fovea, its clients, and the state that faults act on."""

import asyncio
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from chaos.history import History
from chaos.simulation.client import Client
from chaos.simulation.database_files import DatabaseFiles
from chaos.simulation.event_loop import Process, VirtualLoop
from chaos.simulation.fake_sampler import FakeRenderer, FakeSampler
from chaos.simulation.fake_trainer import MODEL, FakeTrainer, TrainerDisk
from chaos.simulation.gateways import Gateway, Router
from chaos.simulation.network import HttpAnswer, Network, ask_app
from chaos.simulation.postgresql import URL, SharedDatabase
from fovea.wire.errors import FoveaError
from fovea_gateway.settings import GatewaySettings

logger = logging.getLogger("world")

GATEWAY, ROUTER, RENDERER = "gateway:8000", "router:8000", "renderer:1"
GATEWAYS = ("gateway-0:8000", "gateway-1:8000", "gateway-2:8000", "gateway-3:8000")
TRAINERS = ("trainer:1", "trainer-1:1", "trainer-2:1")
SAMPLERS = ("sampler-0:1", "sampler-1:1")
_THREAD_S = 0.004
_DRAIN_S = 5.0
_SPARE = 0.5
"""Fraction of the worlds with shards in which a gateway waits for one."""
_RETURNS_S = (0.2, 5.0)
"""Seconds after which a gateway that has ended by itself is started again."""


class _Ended(BaseException):
    """A process has ended itself."""


class World:
    """The services and the network between them. Use it inside its event loop.

    Args:
        seed: Determines everything.
        files: The database, which outlives gateways.
        trainer_count: The number of trainers, 1 to 3. They share their disk.
        shard_count: The number of shards. With several, each has a gateway, which may be exchanged for another, and a
            router leads clients to them.

    Attributes:
        addresses: The addresses of all services.
        gateway_addresses: Those of the gateways.
        clients: The clients.
        history: Requests and answers of clients.
        undisturbed: Requests and expected answers.
        gateways: The running gateways, by address.
        database_s: Maximum extra seconds of a call in a thread, such as a read of the database.
    """

    def __init__(self, seed: int, files: DatabaseFiles, trainer_count: int = 1, shard_count: int = 1) -> None:
        self.seed, self.files = seed, files
        self.chance = random.Random(f"{seed}")
        self.server = files.server if isinstance(files, SharedDatabase) else None
        self.trainer_addresses = TRAINERS[:trainer_count]
        self.gateway_addresses: tuple[str, ...] = (GATEWAY,)
        self.entrance, further = GATEWAY, tuple[str, ...]()
        if shard_count > 1:
            self.gateway_addresses = GATEWAYS[: shard_count + (self.chance.random() < _SPARE)]
            self.entrance, further = ROUTER, (ROUTER,)
        self.addresses = (*self.gateway_addresses, *self.trainer_addresses, RENDERER, *SAMPLERS, *further)
        delays, entropy = random.Random(f"{seed} threads"), random.Random(f"{seed} entropy")
        self._entropy = entropy
        self.database_s = 0.0
        self.loop = VirtualLoop(  # type: ignore[abstract]  # sockets and the like
            lambda: delays.uniform(0.0, _THREAD_S + self.database_s), has_threads=shard_count > 1
        )
        self.network = Network(random.Random(f"{seed} network"))
        self.history, self.undisturbed = History(), History()
        self.trainer_disk = TrainerDisk()
        self.trainers: dict[str, FakeTrainer] = {}
        self.samplers: dict[str, FakeSampler] = {}
        self.processes: dict[str, Process] = {}
        self.dead: list[Process] = []
        self.gateways: dict[str, Gateway] = {}
        self._router: Router | None = None
        self._settings = GatewaySettings(
            model_name=MODEL, model=MODEL, renderer=[RENDERER], sampler=list(SAMPLERS),
            trainer=list(self.trainer_addresses), port=0, database_url=URL if shard_count > 1 else "",
            shards=shard_count, state_dir=files.folder, checkpoint_dir="memory://checkpoints", drain_s=_DRAIN_S,
            session_ttl_s=60.0,
        )  # fmt: skip
        self._instances = 0
        self._slowness = self.chance.choice((0.1, 1.0, 10.0))
        self.clients = [self._client(number) for number in range(self.chance.randint(1, 3))]

    def now(self) -> float:
        """Returns seconds since the start."""
        return self.loop.time()

    def entropy(self, count: int) -> bytes:
        """Returns random bytes, for generated names."""
        return self._entropy.randbytes(count)

    def open_channel(self, address: str) -> Any:
        """Returns a channel for the gateway's clients."""
        return self.network.open_channel(address)

    def free_bytes(self) -> int:
        """Returns the free bytes of the state's disk."""
        return self.files.free_bytes()

    def limit(self, connection: sa.Connection) -> None:
        """Limits the database to the free space."""
        self.files.limit(connection)

    def connect_database(self) -> Any:
        """Returns a connection to the PostgreSQL."""
        assert self.server is not None
        return self.server.connect()

    async def start_all(self) -> None:
        """Starts all services; their order does not matter."""
        last = self.addresses[len(self.gateway_addresses) :]
        for address in (*last, *self.gateway_addresses):
            self.start(address)

    def start(self, address: str) -> None:
        """Starts a new process at an address without one."""
        self._instances += 1
        process = self.processes[address] = Process(f"{address.partition(':')[0]}#{self._instances}")
        instance_id = process.name
        chance = random.Random(f"{self.seed} {instance_id}")
        logger.info("%s starts", process.name)
        if address in self.gateway_addresses:
            process.context.run(self._start_gateway, address, process)
            return
        if address == ROUTER:
            self._router = process.context.run(Router, address, process, self.network, URL, self._app_at)
            return
        listener = self.network.listen(address, process)
        if address in TRAINERS:
            trainer = self.trainers[address] = FakeTrainer(
                instance_id, self.trainer_disk, self._reached_samplers, chance, self._slowness,
                lambda: not self.free_bytes(),
            )  # fmt: skip
            process.context.run(trainer.begin, listener, process)
        elif address == RENDERER:
            FakeRenderer().begin(listener, process)
        else:
            self.samplers[address] = FakeSampler(instance_id, chance)
            self.samplers[address].begin(listener, process)

    def kill(self, address: str) -> None:
        """Ends a process as SIGKILL does."""
        process = self.processes.pop(address)
        logger.info("killed %s", process.name)
        self._clean_up(address, process)

    async def stop_gateway(self, address: str) -> list[str]:
        """Ends a gateway as SIGTERM does. Returns the names of tasks that continue anyway."""
        process, gateway = self.processes.pop(address), self.gateways[address]
        logger.info("stopping %s", process.name)
        work = process.start(gateway.stop())
        if self.server is not None:  # it may lose its shard meanwhile
            killed = asyncio.create_task(process.killed.wait())
            await asyncio.wait((work, killed), return_when=asyncio.FIRST_COMPLETED)
            killed.cancel()
        left: list[str] = []
        if process.is_alive:
            await work
            await asyncio.sleep(0.0)  # lets the done callbacks of tasks run
            left = [task.get_name() for task in process.tasks.values()]
        self._clean_up(address, process)
        return left

    def _clean_up(self, address: str, process: Process) -> None:
        """Frees what a process had that has ended."""
        process.kill()
        self.dead.append(process)
        self.network.close(address)
        if self.server is not None:
            self.server.end_all(process)
        if gateway := self.gateways.pop(address, None):
            gateway.abandon()

    def _start_gateway(self, address: str, process: Process) -> None:
        gateway = Gateway(address, process, self.network, self._settings, lambda: self._end_itself(address, process))
        self.gateways[address] = gateway
        if self.server is not None:
            gateway.beginning.add_done_callback(lambda done: self._look_at_beginning(address, process, done))

    def _look_at_beginning(self, address: str, process: Process, beginning: asyncio.Task[None]) -> None:
        """Ends a gateway that cannot begin, as without a database."""
        if not beginning.cancelled() and isinstance(error := beginning.exception(), FoveaError):
            logger.info("%s: %s", process.name, error.message)
            self._end(address, process)

    def _end_itself(self, address: str, process: Process) -> None:
        self._end(address, process)
        raise _Ended

    def _end(self, address: str, process: Process) -> None:
        """Ends a process by itself. It is started again a little later."""
        if self.processes.get(address) is process:  # otherwise it is being stopped
            self.kill(address)
            Context().run(self.loop.call_later, self.chance.uniform(*_RETURNS_S), self._start_again, address)
        process.kill()

    def _start_again(self, address: str) -> None:
        if address not in self.processes:
            self.start(address)

    def _app_at(self, address: str) -> Any:
        return self._router.app if address == ROUTER and self._router else self.gateways[address].app

    def _reached_samplers(self) -> dict[str, FakeSampler]:
        away = {*self.network.cut, *self.network.hanging}
        return {each: self.samplers[each] for each in SAMPLERS if each in self.processes and each not in away}

    def _client(self, number: int) -> Client:
        chance = random.Random(f"{self.seed} client {number}")
        rounds = chance.randint(2, 4)
        return Client(f"client-{number}", chance, self._post, self.history, self.undisturbed, rounds)

    async def _post(self, route: str, headers: dict[str, str], body: bytes) -> HttpAnswer:
        """Sends one HTTP request of a client."""
        headers = {"X-API-Key": "tml-local", **headers}
        return await self.network.post(
            self.entrance, lambda: ask_app(self._app_at(self.entrance), f"/api/v1/{route}", headers, body)
        )


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Returns a folder in memory."""
    folder = Path(tempfile.mkdtemp(prefix="fovea-simulation-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
