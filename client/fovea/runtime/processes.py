"""Start, environment, logs and end of a process: fast imports, log lines, and an end together with the parent."""

import ctypes
import gc
import logging
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn, cast

from fovea.runtime import tracing

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # of <linux/prctl.h>

SUPERVISED = "FOVEA_SUPERVISED"
"""Set by `fovea up` for the processes that it starts."""
UNUSED = ("accelerate", "scipy", "sklearn")
"""Packages that transformers imports if it finds them, for features that no service uses: a fifth of all imports."""


@contextmanager
def importing(*without: str) -> Iterator[None]:
    """Disables garbage collection while torch, vLLM and other large packages are imported.

    This saves a quarter of the time: the collector would scan hundreds of thousands of objects again and again and find
    nothing to free. Afterwards the objects are frozen, so later collections skip them.

    Args:
        without: Packages to hide meanwhile, as if they were not installed: slow optional imports that are not needed
            here.
    """
    hidden = [name for name in without if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = cast(ModuleType, None)  # the documented way to make an import fail
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
        for name in hidden:
            del sys.modules[name]


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of Fovea's own processes. `python -m` would import a `random.py` of the user's folder as Python's own."""

_HARMLESS = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ", "HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")


def python_path() -> str:
    """Returns a PYTHONPATH with which another Python process finds the same modules as this one."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def bare_environment(*prefixes: str, **more: str) -> dict[str, str]:
    """Returns an environment without secrets, for a Python process that handles data from tenants.

    Args:
        prefixes: Prefixes of further variables to keep.
        more: Variables to add or override.
    """
    kept = {name: value for name, value in os.environ.items() if name in _HARMLESS or name.startswith(prefixes)}
    return kept | {"PYTHONPATH": python_path()} | SAFE_PATH | more


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when the thread that started it ends. Has an effect on Linux only.

    The signal is SIGKILL, because a draining process may wait forever for a pipe that is no longer read.

    Args:
        parent_pid: Process id of the parent. If the parent died before this call, no signal arrives; this process then
            exits if its parent has another id. None skips that check.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def wait_for_turn(logger: logging.Logger, others: str) -> None:
    """Waits until `fovea up` closes the standard input of this process: it does so once the services that must start
    first are ready. Returns at once in a process that `fovea up` did not start.

    Args:
        logger: Logs the wait, if there is one.
        others: The services that start first, for the log.
    """
    if os.environ.get(SUPERVISED) and not select.select([sys.stdin], [], [], 0.0)[0]:
        logger.info("waiting until %s", others)
        sys.stdin.buffer.read()


def name_process(name: str) -> None:
    """Sets the name of this process in the lists of `ps` and `top`: at most 15 bytes. Has an effect on Linux only."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_NAME, name.encode())


def leave(status: int) -> NoReturn:
    """Ends this process as soon as its last log lines and spans are written.

    It does not wait for threads, because one may be stuck in a collective operation with a dead rank. It does not tear
    down the interpreter either, which takes three seconds with torch and vLLM loaded.
    """
    tracing.shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# Terminal control characters, line separators, characters that reverse text, and lone surrogates.
_UNPRINTABLE = (*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*_UNPRINTABLE, *range(0xD800, 0xE000))}


_MOST_BYTES = 256 * 2**10
_MOST_CHARACTERS = 4096
MOST_LINES = 1000
"""The lines that one call may return."""
_ENTRY_BYTES = 200


@dataclass(eq=False)
class LogLine:
    """An entry of the log.

    Attributes:
        at: Seconds since 1970.
        level: The level, as `logging` numbers it.
        text: The name of the logger and the message; a traceback adds lines.
        size_bytes: The memory of the entry, about.
        is_clean: Whether secrets have been removed.
    """

    at: float
    level: int
    text: str
    size_bytes: int
    is_clean: bool = False


class LogRing(logging.Handler):
    """A handler that keeps the newest entries in memory.

    Args:
        most_bytes: The memory of the entries, about.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        super().__init__()
        self._most_bytes, self._bytes = most_bytes, 0
        self._lines: deque[LogLine] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        """Adds an entry, and drops the oldest ones above the limit."""
        try:
            text = self.format(record)[:_MOST_CHARACTERS]
        except Exception:
            self.handleError(record)
            return
        self._lines.append(LogLine(record.created, record.levelno, text, len(text) + _ENTRY_BYTES))
        self._bytes += self._lines[-1].size_bytes
        while self._bytes > self._most_bytes and len(self._lines) > 1:
            self._bytes -= self._lines.popleft().size_bytes

    def newest(self, clean: Callable[[str], str], least_level: int, text: str, most: int) -> list[LogLine]:
        """Returns the newest matching entries in the order of their times. Blocks for about 0.3 ms per new entry.

        Args:
            clean: Removes secrets from a text. The search sees only texts without them, so that it cannot guess one.
            least_level: The least level.
            text: A text that an entry contains, compared without case; empty for all.
            most: The maximum number of entries.
        """
        with self.lock:  # type: ignore[union-attr]
            lines = list(self._lines)
        wanted = text.casefold()
        found: list[LogLine] = []
        for line in reversed(lines):
            if len(found) >= most:
                break
            if line.level < least_level:
                continue
            if not line.is_clean:
                line.text, line.is_clean = clean(line.text), True
            if wanted in line.text.casefold():
                found.append(line)
        return found[::-1]


RECENT = LogRing()
"""The entries of this process, once `configure_logging` has been called."""


def configure_logging(service: str, level: str = "INFO") -> None:
    """Sends all logs of this process to standard error, each line with the service's name, and keeps the newest."""
    handler = logging.StreamHandler(sys.stderr)
    # `fovea up` adds the name to every line itself.
    name = "" if os.environ.get(SUPERVISED) else f"{service:<8} "
    handler.setFormatter(
        _OneLine(f"%(asctime)s.%(msecs)03d {name}%(levelname)-7s %(name)s:%(trace)s %(message)s", "%H:%M:%S")
    )
    RECENT.setFormatter(_OneLine("%(name)s:%(trace)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler, RECENT]
    for one in root.handlers:
        one.addFilter(_note_trace)
    root.setLevel(level)
    for chatty in ("httpx", "urllib3", "asyncio", "alembic", "uvicorn.error"):
        logging.getLogger(chatty).setLevel("WARNING")


class _OneLine(logging.Formatter):
    """A formatter that writes each message as one line, and indents tracebacks so that they cannot fake messages."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in `logging`
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {line.translate(_ESCAPES)}" for line in lines)


def _note_trace(record: logging.LogRecord) -> bool:
    """Adds the field `trace` to a record. Returns true, so the record is logged."""
    trace_id = tracing.trace_id()
    record.trace = f" trace={trace_id}" if trace_id else ""
    return True
