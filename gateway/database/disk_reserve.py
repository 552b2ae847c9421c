"""A file that keeps some room free on the disk of an SQLite database.

Ending sessions and deleting checkpoints makes room, but needs some room itself. The file is deleted when the disk is
full, and made again once it is not; in between, the gateway accepts nothing new.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa

logger = logging.getLogger(__name__)

RESERVE_BYTES = 16 * 2**20
_SQLITE_FULL = 13


def is_full(error: sa.exc.DBAPIError) -> bool:
    """Whether SQLite found no room on the disk."""
    return getattr(error.orig, "sqlite_errorcode", None) == _SQLITE_FULL


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
        free = os.statvfs(self._path.parent)
        if free.f_bavail * free.f_frsize < 2 * RESERVE_BYTES:
            if not self.is_spent:
                logger.error("the disk of %s is full: nothing new is accepted", self._path.parent)
            self.is_spent = True
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
        finally:
            os.close(descriptor)
        if self.is_spent:
            logger.info("there is room again on the disk of %s", self._path.parent)
        self.is_spent = False

    def give_up(self) -> bool:
        """Deletes the file; False if that was done before."""
        if self._path is None or self.is_spent:
            return False
        logger.error("the disk of %s is full: the reserve is given up, nothing new is accepted", self._path.parent)
        with suppress(FileNotFoundError):
            self._path.unlink()
        self.is_spent = True
        return True
