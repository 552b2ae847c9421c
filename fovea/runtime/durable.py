"""Durable writes: fsync of files, folders and names, so that they survive a power cut; and errors for full disks."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from fovea.wire.errors import DiskFull

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
