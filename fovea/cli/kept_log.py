"""The log of `fovea up`: the output of all services, stored in the state folder with a size limit, for `fovea logs`."""

import os
import pathlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

from fovea.cli.service import kind_of

MOST_BYTES = 32 * 2**20
_PAUSE_S = 0.2


def log_folder(state_dir: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the log files."""
    return state_dir / "logs"


class KeptLog:
    """A log of two files: when the current file reaches half the size limit, it replaces the older one.

    Args:
        folder: Folder of the log files, used for nothing else.
        most_bytes: Size limit of both files together, exceeded by one line at most.
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
