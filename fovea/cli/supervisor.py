"""`fovea up`: four services on one machine, one log, one Ctrl-C."""

import asyncio
import fcntl
import json
import math
import os
import pathlib
import secrets
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fovea.cli.service import Service, ServiceFailed, ServiceSpec
from fovea.client.channel import ServiceClient
from fovea.runtime import secret, tls
from fovea.runtime.hosts import WILDCARDS, free_ports, is_loopback
from fovea.wire import conventions

COLORS = {"renderer": "cyan", "sampler": "green", "trainer": "magenta", "gateway": "yellow", "fovea": "bold white"}
STOP_ORDER = ("gateway", "trainer", "sampler", "renderer")
_LONGEST_TEMPORARY = 60  # vLLM puts Unix sockets there, whose paths have 107 characters at most


@dataclass(frozen=True)
class UpOptions:
    """What `fovea up` was asked for.

    Attributes:
        model: Checkpoint directory or hub name.
        model_name: Name to offer it under.
        host: Address that the gateway listens on; the other services stay on 127.0.0.1.
        port: REST port of the gateway.
        grpc_port: gRPC port of the gateway, 0 for a free one.
        ranks: Trainer processes.
        state_dir: Database, checkpoints, what the trainer recovers from, and `up.json`.
        api_keys: Accepted keys, as the gateway's settings take them; those of its database are accepted too.
        api_key_file: Further keys, one per line.
        ready_timeout_s: How long the services may take to come up.
        drain_s: How long a stop waits for work in flight.
        trainer_gpus: Devices that the trainer sees, as CUDA numbers them; empty leaves the environment as it is.
        sampler_gpus: The same for the sampler; its model is split over them.
    """

    model: str
    model_name: str
    host: str
    port: int
    grpc_port: int
    ranks: int
    state_dir: pathlib.Path
    api_keys: tuple[str, ...] = ()
    api_key_file: pathlib.Path | None = None
    ready_timeout_s: float = 300.0
    drain_s: float = 20.0
    log_level: str = "INFO"
    trainer_gpus: tuple[str, ...] = ()
    sampler_gpus: tuple[str, ...] = ()

    @property
    def shares_gpu(self) -> bool:
        """Whether rank 0 of the trainer, which sends, shares its device with the sampler: NCCL cannot send over one."""
        return bool(set(self.trainer_gpus[:1]) & set(self.sampler_gpus))

    @property
    def shares_memory(self) -> bool:
        """Whether any rank of the trainer shares its device with the sampler."""
        return bool(set(self.trainer_gpus) & set(self.sampler_gpus))


