"""The supervisor of `fovea up`: runs all services on one machine, with one log and one Ctrl-C."""

import asyncio
import math
import os
import signal
import time
from contextlib import suppress

from rich.console import Console
from rich.table import Table
from rich.text import Text

import fovea
from fovea.cli.service import KILL_NAMES, Service, ServiceFailed, ServiceSpec, kind_of
from fovea.cli.service_specs import UpOptions, base_url, service_specs
from fovea.cli.state_folder import FolderTaken, ServiceLog, StateFolder, log_folder, print_table
from fovea.client.channel import ServiceClient
from fovea.runtime import credentials
from fovea.runtime.hosts import is_loopback

COLORS = {"renderer": "cyan", "sampler": "green", "trainer": "magenta", "gateway": "yellow", "fovea": "bold white"}
STOP_ORDER = ("gateway", "trainer", "sampler", "renderer")
_EARLY_RESTARTS = 2


class Supervisor:
    """The supervisor of all services: it starts them, waits for health, restarts them, and stops them in order.

    Args:
        options: Options of `fovea up`.
        console: Console for the output of all services.
        specs: Services to run; `service_specs(options)` by default.
        folder: The state folder, if the caller has locked it already.
    """

    def __init__(
        self,
        options: UpOptions,
        console: Console,
        specs: list[ServiceSpec] | None = None,
        folder: StateFolder | None = None,
    ) -> None:
        self._options = options
        self._console = console
        self._stop = asyncio.Event()
        self._ready_s: float | None = None
        self._specs = service_specs(options) if specs is None else specs
        self._services = {spec.name: Service(spec, self._print) for spec in self._specs}
        self._have_served: set[str] = set()
        self._folder = folder or StateFolder(options.state_dir)
        self._returning: dict[str, asyncio.Task[None]] = {}
        self._log: ServiceLog | None = None  # set once the folder is locked
        self._started_at = time.time()

    async def run(self) -> int:
        """Runs until stopped. Returns the exit code: 0 after a requested stop, 1 if a service did not start."""
        try:
            self._folder.hold(base_url(self._options))
        except FolderTaken as error:
            self._print("fovea", str(error))
            return 1
        with suppress(OSError):  # Fovea runs even if the log cannot be written
            self._log = ServiceLog(log_folder(self._options.state_dir))
        try:
            return await self._run_all()
        finally:
            if self._log is not None:
                self._log.close()

    async def _run_all(self) -> int:
        start = time.monotonic()
        loop = asyncio.get_running_loop()
        # Shells start background processes with SIGINT ignored. A SIGINT that arrives anyway is meant to stop Fovea.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._stop.set)
        running = [asyncio.create_task(each.run(self._note_end, self._note_change)) for each in self._services.values()]
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

    async def _wait_ready(self, start: float) -> None:
        deadline = start + self._options.ready_timeout_s
        await asyncio.gather(*(self._wait_serving(spec, start, deadline) for spec in self._specs))
        self._ready_s = time.monotonic() - start
        self._note_change()
        self._show_table(self._ready_s)

    async def _wait_serving(self, spec: ServiceSpec, start: float, deadline: float, what: str = "ready") -> None:
        async with ServiceClient(spec.address, internal=spec.kind != "gateway") as client:
            while not await client.is_serving(spec.health_name):
                if time.monotonic() > deadline:
                    raise ServiceFailed(f"{spec.name} was not ready within {self._options.ready_timeout_s:.0f} s")
                await asyncio.sleep(0.1)
        self._services[spec.name].note_serving()
        self._print("fovea", f"{spec.name} is {what} after {time.monotonic() - start:.1f} s")
        self._have_served.add(spec.name)
        for service in self._services.values():
            if service.spec.starts_after == spec.name:
                service.let_go_on()

    def _note_end(self, name: str, how: str, pause_s: float) -> None:
        # Before Fovea is ready, a service that exits with a code cannot start, so Fovea stops. A killed service
        # restarts a few times only, because the machine may lack the memory for it.
        is_tried_again = how in KILL_NAMES and self._services[name].restarts < _EARLY_RESTARTS
        if self._ready_s is None and not is_tried_again:
            raise ServiceFailed(f"{name} ended with {how} before Fovea was ready; see its last lines above")
        self._print(
            "fovea", f"{name} ended with {how}; restarting it in {pause_s:.2g} s, the other services keep running"
        )
        if name in self._have_served and (name not in self._returning or self._returning[name].done()):
            wait = self._wait_serving(self._services[name].spec, time.monotonic(), math.inf, "back")
            self._returning[name] = asyncio.create_task(wait)
        self._note_change()

    def _note_change(self) -> None:
        if self._ready_s is None:
            return
        try:
            self._write_state(self._ready_s)
        except OSError as error:  # a full disk must not stop the services
            self._print("fovea", f"could not write up.json, so `fovea status` is out of date: {error}")

    async def _stop_all(self) -> None:
        self._print("fovea", f"stopping; requests in flight have {self._options.drain_s:.0f} s to finish")
        for kind in STOP_ORDER:
            services = [service for service in self._services.values() if service.spec.kind == kind]
            await asyncio.gather(*(service.stop(self._options.drain_s + 10.0) for service in services))
        for folder in {os.path.dirname(spec.temporary_dir) for spec in self._specs if spec.temporary_dir}:
            with suppress(OSError):  # missing if no service started, not empty if one could not be killed
                os.rmdir(folder)
        for served in self._options.models:
            with suppress(FileNotFoundError):
                os.unlink(served.shared_base)  # empty without a shared base
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
            "service_secret": self._specs[0].environment[credentials.SECRET_VARIABLE],
            "tls_dir": os.environ.get(credentials.TLS_VARIABLE, ""),
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
            table.add_column(column, overflow="fold")
        for spec in self._specs:
            table.add_row(spec.name, spec.address, f"http://127.0.0.1:{spec.metrics_port}/metrics")
        print_table(lambda width: table, self._console)
        # Do not print the user's own key: logs are stored, and other people read them.
        key = "YOUR_KEY" if self._options.api_keys or not is_loopback(self._options.host) else "tml-local"
        names = " and ".join(served.name for served in self._options.models)
        self._console.print(f"Live page: {base_url(self._options)}/", soft_wrap=True)
        self._console.print(f"Tinker API at the same address, model {names}. For the SDK:\n", soft_wrap=True)
        # A client that does not import `fovea` would send requests for this machine to the configured proxy.
        direct = f" no_proxy={hosts}" if (hosts := os.environ.get("no_proxy")) else ""
        line = f"  export TINKER_BASE_URL={base_url(self._options)} TINKER_API_KEY={key}{direct}\n"
        self._console.print(line, soft_wrap=True, highlight=False)

    def _print(self, service: str, line: str) -> None:
        # The reader of the output may be gone (rich would exit then), or its disk full. The services keep running.
        with suppress(OSError, SystemExit):
            color = COLORS[kind_of(service)]
            self._console.print(Text.assemble((f"{service:>8} ", color), "│ ", line), soft_wrap=True)
        if self._log is not None:
            with suppress(OSError, ValueError):  # ValueError: the file was closed after a failed write
                self._log.write(service, line)
