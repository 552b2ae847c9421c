"""One service process under `fovea up`: started, followed, restarted, stopped."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from fovea.runtime.children import die_with_parent
from fovea.runtime.tasks import Backoff

STEADY_S = 120.0
"""A process that lived this long starts again at once when it dies; the pause doubles for one that did not."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class ServiceSpec:
    """How to run one service.

    Attributes:
        name: For the log.
        arguments: After `python`.
        address: host:port of its gRPC server.
        health_name: Full gRPC service name to ask for health.
        environment: Added to the environment.
        metrics_port: Where its Prometheus metrics are.
    """

    name: str
    arguments: tuple[str, ...]
    address: str
    health_name: str
    metrics_port: int
    environment: dict[str, str] = field(default_factory=dict)


class ServiceFailed(Exception):
    """A service did not come up."""


class Service:
    """A child process that is started again when it dies, until it is told to stop.

    Args:
        spec: What to run.
        on_line: Called with (service name, line) for everything it prints.
    """

    def __init__(self, spec: ServiceSpec, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None]
        self._stopping = False
        self._restarts = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)

    @property
    def pid(self) -> int | None:
        """Process id, None while it is down."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def run(self, on_exit: Callable[[str, str, float], Awaitable[None]], on_start: Callable[[], None]) -> None:
        """Keeps the process running until `stop`, however often it dies: others hold what would be lost with them.

        Args:
            on_exit: Called with the service's name, how it ended, and the seconds until it is started again.
        """
        while not self._stopping:
            await self._start()
            on_start()
            started = time.monotonic()
            code = await self._follow()
            if self._stopping:
                return
            if time.monotonic() - started >= STEADY_S:
                self._restarts.reset()
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            await on_exit(self.spec.name, how, self._restarts.next_s)
            await self._restarts.pause()

    async def stop(self, timeout_s: float) -> None:
        """Asks the process to end, and after `timeout_s` kills it with everything it started."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self._on_line(self.spec.name, f"did not end within {timeout_s:.0f} s and is killed")
        self._kill_group(process.pid)
        await process.wait()

    async def _start(self) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "FOVEA_SUPERVISED": "1"} | self.spec.environment
        # Without bytecode every process would compile torch and vllm anew: 20 s instead of 8.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # A pipe of our own: asyncio's would make `wait` last until orphans close it too.
        reading, writing = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self.spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=environment,
                # A group of its own: Ctrl-C reaches the supervisor alone, which then stops the services in order.
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        finally:
            os.close(writing)
        self._reader = asyncio.create_task(self._read(reading))

    async def _follow(self) -> int:
        assert self._process is not None
        code = await self._process.wait()
        # Children that outlive their parent would hold its ports.
        self._kill_group(self._process.pid)
        await self._reader
        return code

    async def _read(self, descriptor: int) -> None:
        stream = asyncio.StreamReader(limit=2**20)
        with os.fdopen(descriptor, "rb") as pipe:
            protocol = asyncio.StreamReaderProtocol(stream)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
            while line := await stream.readline():
                self._on_line(self.spec.name, line.decode(errors="replace").rstrip())

    @staticmethod
    def _kill_group(pid: int) -> None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
