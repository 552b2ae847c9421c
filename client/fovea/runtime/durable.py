"""Protects stored data: fsync of files and folders, errors for full disks, and a clock for deleting expired data.

Files, folders and names survive a power cut after fsync. The clock ignores jumps of the wall clock, so that a wrong
time deletes nothing permanently.
"""

import errno
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from fsspec.implementations.local import LocalFileSystem

from fovea.wire.errors import DiskFull

PIECE_BYTES = 32 * 2**20
"""The size of a piece of a `SteadyFile`; at most two wait in memory for the disk. Beside a write of 0.8 GB, the longest
commit took 0.07 to 0.11 s instead of 0.18 to 0.41 without pieces, and the write as long (`benchmarks.steady_files`).
"""
_SLICE_BYTES = 2**18
"""Data of one write: it is still in the processor's cache when it is written after its sum, and on ext4 a large write
beside a sync of the same file takes longer.
"""
_WITHOUT_NAMES = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
"""Errors of file systems that cannot sync folders, and of parent folders that this user may not open."""


def is_full_disk(error: BaseException) -> bool:
    """Returns whether an error means that a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def naming_full_disk(place: str) -> Iterator[None]:
    """Replaces an error about a full disk with DiskFull, which names `place`, a path or URL.

    Also replaces errors that a full disk caused indirectly: closing an archive after a failed write may fail once more.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not is_full_disk(cause):
            cause = cause.__context__
        if cause is None:
            raise
        raise DiskFull(
            f"the disk of {place} is full, so nothing was stored there; delete checkpoints or enlarge the disk, then "
            "retry the request",
            place=place,
        ) from error


class SteadyFile:
    """Sends the data of a file to the disk in pieces, while it is written. Files that are not on a disk are unaffected.

    Otherwise a large file stays in memory until its fsync, which sends all of it at once. On ext4 each fsync of another
    file on that disk waits for it, such as the gateway's commits. A thread syncs one piece while the next is written.
    Close the file, or leave its context: only then is the last sync over.

    Args:
        file: A buffered binary file that is open for writing. It is closed with this one.
        is_summed: True to compute `checksum`.
    """

    def __init__(self, file: Any, is_summed: bool = False) -> None:
        self._file, self._is_summed = file, is_summed
        self.checksum = 0
        """CRC-32 of the data."""
        self._waiting_bytes = 0
        self._thread = ThreadPoolExecutor(1, "steady file")
        self._syncing: Future[None] | None = None
        try:
            self._descriptor: int | None = file.fileno()
        except (AttributeError, OSError):
            self._descriptor = None

    def write(self, data: bytes | memoryview) -> int:
        """Writes the data. Returns its size in bytes.

        Raises:
            OSError: A piece could not be written, or an earlier one not synced.
        """
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            part = view[at : at + min(_SLICE_BYTES, PIECE_BYTES - self._waiting_bytes)]
            if self._is_summed:
                self.checksum = zlib.crc32(part, self.checksum)
            self._file.write(part)
            at += len(part)
            self._waiting_bytes += len(part)
            if self._waiting_bytes == PIECE_BYTES:
                self._begin_sync()
        return len(view)

    def close(self) -> None:
        """Waits for the last sync and closes the file. Raises OSError if the sync or the close failed."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self._file.close()

    def _begin_sync(self) -> None:
        self._waiting_bytes = 0
        if self._descriptor is not None:
            self._file.flush()
            self._wait()
            self._syncing = self._thread.submit(os.fdatasync, self._descriptor)

    def _wait(self) -> None:
        if self._syncing is not None:
            self._syncing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def sync_folder(files: Any, path: str) -> None:
    """Syncs all files of a folder and its name to disk. Raises OSError on failure.

    Args:
        files: fsspec file system of the folder. Remote ones are skipped: they store what they have acknowledged.
        path: Absolute path of the folder.
    """
    if not isinstance(files, LocalFileSystem):
        return
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(os.path.join(folder, name))
        _sync_names(folder)
    sync_place(files, path)


def sync_place(files: Any, path: str) -> None:
    """Syncs the name of a file or folder, and the names of all its parents."""
    if isinstance(files, LocalFileSystem):
        sync_name(path)


def sync_name(path: str) -> None:
    """Does the same as `sync_place` for an absolute path on this machine."""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
        _sync_names(path)


def _sync_names(folder: str) -> None:
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _WITHOUT_NAMES:
            raise


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


logger = logging.getLogger(__name__)

_JUMP_S = 60.0
_BELIEVED_AFTER_S = 86400.0


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # includes time asleep and cannot be set


class ExpiryClock:
    """A wall clock that ignores jumps ahead: after one, it continues from the old time until the jump has lasted a day.

    Args:
        wall: Returns seconds since the epoch; may jump.
        steady: Returns seconds since an arbitrary moment; never jumps.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _since_boot) -> None:
        self._wall, self._steady = wall, steady
        self._offset_s = wall() - steady()
        self._jumped_at: float | None = None

    def now(self) -> float:
        """Returns seconds since the epoch: the earlier of wall clock and own clock, unless a jump has lasted a day."""
        steady = self._steady()
        own, wall = self._offset_s + steady, self._wall()
        if wall - own <= _JUMP_S:
            self._jumped_at = None
            if own - wall <= _JUMP_S:  # small corrections, such as those of NTP
                self._offset_s = wall - steady
            return min(own, wall)
        if self._jumped_at is None:
            self._jumped_at = steady
            logger.error(
                "the system clock jumped ahead by %.0f s; for one day nothing expires because of it; set "
                "the clock right",
                wall - own,
            )
        elif steady - self._jumped_at > _BELIEVED_AFTER_S:
            self._offset_s, self._jumped_at = wall - steady, None
            return wall
        return own


def room_bytes(folder: Path) -> int:
    """Returns the bytes that a folder can use: the free ones of its disk, and its files. It need not exist yet."""
    place = folder.absolute()
    free = shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists())).free
    used = 0
    for parent, _, names in os.walk(place):
        for name in names:
            with suppress(FileNotFoundError):  # a service of an earlier start may still remove files
                used += (Path(parent) / name).lstat().st_size
    return free + used
