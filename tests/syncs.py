"""Records the real fsync calls of this process by inode."""

import os
from pathlib import Path

import pytest


class Syncs:
    """Watches `os.fsync` and `os.rename` of this process, which keep their effect.

    Attributes:
        moved: The target of each renamed folder, and its files that had not been synced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kept: set[tuple[int, int, int]] = set()
        self.moved: list[tuple[Path, list[Path]]] = []
        fsync, rename = os.fsync, os.rename

        def watch_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self._kept.add(_state(os.fstat(descriptor)))

        def watch_rename(source: str, target: str) -> None:
            self.moved.append((Path(target), self.missing(Path(source))))
            rename(source, target)

        monkeypatch.setattr(os, "fsync", watch_fsync)
        monkeypatch.setattr(os, "rename", watch_rename)

    def missing(self, folder: Path) -> list[Path]:
        """Returns the folder and its files that have changed since their last sync."""
        return [path for path in (folder, *folder.rglob("*")) if _state(path.stat()) not in self._kept]


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns
