"""The Fovea under test: a supervisor as in `fovea up`, links between services, and a small disk if possible."""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
from rich.console import Console

from chaos import disk
from chaos.links import Link, Trouble
from fovea.cli.service import ServiceSpec
from fovea.cli.service_specs import UpOptions, service_specs, temporary_dir
from fovea.cli.supervisor import Supervisor
from fovea.cli.up_command import make_certificates
from fovea.client.channel import ServiceClient
from fovea.runtime import credentials
from fovea.runtime.hosts import free_ports
from fovea.runtime.processes import die_with_parent

MODEL_NAME = "tiny"
MARK = "FOVEA_CHAOS"
"""Variable in the environment of every process of this Fovea."""
READY_S = 300.0
GATEWAYS = ("gateway", "gateway2", "gateway-router")
"""The services of a Fovea with two shards. The router listens on the port that a single gateway would have."""
SERVICES = ("gateway", "renderer", "sampler", "trainer")
TARGETS = (*SERVICES, "renderer.worker", "sampler.engine", "trainer.rank0", "trainer.rank1", "everything")
"""Targets that can be killed or stopped. A service alone means its main process, without its children. With two shards,
those in GATEWAYS too.
"""
LINKS = (
    "client-gateway", "gateway-renderer", "gateway-sampler", "gateway-trainer", "sampler-renderer", "trainer-renderer",
)  # fmt: skip


class NotReady(Exception):
    """The Fovea did not start. The message names its log."""


@dataclass(frozen=True)
class _Parts:
    """The configuration passed to the supervisor's process."""

    options: dict[str, Any]
    specs: list[dict[str, Any]]


