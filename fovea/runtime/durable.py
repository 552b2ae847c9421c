"""What a power cut leaves: a file is kept once it was synced, its name once its folder was."""

import errno
import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem

_WITHOUT_NAMES = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
"""File systems that sync no folders, and folders above ours that are not ours to open."""


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
