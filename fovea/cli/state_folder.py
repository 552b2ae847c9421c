"""The folder of one `fovea up`: what runs there, in `up.json`, and a lock that ends with the process."""

import fcntl
import json
import os
import pathlib
from typing import Any


class FolderTaken(Exception):
    """Another `fovea up` runs in the folder."""


class StateFolder:
    """Whoever holds it writes `up.json`, and is alone to remove it."""

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