class Stack:
    """Starts, finds and stops the services. Their ports stay the same when everything restarts.

    Args:
        folder: Folder for logs, and for the disk's files if this machine cannot mount a disk.
        model: Folder of the checkpoint.
        environment: Variables added for all services.
        disk_mib: Size of the disk, on which clients' saves stay.
        database_url: A PostgreSQL for two gateways with a shard each, behind a router; empty for one gateway with
            SQLite.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        model: pathlib.Path,
        environment: dict[str, str] | None = None,
        disk_mib: int = disk.LEAST_MIB,
        database_url: str = "",
    ) -> None:
        self.database_url = database_url
        self.log = folder / "up.log"
        self.model = model
        self._folder = folder
        self._place = folder / "disk"
        for made in (self._place, folder / "tmp"):
            made.mkdir()
        self.disk = disk.Disk(self._place, disk_mib) if disk.is_possible() else None
        self._sessions: set[int | None] = set()
        self._environment = {MARK: str(folder), "TMPDIR": str(folder / "tmp")} | (environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        rest, gateway = free_ports(2)
        self._options = UpOptions(
            model=str(model), model_name=MODEL_NAME, host="127.0.0.1", port=rest, grpc_port=gateway, ranks=2,
            state_dir=self._place / "state",
        )  # fmt: skip
        specs = service_specs(self._options)
        if database_url:
            single = specs.pop()
            specs += _sharded(single, rest, gateway, database_url)
        self.specs = {spec.name: spec for spec in specs}
        self.links = {name: Link(name, self._upstream(name)) for name in LINKS}

    @property
    def base_url(self) -> str:
        """The base URL for clients, which leads over the link in front of the gateway."""
        return f"http://127.0.0.1:{self.links['client-gateway'].port}"

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        assert self._process
        return self._process.pid

    @property
    def ports(self) -> set[int]:
        """Ports on which its services listen."""
        specs = self.specs.values()
        grpc = {int(spec.address.rpartition(":")[2]) for spec in specs}
        rest = {int(_value(spec, "--port")) for spec in specs if spec.kind == "gateway"}
        return grpc | rest | {spec.metrics_port for spec in specs}

    @property
    def folder(self) -> pathlib.Path:
        """Folder with its database, checkpoints and `up.json`."""
        return (self.disk.path if self.disk else self._place) / "state"

    @property
    def temporary(self) -> tuple[pathlib.Path, pathlib.Path]:
        """Folders with temporary files of the supervisor and of its services."""
        return self._folder / "tmp", temporary_dir(self._options.state_dir)

    @property
    def state(self) -> dict[str, Any]:
        """Contents of its `up.json`."""
        state: dict[str, Any] = json.loads((self.folder / "up.json").read_text())
        return state

    def local(self, path: str) -> pathlib.Path:
        """Converts a path in one of its processes to a path in this process."""
        return self.folder / pathlib.Path(path.removeprefix("file://")).relative_to(self._place / "state")

    async def start(self) -> None:
        """Starts everything and waits until it is ready. Raises NotReady."""
        for link in self.links.values():
            if not link.port:
                await link.open()
        parts = self._folder / "parts.json"
        specs = [asdict(self._linked(spec)) for spec in self.specs.values()]
        parts.write_text(json.dumps(asdict(_Parts(asdict(self._options), specs)), default=str))
        entering = self.disk.entering if self.disk else []
        command = [*entering, sys.executable, "-m", "chaos.stack", str(parts)]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
                command, stdout=log, stderr=log, env=os.environ | self._environment, start_new_session=True
            )
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Waits until all services serve and `up.json` says so."""
        assert self._process
        deadline = time.monotonic() + READY_S
        while not await self.is_serving():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NotReady(f"Fovea did not start within {READY_S:.0f} s, or ended; see {self.log}")
            await asyncio.sleep(0.2)

    async def is_serving(self, *names: str) -> bool:
        """Returns whether these services serve; all services by default."""
        if not (self.folder / "up.json").exists():
            return False
        for spec in self.specs.values():
            async with ServiceClient(spec.address, internal=spec.kind != "gateway") as client:
                if (not names or spec.name in names) and not await client.is_serving(spec.health_name):
                    return False
        return True

    def find(self, target: str) -> list[psutil.Process]:
        """Returns the running processes of an entry of TARGETS: at most one, except for everything."""
        name, _, part = target.partition(".")
        with suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self.pid)
            if name == "everything":
                return [supervisor, *supervisor.children(recursive=True)]
            arguments = list(self._linked(self.specs[name]).arguments) if name in self.specs else []
            for child in supervisor.children():
                if child.cmdline()[-len(arguments) :] == arguments:
                    found = child.children(recursive=True) if part else [child]
                    return [one for one in found if not part or _is_part(one, part)][:1]
        return []

    def marked(self) -> list[psutil.Process]:
        """Returns every process of this Fovea, even if its parent has died.

        vLLM's engine overwrites its environment with its title, so it is found by its session, which its sampler leads.
        """
        alive = [one for one in psutil.process_iter(["status"]) if one.info["status"] != psutil.STATUS_ZOMBIE]
        marked = {one.pid for one in alive if self._is_marked(one)}
        for pid in marked:
            with suppress(ProcessLookupError):
                self._sessions.add(os.getsid(pid))
        sessions = {one: _session(one) for one in alive}
        self._sessions &= {*sessions.values()}  # the kernel gives the number of an ended session to other processes
        return [one for one in alive if one.pid in marked or sessions[one] in self._sessions]

    def _is_marked(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get(MARK) == str(self._folder)
        return False

    async def kill(self) -> None:
        """Kills all processes at once, like a power cut that loses no written data. `start` starts them again."""
        for process in self.find("everything"):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert self._process
        await asyncio.to_thread(self._process.wait, 60.0)

    async def stop(self) -> bool:
        """Stops the Fovea as Ctrl-C does. Returns whether it ended by itself; a supervisor that was killed did not."""
        for link in self.links.values():
            link.disturb(Trouble.NONE)
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                await asyncio.to_thread(self._process.wait, 120.0)
            except subprocess.TimeoutExpired:
                await self.kill()
        for link in self.links.values():
            await link.close()
        return bool(self._process and self._process.returncode == 0)

    def _upstream(self, link: str) -> int:
        service = link.partition("-")[2]
        if link == "client-gateway":
            return self._options.port
        return int(self.specs[service].address.rpartition(":")[2])

    def _linked(self, spec: ServiceSpec) -> ServiceSpec:
        """Returns a service that connects to others through links."""
        arguments = list(spec.arguments)
        for name, link in self.links.items():
            source, _, service = name.partition("-")
            if source == spec.kind and f"--{service}" in arguments:
                arguments[arguments.index(f"--{service}") + 1] = f"127.0.0.1:{link.port}"
        return replace(spec, arguments=tuple(arguments))


def _sharded(single: ServiceSpec, rest: int, grpc: int, database_url: str) -> Iterator[ServiceSpec]:
    """Yields two gateways with a shard each, and a router that listens on `rest` and `grpc`."""
    ports = iter(free_ports(7))
    environment = single.environment | {"FOVEA_GATEWAY_DATABASE_URL": database_url}
    for number, name in enumerate(GATEWAYS):
        is_router = name == "gateway-router"
        own = (
            {"--port": rest, "--grpc-port": grpc} if is_router else {"--port": next(ports), "--grpc-port": next(ports)}
        )
        own["--metrics-port"] = next(ports)
        if is_router:
            words = ["-m", "fovea_gateway.fronts.router", *(str(word) for pair in own.items() for word in pair)]
        else:
            before = ("", *single.arguments)
            words = [str(own.get(option, word)) for option, word in zip(before, single.arguments, strict=False)]
            words += ["--shards", "2"]
        yield replace(
            single, name=name, arguments=tuple(words), address=f"127.0.0.1:{own['--grpc-port']}",
            metrics_port=own["--metrics-port"], environment=environment,
            temporary_dir=f"{single.temporary_dir}{number or ''}",
        )  # fmt: skip


def _value(spec: ServiceSpec, option: str) -> str:
    return spec.arguments[spec.arguments.index(option) + 1]


def _session(process: psutil.Process) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(process.pid)
    return None


def _is_part(process: psutil.Process, part: str) -> bool:
    with suppress(psutil.Error):
        if part.startswith("rank"):
            return process.name() == f"trainer-{part}"
        known = {"worker": "fovea_renderer.image_worker", "engine": "VLLM::EngineCore"}
        return any(known[part] in word for word in process.cmdline())
    return False


@asynccontextmanager
async def running(
    folder: pathlib.Path,
    model: pathlib.Path,
    environment: dict[str, str] | None = None,
    disk_mib: int = disk.LEAST_MIB,
    database_url: str = "",
) -> AsyncIterator[Stack]:
    """Runs a stack inside the context."""
    stack = Stack(folder, model, environment, disk_mib, database_url)
    make_certificates(folder / "tls")
    os.environ[credentials.TLS_VARIABLE] = str(
        folder / "tls"
    )  # for the services, and for this process, which checks their health
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop()
        if stack.disk:
            stack.disk.close()
        del os.environ[credentials.TLS_VARIABLE]


def main(parts: pathlib.Path) -> int:
    """Runs the supervisor's process. It ends with its parent, and all services end with it."""
    die_with_parent()
    told = json.loads(parts.read_text())
    paths = {"state_dir": pathlib.Path(told["options"].pop("state_dir"))}
    options = UpOptions(**told["options"] | paths)
    options.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    specs = [ServiceSpec(**spec | {"arguments": tuple(spec["arguments"])}) for spec in told["specs"]]

    async def run() -> int:
        return await Supervisor(options, Console(), specs).run()

    return asyncio.run(run())


if __name__ == "__main__":
    raise SystemExit(main(pathlib.Path(sys.argv[1])))
