"""One service process under `fovea up`: started, followed, restarted, stopped."""

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

from fovea.runtime.children import die_with_parent
from fovea.runtime.tasks import Backoff

STEADY_S = 60.0
"""A process that served this long starts again at once when it dies; the pause doubles for one that did not."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
_JITTER = 0.2

_LAST_WORDS_S = 5.0  # for what a process has started to end with it: SIGKILL is sent, but a busy machine takes its time
_LAST_LINES = 200  # of what a process prints: where its cause of death is looked for
_POINTS_UPWARDS = re.compile(r"\b[Ss]ee (the )?(root cause|stack trace|error|traceback)\b.*\babove\b")
_LONGEST_LINE = 2**20
_LONGEST_CAUSE = 200
_ERROR = re.compile(r"\b(ERROR|CRITICAL|Fatal)\b|^[\w.]*(Error|Exception|Taken|Failed): |: error: |^python\S* -m ")
_AFTERTHOUGHT = "Exception ignored in"
"""Python's word, with a traceback behind it, for what an object raised that was thrown away: of no consequence."""
_TIME_AND_LEVEL = re.compile(r"^[\d:.]+ (ERROR|CRITICAL) +")
_SILENT_ENDS = (signal.SIGKILL, signal.SIGTERM)
"""Sent from outside: nothing that the process has printed says why."""
KILLS = frozenset(end.name for end in _SILENT_ENDS)
"""How a process ended that somebody else ended, as `Service.run` tells it."""


OF_MODEL = "-"
"""In a service's name, between its kind and the base model that it is for, if that is not the default one."""


def kind_of(name: str) -> str:
    """renderer, sampler, trainer or gateway, of a service's name such as `sampler2-teacher`."""
    return name.partition(OF_MODEL)[0].rstrip("0123456789")


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
        temporary_dir: For its temporary files, removed once it has ended, with all that it had started, and again
            before it starts: a killed process leaves some. Made in a folder that is this user's alone. Empty for the
            system's.
        starts_after: Name of a service that must have served before this one is started; empty for none.
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
        """renderer, sampler, trainer or gateway."""
        return kind_of(self.name)


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
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False
        self._pauses = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, jitter=_JITTER)
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._started_at = self._starts_again_at = 0.0  # by the wall clock, which `fovea status` has too
        self._serves_since: float | None = None
        self.restarts, self._last_end = 0, ""

    @property
    def pid(self) -> int | None:
        """Process id, None while it is down."""
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def state(self) -> dict[str, Any]:
        """What `fovea status` shows: pid, times in seconds since the epoch, restarts, how it ended the last time."""
        return {
            "pid": self.pid,
            "started_at": self._started_at,
            "restarts": self.restarts,
            "last_end": self._last_end,
            "starts_again_at": self._starts_again_at if self.pid is None else None,
        }

    async def run(self, on_end: Callable[[str, str, float], None], on_start: Callable[[], None]) -> None:
        """Keeps the process running until `stop`, however often it dies: others hold what would be lost with them.

        Args:
            on_end: Called with the service's name, how it ended, and the seconds until it is started again. What it
                raises ends the run.
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

    def note_serving(self) -> None:
        """It answers its health check: from now on it counts as well."""
        self._serves_since = time.monotonic()

    async def stop(self, timeout_s: float) -> None:
        """Asks the process to end, and after `timeout_s` kills it with everything it started."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            await self._remove_temporary_dir()  # what `run` has begun, which may be cancelled now
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self._on_line(self.spec.name, f"did not end within {timeout_s:.0f} s and is killed")
        await self._clear_up(process)

    async def _run_once(self, on_start: Callable[[], None]) -> str:
        """One life of the process; returns how it ended, and of what."""
        self._last_lines.clear()
        try:
            process = await self._start()
        except OSError as error:  # no memory, processes or files left on this machine: that passes
            return f"a failed start ({error})"
        if self._stopping:  # told so between the decision and the start
            await self.stop(0.0)
        on_start()
        code = await process.wait()
        await self._clear_up(process)
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"{how} ({cause})" if -code not in _SILENT_ENDS and (cause := self._cause()) else how

    def _cause(self) -> str:
        """The last line that speaks of an error, or else the last line; empty if there is none."""
        lines = [line for line in self._last_lines if line.strip()]
        of_errors, is_afterthought = [], False
        for line in lines:
            is_afterthought |= line.startswith(_AFTERTHOUGHT)
            if _ERROR.search(line) and not _POINTS_UPWARDS.search(line):
                if not is_afterthought:
                    of_errors.append(line)
                is_afterthought = False
        found = (of_errors or lines or [""])[-1]
        return _TIME_AND_LEVEL.sub("", found).strip()[:_LONGEST_CAUSE]

    async def _start(self) -> asyncio.subprocess.Process:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "FOVEA_SUPERVISED": "1"} | self.spec.environment
        if self.spec.temporary_dir:
            await self._remove_temporary_dir()
            self._make_temporary_dir()
            environment["TMPDIR"] = self.spec.temporary_dir
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
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._started_at = time.time()
        self._reader = asyncio.create_task(self._read(reading))
        return self._process

    async def _read(self, descriptor: int) -> None:
        stream = asyncio.StreamReader(limit=_LONGEST_LINE)
        with os.fdopen(descriptor, "rb") as pipe:
            protocol = asyncio.StreamReaderProtocol(stream)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
            rest = b""
            # Not readline, which fails at a line above its limit: a pipe that nobody reads stops who writes into it.
            while piece := await stream.read(2**16):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._note_line(line)
            if rest:
                self._note_line(rest)

    async def _clear_up(self, process: asyncio.subprocess.Process) -> None:
        """After the end of a process: that of all it had started, then its temporary files."""
        self._kill_group(process.pid)  # children that outlive their parent would hold its ports
        await process.wait()
        assert self._reader is not None
        # All of them hold the pipe, which ends with the last one. One that left the group may go on for long.
        await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)
        await self._remove_temporary_dir()

    def _make_temporary_dir(self) -> None:
        shared = Path(self.spec.temporary_dir).parent
        shared.mkdir(mode=0o700, exist_ok=True)
        if shared.lstat().st_uid != os.getuid():  # in a folder for all: its name can be guessed
            raise PermissionError(f"{shared} belongs to another user: set TMPDIR to a folder of your own")
        os.mkdir(self.spec.temporary_dir)

    async def _remove_temporary_dir(self) -> None:
        """Tries again for some seconds: somebody who is just ending may still make files there."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self.spec.temporary_dir and not _remove(Path(self.spec.temporary_dir)):
            if time.monotonic() > deadline:
                self._on_line(self.spec.name, f"temporary files in {self.spec.temporary_dir} cannot be removed")
                return
            await asyncio.sleep(0.05)

    def _note_line(self, line: bytes) -> None:
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
    """Whether nothing is left of it."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
