"""Runs one service process of `fovea up`: start, health, output, restart and stop."""

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fovea.cli import FORK_SUPPORT, GIVEN_FORK_SUPPORT
from fovea.runtime.processes import SAFE_PATH, SUPERVISED, die_with_parent
from fovea.runtime.tasks import Backoff

STEADY_S = 60.0
"""Uptime in seconds after which a crashed process restarts without delay. Below it, the delay doubles each time."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
_JITTER = 0.2

_DESCENDANTS_S = 5.0
"""Seconds to wait for the descendants of a dead process after SIGKILL, which may take effect late on a busy machine."""
_LAST_LINES = 200
"""Number of output lines in which the cause of a crash is searched."""
_REFERS_ABOVE = re.compile(r"\b[Ss]ee (the )?(root cause|stack trace|error|traceback)\b.*\babove\b")
_LONGEST_LINE = 2**20
_LONGEST_CAUSE = 200
_ERROR = re.compile(
    r"\b(ERROR|CRITICAL|Fatal)\b|^[\w.]*(Error|Exception|Taken|Failed): |: error: |^python\S* -m |"
    r"^(renderer|trainer|gateway): "
)
_IGNORED_EXCEPTION = "Exception ignored in"
"""Start of Python's message, with a traceback, about an exception in a destructor or similar. It is harmless."""
_TIME_AND_LEVEL = re.compile(r"^[\d:.]+ (ERROR|CRITICAL) +")
_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
"""Signals sent from outside the process; its output does not explain them."""
KILL_NAMES = frozenset(end.name for end in _EXTERNAL_SIGNALS)
"""Names of these signals, as `Service.run` reports them."""


MODEL_SEPARATOR = "-"
"""Separates the kind of a service from its base model in the name of the service, except for the default model."""


def kind_of(name: str) -> str:
    """Returns renderer, sampler, trainer or gateway for a service name such as `sampler2-teacher`."""
    return name.partition(MODEL_SEPARATOR)[0].rstrip("0123456789")


@dataclass(frozen=True)
class ServiceSpec:
    """Command line, address and environment of one service.

    Attributes:
        name: Name in the log.
        arguments: Command line after `python`.
        address: host:port of its gRPC server.
        health_name: Full gRPC service name for health checks.
        environment: Variables added to the environment.
        metrics_port: Port of its Prometheus metrics.
        temporary_dir: Folder for temporary files. It is removed after the service and its descendants have ended, and
            again before each start, because a killed process leaves files behind. The parent folder is private to this
            user. Empty for the system's default.
        starts_after: Name of a service that must pass its health check before this one goes on; empty for none. Its
            process imports meanwhile: its standard input stays open until then (`processes.wait_for_turn`).
    """

    name: str
    arguments: tuple[str, ...]
    address: str
    health_name: str
    metrics_port: int
    environment: dict[str, str] = field(default_factory=dict)
    temporary_dir: str = ""
    starts_after: str = ""

    @property
    def kind(self) -> str:
        """The kind of service: renderer, sampler, trainer or gateway."""
        return kind_of(self.name)


class ServiceFailed(Exception):
    """A service did not start."""


