"""Room on the disk of an SQLite database, kept for the day on which there is no other.

Ending sessions and deleting checkpoints frees room, and needs some first. Given up when the disk is full, taken again
when it is not; meanwhile nothing new should be accepted.
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
    """A file beside the database. Any thread may ask; one thread at a time gives up or takes.

    Args:
        database: The database's file; empty for a database that is elsewhere, which has no reserve and needs none.
    """

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}.reserve") if database else None
        self.is_spent = False

    def take(self) -> None:
        """Takes the room, if it is there and as much again. A full disk is no error: it is said in the log."""
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
        """Frees the room; False if that was done before."""
        if self._path is None or self.is_spent:
            return False
        logger.error("the disk of %s is full: the reserve is given up, nothing new is accepted", self._path.parent)
        with suppress(FileNotFoundError):
            self._path.unlink()
        self.is_spent = True
        return True
