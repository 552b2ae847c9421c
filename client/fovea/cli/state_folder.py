"""The state folder of `fovea up`: its lock and `up.json`, its log, and how other commands find and use it."""

import fcntl
import json
import os
import pathlib
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from fovea.cli.service import kind_of
from fovea.runtime.processes import SAFE_PATH

PUBLISHED_KEY = "tml-local"
DEFAULT_STATE_DIR = pathlib.Path(".fovea")
FAILED, MISUSED = 1, 2
"""Exit codes. MISUSED (2) means that the command line is wrong or cannot work in the current state of the machine."""
_DATABASE_VARIABLES = ("FOVEA_GATEWAY_STATE_DIR", "FOVEA_GATEWAY_DATABASE_URL")

ApiKey = Annotated[
    str,
    typer.Option(
        envvar="TINKER_API_KEY", help="API key; a key of scope admin reaches every owner. Prefer the variable."
    ),
]
StateDir = Annotated[pathlib.Path, typer.Option(help="Folder of this Fovea: database, checkpoints, logs, up.json.")]
MOST_BYTES = 32 * 2**20
_PAUSE_S = 0.2
_ENDLESS = 10_000


class FolderTaken(Exception):
    """Another `fovea up` runs in the folder."""


class StateFolder:
    """The folder of one `fovea up`: its state in `up.json`, and a lock that is released when the process ends.

    Only the holder of the lock writes and removes `up.json`.
    """

    LOCK = "up.lock"

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file = path / "up.json"
        self._lock: int | None = None

    def hold(self, base_url: str) -> None:
        """Makes the folder and locks it until this process ends. Does nothing if this object holds the lock already.

        Raises:
            FolderTaken: Another process holds the lock; the message names it.
        """
        if self._lock is not None:
            return
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._path / self.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 1000, 0).decode(errors="replace").strip()
            os.close(lock)
            raise FolderTaken(
                f"another `fovea up` runs in {self._path}: {owner or 'it is just starting'}. Stop it, or start this "
                "one with its own folder and ports: --state-dir, --port, --grpc-port"
            ) from None
        self._lock = lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()}, {base_url}\n".encode(), 0)

    def holder(self) -> int | None:
        """Returns the id of the process that holds the lock; None if there is none or its id is not written yet.

        A killed process does not hold the lock, even if its files are still in the folder.
        """
        try:
            lock = os.open(self._path / self.LOCK, os.O_RDWR)
        except FileNotFoundError:
            return None
        with open(lock) as file:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                said = file.read()
                # The holder has the lock but has not written its id yet.
                return int(said.split()[1].rstrip(",")) if said else None
        return None

    @property
    def url(self) -> str:
        """Address that the last holder of the lock wrote into it; empty if it is not written yet."""
        try:
            return (self._path / self.LOCK).read_text().rpartition(" ")[2].strip()
        except OSError:
            return ""

    def write(self, state: dict[str, Any]) -> None:
        """Writes `up.json` atomically."""
        temporary = self._file.with_suffix(".tmp")
        with open(temporary, "w", opener=_for_its_user_alone) as file:
            json.dump(state, file, indent=2)
        temporary.rename(self._file)

    def release(self) -> None:
        """Removes `up.json` and releases the lock."""
        self._file.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _for_its_user_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def log_folder(state_dir: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the log files."""
    return state_dir / "logs"


class ServiceLog:
    """A log of two files: when the current file reaches half the size limit, it replaces the older one.

    Args:
        folder: Folder of the log files, used for nothing else.
        most_bytes: Size limit of both files together. Each file may exceed its half by one line.
    """

    def __init__(self, folder: pathlib.Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._half = folder / "fovea.log", most_bytes // 2
        folder.mkdir(mode=0o700, exist_ok=True)  # the log may contain prompts
        self._file = self._path.open("a", encoding="utf-8", errors="replace")

    def write(self, service: str, line: str) -> None:
        """Appends a line with a timestamp. Raises OSError if the disk is full."""
        if self._file.tell() > self._half:
            self._file.close()
            self._path.replace(_put_aside(self._path))
            self._file = self._path.open("a", encoding="utf-8", errors="replace")
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {service:>8} │ {line}\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def newest_lines(folder: pathlib.Path, service: str, count: int) -> list[str]:
    """Returns the newest `count` lines, oldest first.

    Args:
        service: A service such as `sampler2`, a kind such as `sampler` for all services of it, or empty for all.
    """
    kept: deque[str] = deque(maxlen=count)
    path = folder / "fovea.log"
    for each in (_put_aside(path), path):
        if each.exists():
            with each.open(encoding="utf-8", errors="replace") as file:
                kept.extend(line.rstrip("\n") for line in file if _is_of(line, service))
    return list(kept)


def services_in(folder: pathlib.Path) -> list[str]:
    """Returns the names of the services with lines in the log, sorted."""
    return sorted({_service_of(line) for line in newest_lines(folder, "", 10**9)} - {""})


def follow(folder: pathlib.Path, service: str, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yields new lines of a service as they are written, until `is_over` returns true and all lines are read."""
    path = folder / "fovea.log"
    file = path.open(encoding="utf-8", errors="replace")
    file.seek(0, 2)
    begun = ""
    while True:
        ends = is_over()  # evaluated before the last read, so that no line is missed
        for piece in iter(file.readline, ""):
            begun += piece
            if begun.endswith("\n"):
                if _is_of(begun, service):
                    yield begun.rstrip("\n")
                begun = ""
        if _is_replaced(file, path):
            file.close()
            file = path.open(encoding="utf-8", errors="replace")
        elif ends:
            file.close()
            return
        else:
            time.sleep(_PAUSE_S)


def _put_aside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.1")


def _is_replaced(file: TextIO, path: pathlib.Path) -> bool:
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:  # between the two steps of a rotation
        return False


def _service_of(line: str) -> str:
    head, bar, _ = line.partition("│")
    return head.split()[-1] if bar and len(head.split()) == 3 else ""


def _is_of(line: str, service: str) -> bool:
    found = _service_of(line)
    return not service or found == service or kind_of(found) == service


def print_error(message: str, code: int = FAILED) -> int:
    """Prints an error message to stderr and returns the exit code."""
    Console(stderr=True).print(message, soft_wrap=True, markup=False, highlight=False)
    return code


def print_table(table: Callable[[int | None], Table], console: Console | None = None) -> None:
    """Prints a table that `table` makes for a width. A file or a pipe has none (None): its lines have full length."""
    console = console or Console()
    if console.is_terminal:
        console.print(table(console.width))
    else:
        Console(file=console.file, width=_ENDLESS).print(table(None))


def running_folders() -> list[pathlib.Path]:
    """Returns the state folders of all Foveas that this user runs on this machine, sorted.

    They are found by their lock file, which each `fovea up` keeps open.
    """
    found: set[pathlib.Path] = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended or belongs to another user
            if process.stat().st_uid == os.getuid():
                found |= {path.parent for path in _open_files(process) if path.name == StateFolder.LOCK}
    return sorted(folder for folder in found if StateFolder(folder).holder() is not None)


def _open_files(process: pathlib.Path) -> list[pathlib.Path]:
    files: list[pathlib.Path] = []
    for descriptor in os.listdir(process / "fd"):
        with suppress(OSError):  # the file was closed in the meantime
            files.append(pathlib.Path(os.readlink(process / "fd" / descriptor)))
    return files


def folder_in_use(state_dir: pathlib.Path, find: Callable[[], list[pathlib.Path]] = running_folders) -> pathlib.Path:
    """Returns the folder that a command reads: the given one, or the running Fovea's if the default one is missing.

    Prints the folder if it is not the default one. If several Foveas run, the default folder is returned.
    """
    if state_dir != DEFAULT_STATE_DIR or state_dir.exists():
        return state_dir
    running = find()
    if len(running) != 1:
        return state_dir
    print_error(f"--state-dir: {state_dir} does not exist here; using the running Fovea in {running[0]}")
    return running[0]


def running_hint(state_dir: pathlib.Path) -> str:
    """Returns a hint that lists the state folders of other running Foveas; empty if there are none."""
    others = [str(folder) for folder in running_folders() if folder != state_dir.resolve()]
    return f"; running Foveas: --state-dir {' or '.join(others)}" if others else ""


def read_state(state_dir: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of `up.json`. Ends the command if no Fovea runs there or it is not ready yet."""
    state_file = state_dir / "up.json"
    pid = StateFolder(state_dir).holder()
    if pid is None:
        hint = running_hint(state_dir) or "; start one with fovea up"
        raise typer.Exit(print_error(f"--state-dir: no Fovea runs in {state_dir.resolve()}{hint}"))
    if not state_file.exists():
        raise typer.Exit(print_error(f"the Fovea in {state_dir} (process {pid}) is not ready yet; see fovea logs"))
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state


def name_database(find: Callable[[], list[pathlib.Path]] = running_folders) -> None:
    """Sets the running Fovea's folder as the default for commands that open the gateway's database.

    Does nothing if the environment names a database or the default folder contains one. Ends the command if several
    Foveas run.
    """
    if any(os.environ.get(name) for name in _DATABASE_VARIABLES) or (DEFAULT_STATE_DIR / "gateway.db").exists():
        return
    running = find()
    if len(running) > 1:
        words = (
            f"several Foveas run, and there is no database in {DEFAULT_STATE_DIR.resolve()}: choose the database with"
            f" --state-dir {' or '.join(map(str, running))}, or name another folder"
        )
        raise typer.Exit(print_error(words, MISUSED))
    if running:
        os.environ[_DATABASE_VARIABLES[0]] = str(running[0])


def make_first_key(state_dir: pathlib.Path) -> None:
    """Creates and prints an API key of scope admin, for a gateway that needs its first one; or ends the command."""
    options = ("--owner", "admin", "--scope", "admin", "--name", "of the first fovea up", "--state-dir", str(state_dir))
    command = [sys.executable, "-m", "fovea_gateway.access.access_command", "keys", "create", *options]
    made = subprocess.run(command, check=False, env=os.environ | SAFE_PATH)
    if made.returncode:
        raise typer.Exit(
            print_error(
                "an API key is needed because other machines can reach this host, but none could be "
                "created; use --api-key"
            )
        )


def may_have_keys(state_dir: pathlib.Path) -> bool:
    """Returns whether the gateway may already have API keys; without one it refuses to start on a public address."""
    given = ("FOVEA_GATEWAY_API_KEY", "FOVEA_GATEWAY_API_KEY_FILE", _DATABASE_VARIABLES[1])
    return (state_dir / "gateway.db").exists() or any(name in os.environ for name in given)
