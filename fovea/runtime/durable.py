"""What a power cut leaves (a synced file, the name of one whose folder was synced), and what a full disk says."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from fovea.wire.errors import DiskFull

_WITHOUT_NAMES = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
"""File systems that sync no folders, and folders above ours that are not ours to open."""


def is_full_disk(error: BaseException) -> bool:
    """Whether an error says that a disk, or somebody's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def naming_full_disk(place: str) -> Iterator[None]:
    """Raises DiskFull that names a path or URL, instead of an error that says that its disk is full.

    Also instead of one that came of that: what writes an archive may fail once more when it closes it.
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
            f"the disk of {place} is full, and nothing was kept there: delete checkpoints or have it made larger, then "
            "send this again",
            place=place,
        ) from error


def sync_folder(files: Any, path: str) -> None:
    """Has the disk keep all that is in a folder, and its own name. Raises OSError if it cannot.

    Args:
        files: Its fsspec file system. Those that are not this machine's keep what they have acknowledged.
    """
    if not isinstance(files, LocalFileSystem):
        return
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(os.path.join(folder, name))
        _sync_names(folder)
    sync_place(files, path)


def sync_place(files: Any, path: str) -> None:
    """Has the disk keep the name of a file or folder, and that of every folder above."""
    if isinstance(files, LocalFileSystem):
        sync_name(path)


def sync_name(path: str) -> None:
    """The same for an absolute path on this machine."""
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