class Supervisor:
    """Starts the services, waits for health, keeps them up, and stops them in order.

    Args:
        specs: What to run; `service_specs(options)` by default.
    """

    def __init__(self, options: UpOptions, console: Console, specs: list[ServiceSpec] | None = None) -> None:
        self._options = options
        self._console = console
        self._stop = asyncio.Event()
        self._trainer_is_up = asyncio.Event()
        self._ready_s: float | None = None
        self._specs = service_specs(options) if specs is None else specs
        self._services = {spec.name: Service(spec, self._print) for spec in self._specs}
        self._folder = StateFolder(options.state_dir)
        self._returning: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> int:
        """Returns the exit code: 0 after a stop that was asked for, 1 if a service did not come up."""
        try:
            self._folder.hold(base_url(self._options))
        except FolderTaken as error:
            self._print("fovea", str(error))
            return 1
        start = time.monotonic()
        loop = asyncio.get_running_loop()
        # A shell that starts something in the background has it ignore SIGINT: whoever sends one all the same means it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                loop.add_signal_handler(number, self._stop.set)
        running = [asyncio.create_task(self._run(service)) for service in self._services.values()]
        failed = asyncio.ensure_future(asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION))
        stopped = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(self._wait_ready(start))
        try:
            await asyncio.wait({failed, stopped, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not ready.exception():
                await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (ready, *self._returning.values()):
                waiting.cancel()
            await self._stop_all()
        for task in [*running, ready]:
            if task.done() and not task.cancelled() and (failure := task.exception()):
                self._print("fovea", str(failure))
                return 1
        self._print("fovea", "all services have stopped")
        return 0

    async def _run(self, service: Service) -> None:
        if service.spec.name == "sampler" and self._options.shares_memory:
            # vLLM measures how much of the device is left for its cache, and takes for its own what another process
            # allocates meanwhile: beside a trainer that was loading it found nothing left, and ended.
            await self._trainer_is_up.wait()
        await service.run(self._note_end, self._note_change)

    async def _wait_ready(self, start: float) -> None:
        deadline = start + self._options.ready_timeout_s
        await asyncio.gather(*(self._wait_serving(spec, start, deadline) for spec in self._specs))
        self._ready_s = time.monotonic() - start
        self._note_change()
        self._show_table(self._ready_s)

    async def _wait_serving(self, spec: ServiceSpec, start: float, deadline: float, what: str = "ready") -> None:
        async with ServiceClient(spec.address, internal=spec.name != "gateway") as client:
            while not await client.is_serving(spec.health_name):
                if time.monotonic() > deadline:
                    raise ServiceFailed(f"{spec.name} was not ready within {self._options.ready_timeout_s:.0f} s")
                await asyncio.sleep(0.1)
        self._services[spec.name].note_serving()
        self._print("fovea", f"{spec.name} is {what} after {time.monotonic() - start:.1f} s")
        if spec.name == "trainer":
            self._trainer_is_up.set()

    def _note_end(self, name: str, how: str, pause_s: float) -> None:
        if self._ready_s is None:
            raise ServiceFailed(f"{name} ended by {how} before Fovea was ready; its last lines are above")
        self._print("fovea", f"{name} ended by {how}; starting it again in {pause_s:.2g} s, the others go on")
        if name not in self._returning or self._returning[name].done():
            wait = self._wait_serving(self._services[name].spec, time.monotonic(), math.inf, "back")
            self._returning[name] = asyncio.create_task(wait)
        self._note_change()

    def _note_change(self) -> None:
        if self._ready_s is None:
            return
        try:
            self._write_state(self._ready_s)
        except OSError as error:  # a full disk is no reason to end what runs
            self._print("fovea", f"`fovea status` shows what was before: {error}")

    async def _stop_all(self) -> None:
        self._print("fovea", f"stopping; requests in flight have {self._options.drain_s:.0f} s")
        for name in STOP_ORDER:
            await self._services[name].stop(self._options.drain_s + 10.0)
        self._folder.release()

    def _write_state(self, ready_s: float) -> None:
        state = {
            "pid": os.getpid(),
            "base_url": base_url(self._options),
            "model": self._options.model,
            "model_name": self._options.model_name,
            "ready_s": round(ready_s, 2),
            "service_secret": self._specs[0].environment[secret.VARIABLE],
            "tls_dir": os.environ.get(tls.VARIABLE, ""),
            "services": {
                spec.name: {
                    "address": spec.address,
                    "metrics": f"http://127.0.0.1:{spec.metrics_port}/metrics",
                    **self._services[spec.name].state,
                }
                for spec in self._specs
            },
        }
        self._folder.write(state)

    def _show_table(self, ready_s: float) -> None:
        table = Table(title=f"Fovea is ready after {ready_s:.1f} s", title_justify="left")
        for column in ("service", "gRPC", "metrics"):
            table.add_column(column)
        for spec in self._specs:
            table.add_row(spec.name, spec.address, f"http://127.0.0.1:{spec.metrics_port}/metrics")
        self._console.print(table)
        # A key of one's own is not shown: logs are kept, and read by others.
        key = "YOUR_KEY" if self._options.api_keys or not is_loopback(self._options.host) else "tml-local"
        self._console.print(f"Tinker API at {base_url(self._options)}, model {self._options.model_name}. Try it:\n")
        self._console.print(
            f"  export TINKER_BASE_URL={base_url(self._options)} TINKER_API_KEY={key}\n", highlight=False
        )

    def _print(self, service: str, line: str) -> None:
        # Who read the log may have gone, at which rich would exit, or its disk be full: what runs goes on.
        with suppress(OSError, SystemExit):
            self._console.print(Text.assemble((f"{service:>8} ", COLORS[service]), "│ ", line), soft_wrap=True)


def base_url(options: UpOptions) -> str:
    """Where the Tinker SDK is to be pointed."""
    host = "127.0.0.1" if options.host in WILDCARDS else options.host
    return f"http://{host}:{options.port}"


def service_specs(options: UpOptions) -> list[ServiceSpec]:
    """The processes of one embedded Fovea, with ports that stay the same over restarts."""
    renderer, sampler, trainer, gateway, *metrics = free_ports(8)
    gateway = options.grpc_port or gateway
    environment = {
        "OMP_NUM_THREADS": "1",
        # Idle OpenMP threads must sleep: spinning on busy cores costs several times the processor time.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        # Kept: the temporary folders of processes, where torch would put it, end with them.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
        # Other users of this machine reach 127.0.0.1 too.
        secret.VARIABLE: secret.service_secret() or secrets.token_urlsafe(32),
    }
    if pathlib.Path(options.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"

    # Keys go by the environment: everybody on the machine can read arguments.
    keys = {"FOVEA_GATEWAY_API_KEY": json.dumps(options.api_keys)} if options.api_keys else {}
    devices = {"trainer": options.trainer_gpus, "sampler": options.sampler_gpus}

    def spec(name: str, module: str, service: str, port: int, port_flag: str, *arguments: str) -> ServiceSpec:
        common = (port_flag, str(port), "--metrics-port", str(metrics.pop()), "--drain-s", str(options.drain_s))
        model = ("--model", options.model, "--log-level", options.log_level)
        command = ("-m", module, *model, *common, *arguments)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices[name])} if devices.get(name) else {}
        address = f"127.0.0.1:{port}"
        own = visible | (keys if name == "gateway" else {})
        temporary = str(options.state_dir / "tmp" / name)
        temporary = temporary if len(temporary) <= _LONGEST_TEMPORARY else ""
        return ServiceSpec(name, command, address, service, int(common[3]), environment | own, temporary)

    to = "127.0.0.1:"
    key_file = ("--api-key-file", str(options.api_key_file)) if options.api_key_file else ()
    # Where the gateway, which has the same environment, keeps them.
    checkpoints = os.environ.get("FOVEA_GATEWAY_CHECKPOINT_DIR") or str(options.state_dir / "checkpoints")
    recovery = os.environ.get("FOVEA_TRAINER_RECOVERY", str(options.state_dir / "recovery"))
    transfer = ("--transfer", "gloo") if options.shares_gpu else ()
    split = ("--tensor-parallel", str(len(options.sampler_gpus))) if len(options.sampler_gpus) > 1 else ()
    return [
        spec("renderer", "services.renderer", conventions.RENDERER_SERVICE, renderer, "--port"),
        spec(
            "sampler", "services.sampler", conventions.SAMPLER_SERVICE, sampler, "--port",
            "--renderer", f"{to}{renderer}", *transfer, *split,
        ),
        spec(
            "trainer", "services.trainer", conventions.TRAINER_SERVICE, trainer, "--port",
            "--renderer", f"{to}{renderer}", "--ranks", str(options.ranks), "--checkpoints", checkpoints,
            "--recovery", recovery,
        ),
        spec(
            "gateway", "gateway", conventions.GATEWAY_SERVICE, gateway, "--grpc-port",
            "--host", options.host, "--port", str(options.port), "--model-name", options.model_name,
            "--renderer", f"{to}{renderer}", "--sampler", f"{to}{sampler}", "--trainer", f"{to}{trainer}",
            "--state-dir", str(options.state_dir), *key_file,
        ),
    ]  # fmt: skip


class FolderTaken(Exception):
    """Another `fovea up` runs in the folder."""


class StateFolder:
    """The folder of one `fovea up`: what runs there, in `up.json`, and a lock that ends with the process.

    Whoever holds it writes `up.json`, and is alone to remove it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file = path / "up.json"
        self._lock: int | None = None

    def hold(self, base_url: str) -> None:
        """Takes the folder until this process ends. Raises FolderTaken naming who has it."""
        lock = os.open(self._path / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 1000, 0).decode(errors="replace").strip()
            os.close(lock)
            raise FolderTaken(
                f"another `fovea up` runs in {self._path}: {owner or 'it is just starting'}. Stop it, or give this one "
                "a folder and ports of its own: --state-dir, --port, --grpc-port"
            ) from None
        self._lock = lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()}, {base_url}\n".encode(), 0)

    def holder(self) -> int | None:
        """The process that holds the folder; None if nobody does, whatever a killed one has left there."""
        try:
            lock = os.open(self._path / "up.lock", os.O_RDWR)
        except FileNotFoundError:
            return None
        with open(lock) as file:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                said = file.read()
                return int(said.split()[1].rstrip(",")) if said else None  # it has the lock, and is about to say who
        return None

    def write(self, state: dict[str, Any]) -> None:
        """Writes `up.json`, whole or not at all."""
        temporary = self._file.with_suffix(".tmp")
        with open(temporary, "w", opener=_for_its_user_alone) as file:
            json.dump(state, file, indent=2)
        temporary.rename(self._file)

    def release(self) -> None:
        """Removes `up.json` and lets others take the folder."""
        self._file.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _for_its_user_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