class Service:
    """A child process that restarts when it dies, until `stop` is called.

    Args:
        spec: The service to run.
        on_line: Called with (service name, line) for each line of output.
    """

    def __init__(self, spec: ServiceSpec, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False
        self._pauses = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, jitter=_JITTER)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        # Wall-clock times, which `fovea status` can compare with its own.
        self._started_at = self._starts_again_at = 0.0
        self._serves_since: float | None = None
        self._must_wait, self._gate = bool(spec.starts_after), -1
        self.restarts, self._last_end = 0, ""

    @property
    def pid(self) -> int | None:
        """Process id; None while the service is down."""
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def state(self) -> dict[str, Any]:
        """State for `fovea status`: pid, times in seconds since the epoch, restarts, cause of the last end."""
        return {
            "pid": self.pid,
            "started_at": self._started_at,
            "restarts": self.restarts,
            "last_end": self._last_end,
            "starts_again_at": self._starts_again_at if self.pid is None else None,
        }

    async def run(self, on_end: Callable[[str, str, float], None], on_start: Callable[[], None]) -> None:
        """Runs the process and restarts it whenever it dies, until `stop` is called.

        There is no limit on restarts: the other services hold state that would be lost if Fovea stopped.

        Args:
            on_end: Called with the service's name, the cause of the end, and the seconds until the restart. An
                exception from it ends the run.
            on_start: Called after each start.
        """
        while not self._stopping:
            how = await self._run_once(on_start)
            if self._stopping:
                return
            if self._serves_since is not None and time.monotonic() - self._serves_since >= STEADY_S:
                self._pauses.reset()
            self._serves_since = None
            self._last_end = how
            self._starts_again_at = time.time() + self._pauses.next_s
            on_end(self.spec.name, how, self._pauses.next_s)
            await self._pauses.pause()
            self.restarts += 1

    def let_go_on(self) -> None:
        """Ends the wait of `processes.wait_for_turn` in the process, now and after each restart."""
        self._must_wait = False
        self._close_gate()

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def note_serving(self) -> None:
        """Records that the service passed its health check; uptime is measured from here."""
        self._serves_since = time.monotonic()

    async def stop(self, timeout_s: float) -> None:
        """Terminates the process; kills it after `timeout_s` seconds. Then kills the descendants that are left."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            await self._remove_temporary_dir()  # `run` may be cancelled before it removes the folder
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self._on_line(self.spec.name, f"did not end within {timeout_s:.0f} s; killing it")
        await self._clean_up(process)

    async def _run_once(self, on_start: Callable[[], None]) -> str:
        """Runs the process once. Returns the signal or exit code with which it ended, and the cause if known."""
        self._last_lines.clear()
        try:
            process = await self._start()
        except OSError as error:  # the machine is out of memory, processes or files, which may pass
            return f"a failed start ({error})"
        if self._stopping:  # `stop` was called while the process was starting
            await self.stop(0.0)
        on_start()
        code = await process.wait()
        await self._clean_up(process)
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"{how} ({cause})" if -code not in _EXTERNAL_SIGNALS and (cause := self._cause()) else how

    def _cause(self) -> str:
        """Returns the last output line that reports an error, or else the last line; empty if there is no output."""
        lines = [line for line in self._last_lines if line.strip()]
        of_errors, is_ignored = [], False
        for line in lines:
            is_ignored |= line.startswith(_IGNORED_EXCEPTION)
            if _ERROR.search(line) and not _REFERS_ABOVE.search(line):
                if not is_ignored:
                    of_errors.append(line)
                is_ignored = False
        found = (of_errors or lines or [""])[-1]
        return _TIME_AND_LEVEL.sub("", found).strip()[:_LONGEST_CAUSE]

    async def _start(self) -> asyncio.subprocess.Process:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", SUPERVISED: "1"} | SAFE_PATH
        environment |= self.spec.environment
        if self.spec.temporary_dir:
            await self._remove_temporary_dir()
            self._make_temporary_dir()
            environment["TMPDIR"] = self.spec.temporary_dir
        # Without cached bytecode every process would recompile torch and vllm, which takes 20 s instead of 8 s.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.pop(FORK_SUPPORT, None)
        environment |= {FORK_SUPPORT: GIVEN_FORK_SUPPORT} if GIVEN_FORK_SUPPORT is not None else {}
        # Use a pipe of our own: with asyncio's pipe, `wait` would not return until orphaned descendants close it.
        reading, writing = os.pipe()
        waiting = asyncio.subprocess.DEVNULL
        try:
            if self._must_wait:
                waiting, self._gate = os.pipe()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self.spec.arguments,
                stdin=waiting,
                stdout=writing,
                stderr=writing,
                env=environment,
                # The service gets its own session, so Ctrl-C reaches only the supervisor, which then stops the services
                # in order.
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except BaseException:
            os.close(reading)
            self._close_gate()
            raise
        finally:
            os.close(writing)
            if waiting >= 0:
                os.close(waiting)
        self._started_at = time.time()
        self._reader = asyncio.create_task(self._read(reading))
        return self._process

    async def _read(self, descriptor: int) -> None:
        stream = asyncio.StreamReader(limit=_LONGEST_LINE)
        with os.fdopen(descriptor, "rb") as pipe:
            protocol = asyncio.StreamReaderProtocol(stream)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
            rest = b""
            # Do not use readline, which fails on lines above its limit. A pipe that is not read blocks the process that
            # writes to it.
            while piece := await stream.read(2**16):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._record_line(line)
            if rest:
                self._record_line(rest)

    async def _clean_up(self, process: asyncio.subprocess.Process) -> None:
        """Kills the descendants of an ended process, reads the rest of its output and removes its temporary files."""
        self._close_gate()
        self._kill_group(process.pid)  # descendants that outlive the process would hold its ports
        await process.wait()
        assert self._reader is not None
        # The pipe reaches its end when all descendants have closed it. A descendant that left the group may hold it
        # much longer.
        await asyncio.wait({self._reader}, timeout=_DESCENDANTS_S)
        await self._remove_temporary_dir()

    def _make_temporary_dir(self) -> None:
        shared = Path(self.spec.temporary_dir).parent
        shared.mkdir(mode=0o700, exist_ok=True)
        # Another user can guess the name and create it in the shared temporary folder.
        if shared.lstat().st_uid != os.getuid():
            raise PermissionError(f"{shared} belongs to another user; set TMPDIR to a folder of your own")
        os.mkdir(self.spec.temporary_dir)

    async def _remove_temporary_dir(self) -> None:
        """Removes the folder.

        Retries for some seconds, because a process that is just ending may still create files there.
        """
        deadline = time.monotonic() + _DESCENDANTS_S
        while self.spec.temporary_dir and not _remove(Path(self.spec.temporary_dir)):
            if time.monotonic() > deadline:
                self._on_line(self.spec.name, f"could not remove the temporary files in {self.spec.temporary_dir}")
                return
            await asyncio.sleep(0.05)

    def _record_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._last_lines.append(text)
        self._on_line(self.spec.name, text)

    @staticmethod
    def _kill_group(pid: int) -> None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _remove(folder: Path) -> bool:
    """Tries to remove a folder. Returns True if it no longer exists."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
