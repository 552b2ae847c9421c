"""A file that keeps some room free on the disk of an SQLite database.

Ending sessions and deleting checkpoints makes room, but needs some room itself. The file is deleted when the disk is
full, and made again once it is not; in between, the gateway accepts nothing new.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa

from fovea.runtime.durable import is_full_disk

logger = logging.getLogger(__name__)

RESERVE_BYTES = 16 * 2**20
_SQLITE_IOERR, _SQLITE_FULL = 10, 13
_LEAST_BYTES = 2**20


class DiskReserve:
    """The file. `is_spent` may be read by any thread; the methods belong to the one that writes the database.

    Args:
        database: The path of the database; empty for PostgreSQL, which has no reserve here.
    """

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}.reserve") if database else None
        self.is_spent = False

    def take(self) -> None:
        """Makes the file where twice its size is free. A full disk is no error here, but is logged."""
        if self._path is None or (self._path.exists() and not self.is_spent):
            return
        if self._free_bytes() < 2 * RESERVE_BYTES or not self._make():
            if not self.is_spent:
                logger.error("the disk of %s is full: nothing new is accepted", self._path.parent)
            self.is_spent = True
            return
        if self.is_spent:
            logger.info("there is room again on the disk of %s", self._path.parent)
        self.is_spent = False

    def is_full(self, error: sa.exc.DBAPIError) -> bool:
        """Whether SQLite found no room. Of a quota, or its index in shared memory, it says so indirectly."""
        code = getattr(error.orig, "sqlite_errorcode", 0)
        return code == _SQLITE_FULL or (code & 0xFF == _SQLITE_IOERR and self._free_bytes() < _LEAST_BYTES)

    def give_up(self) -> bool:
        """Deletes the file; False if that was done before."""
        if self._path is None or self.is_spent:
            return False
        logger.error("the disk of %s is full: the reserve is given up, nothing new is accepted", self._path.parent)
        with suppress(FileNotFoundError):
            self._path.unlink()
        self.is_spent = True
        return True

    def _free_bytes(self) -> int:
        assert self._path is not None
        free = os.statvfs(self._path.parent)
        return free.f_bavail * free.f_frsize

    def _make(self) -> bool:
        assert self._path is not None
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
        except OSError as error:  # a quota leaves less than the disk has
            if not is_full_disk(error):
                raise
            self._path.unlink()
            return False
        finally:
            os.close(descriptor)
        return True
