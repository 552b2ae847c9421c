"""`fovea up`: four services on one machine, one log, one Ctrl-C."""

import asyncio
import fcntl
import json
import math
import os
import pathlib
import signal
import time
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import fovea
from fovea.cli.kept_log import KeptLog, log_folder
from fovea.cli.service import KILLS, Service, ServiceFailed, ServiceSpec, kind_of
from fovea.cli.service_specs import UpOptions, base_url, service_specs
from fovea.client.channel import ServiceClient
from fovea.runtime import secret, tls
from fovea.runtime.hosts import is_loopback

COLORS = {"renderer": "cyan", "sampler": "green", "trainer": "magenta", "gateway": "yellow", "fovea": "bold white"}
STOP_ORDER = ("gateway", "trainer", "sampler", "renderer")
_EARLY_RESTARTS = 2


class Supervisor:
    """Starts the services, waits for health, keeps them up, and stops them in order.

    Args:
        specs: What to run; `service_specs(options)` by default.
    """

    def __init__(self, options: UpOptions, console: Console, specs: list[ServiceSpec] | None = None) -> None:
        self._options = options
        self._console = console
        self._stop = asyncio.Event()
        self._ready_s: float | None = None
        self._specs = service_specs(options) if specs is None else specs
        self._services = {spec.name: Service(spec, self._print) for spec in self._specs}
        self._has_served = {spec.name: asyncio.Event() for spec in self._specs}
        self._folder = StateFolder(options.state_dir)
        self._returning: dict[str, asyncio.Task[None]] = {}
        self._kept: KeptLog | None = None  # once the folder is ours
        self._started_at = time.time()

    async def run(self) -> int:
        """Returns the exit code: 0 after a stop that was asked for, 1 if a service did not come up."""
        try:
            self._folder.hold(base_url(self._options))
        except FolderTaken as error:
            self._print("fovea", str(error))
            return 1
        with suppress(OSError):  # what runs goes on without
            self._kept = KeptLog(log_folder(self._options.state_dir))
        try:
            return await self._run_all()
        finally:
            if self._kept is not None:
                self._kept.close()

    async def _run_all(self) -> int:
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
        if service.spec.starts_after:
            await self._has_served[service.spec.starts_after].wait()
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
        self._has_served[spec.name].set()

    def _note_end(self, name: str, how: str, pause_s: float) -> None:
        # What cannot start says so by a code. Who is killed meanwhile starts again, but not for ever: memory may lack.
        is_tried_again = how in KILLS and self._services[name].restarts < _EARLY_RESTARTS
        if self._ready_s is None and not is_tried_again:
            raise ServiceFailed(f"{name} ended by {how} before Fovea was ready; its last lines are above")
        self._print("fovea", f"{name} ended by {how}; starting it again in {pause_s:.2g} s, the others go on")
        if self._has_served[name].is_set() and (name not in self._returning or self._returning[name].done()):
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
        for kind in STOP_ORDER:
            services = [service for service in self._services.values() if service.spec.kind == kind]
            await asyncio.gather(*(service.stop(self._options.drain_s + 10.0) for service in services))
        for folder in {os.path.dirname(spec.temporary_dir) for spec in self._specs if spec.temporary_dir}:
            with suppress(OSError):  # not there if no service has started, not empty if one could not be ended
                os.rmdir(folder)
        self._folder.release()

    def _write_state(self, ready_s: float) -> None:
        state = {
            "pid": os.getpid(),
            "version": fovea.__version__,
            "started_at": self._started_at,
            "base_url": base_url(self._options),
            "model": self._options.model,
            "model_name": self._options.model_name,
            "further_models": {served.name: served.model for served in self._options.further_models},
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
        names = " and ".join(served.name for served in self._options.models)
        self._console.print(f"Tinker API at {base_url(self._options)}, model {names}. Try it:\n", soft_wrap=True)
        # A client that does not import `fovea` would ask the proxy of its environment for this machine.
        direct = f" no_proxy={hosts}" if (hosts := os.environ.get("no_proxy")) else ""
        line = f"  export TINKER_BASE_URL={base_url(self._options)} TINKER_API_KEY={key}{direct}\n"
        self._console.print(line, soft_wrap=True, highlight=False)

    def _print(self, service: str, line: str) -> None:
        # Who read the log may have gone, at which rich would exit, or its disk be full: what runs goes on.
        with suppress(OSError, SystemExit):
            color = COLORS[kind_of(service)]
            self._console.print(Text.assemble((f"{service:>8} ", color), "│ ", line), soft_wrap=True)
        if self._kept is not None:
            with suppress(OSError, ValueError):  # ValueError: closed, after a write that failed
                self._kept.write(service, line)


class FolderTaken(Exception):
    """Another `fovea up` runs in the folder."""


class StateFolder:
    """The folder of one `fovea up`: what runs there, in `up.json`, and a lock that ends with the process.

    Whoever holds it writes `up.json`, and is alone to remove it.
    """

    LOCK = "up.lock"

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file = path / "up.json"
        self._lock: int | None = None

    def hold(self, base_url: str) -> None:
        """Takes the folder until this process ends. Raises FolderTaken naming who has it."""
        lock = os.open(self._path / self.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
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
            lock = os.open(self._path / self.LOCK, os.O_RDWR)
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
