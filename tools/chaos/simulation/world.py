"""The world of one seed: the services of a Fovea, its clients, and the state that faults act on."""

import asyncio
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from chaos.history import History
from chaos.simulation.client import Client
from chaos.simulation.database_files import DatabaseFiles
from chaos.simulation.event_loop import Process, VirtualLoop
from chaos.simulation.fake_sampler import FakeRenderer, FakeSampler
from chaos.simulation.fake_trainer import MODEL, FakeTrainer, TrainerDisk
from chaos.simulation.network import HttpAnswer, Network, ask_app
from fovea_gateway.fronts.app import Upkeep
from fovea_gateway.fronts.components import Components
from fovea_gateway.fronts.rest_app import build_api
from fovea_gateway.http.endpoint import Readiness
from fovea_gateway.settings import GatewaySettings

logger = logging.getLogger("world")

GATEWAY, RENDERER = "gateway:8000", "renderer:1"
TRAINERS = ("trainer:1", "trainer-1:1", "trainer-2:1")
SAMPLERS = ("sampler-0:1", "sampler-1:1")
_THREAD_S = 0.004
_DRAIN_S = 5.0


class World:
    """The services and the network between them. Use it inside its event loop.

    Args:
        seed: Determines everything.
        files: The database, which outlives gateways.
        trainer_count: The number of trainers, 1 to 3. They share their disk.

    Attributes:
        addresses: The addresses of all services.
        clients: The clients.
        history: Requests and answers of clients.
        undisturbed: Requests and expected answers.
        components: Components of the running gateway; None while there is none.
    """

    def __init__(self, seed: int, files: DatabaseFiles, trainer_count: int = 1) -> None:
        self.seed, self.files = seed, files
        self.trainer_addresses = TRAINERS[:trainer_count]
        self.addresses = (GATEWAY, *self.trainer_addresses, RENDERER, *SAMPLERS)
        self.chance = random.Random(f"{seed}")
        delays, entropy = random.Random(f"{seed} threads"), random.Random(f"{seed} entropy")
        self._entropy = entropy
        self.loop = VirtualLoop(lambda: delays.uniform(0.0, _THREAD_S))  # type: ignore[abstract]  # sockets and the like
        self.network = Network(random.Random(f"{seed} network"))
        self.history, self.undisturbed = History(), History()
        self.trainer_disk = TrainerDisk()
        self.trainers: dict[str, FakeTrainer] = {}
        self.samplers: dict[str, FakeSampler] = {}
        self.processes: dict[str, Process] = {}
        self.dead: list[Process] = []
        self.components: Components | None = None
        self._upkeep: Upkeep | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._app: Any = None
        self._settings = GatewaySettings(
            model_name=MODEL, model=MODEL, renderer=[RENDERER], sampler=list(SAMPLERS),
            trainer=list(self.trainer_addresses), port=0,
            state_dir=files.folder, checkpoint_dir="memory://checkpoints", drain_s=_DRAIN_S, session_ttl_s=60.0,
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

    async def start_all(self) -> None:
        """Starts all services; their order does not matter."""
        for address in (*self.trainer_addresses, RENDERER, *SAMPLERS, GATEWAY):
            self.start(address)

    def start(self, address: str) -> None:
        """Starts a new process at an address without one."""
        self._instances += 1
        process = self.processes[address] = Process(f"{address.partition(':')[0]}#{self._instances}")
        instance_id = process.name
        chance = random.Random(f"{self.seed} {instance_id}")
        logger.info("%s starts", process.name)
        if address == GATEWAY:
            process.context.run(self._start_gateway, process)
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
        process.kill()
        self.dead.append(process)
        self.network.close(address)
        if address == GATEWAY:
            assert self.components is not None
            self.components.database.abandon()
            self.network.drop_caller(process)
            self.components = None

    async def stop_gateway(self) -> list[str]:
        """Ends the gateway as SIGTERM does. Returns the names of tasks that continue anyway."""
        process, upkeep, beginning = self.processes.pop(GATEWAY), self._upkeep, self._beginning
        assert upkeep is not None
        assert beginning is not None
        logger.info("stopping %s", process.name)

        async def end() -> None:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)
            await upkeep.drain()
            self.network.close(GATEWAY)
            await upkeep.end()

        await process.start(end())
        await asyncio.sleep(0.0)  # lets the done callbacks of tasks run
        left = [task.get_name() for task in process.tasks.values()]
        process.kill()
        self.dead.append(process)
        self.components = None
        return left

    def _start_gateway(self, process: Process) -> None:
        settings = self._settings
        ready = Readiness()
        components = self.components = Components(settings, on_superseded=lambda: None)
        self._upkeep = Upkeep(settings, components, ready)
        self._app = build_api(components, settings, ready)
        self.network.listen(GATEWAY, process)
        self._beginning = process.start(self._upkeep.begin(), f"{process.name} begins")

    def _reached_samplers(self) -> dict[str, FakeSampler]:
        away = {*self.network.cut, *self.network.hanging}
        return {each: self.samplers[each] for each in SAMPLERS if each in self.processes and each not in away}

    def _client(self, number: int) -> Client:
        chance = random.Random(f"{self.seed} client {number}")
        rounds = chance.randint(2, 4)
        return Client(f"client-{number}", chance, self._post, self.history, self.undisturbed, rounds)

    async def _post(self, route: str, headers: dict[str, str], body: bytes) -> HttpAnswer:
        """Sends one HTTP request of a client."""
        return await self.network.post(
            GATEWAY, lambda: ask_app(self._app, f"/api/v1/{route}", {"X-API-Key": "tml-local", **headers}, body)
        )


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Returns a folder in memory."""
    folder = Path(tempfile.mkdtemp(prefix="fovea-simulation-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
