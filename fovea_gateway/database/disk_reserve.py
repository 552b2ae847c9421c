"""A file that reserves some room on the disk of an SQLite database.

Ending sessions and deleting checkpoints frees room, but needs some room itself. The file is deleted when the disk is
full, and created again once there is room; in between, the gateway accepts no new work.
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
    """The reserve file. Any thread may read `is_spent`; the methods belong to the thread that writes the database.

    Args:
        database: The path of the database; empty for PostgreSQL, which has no reserve.
    """

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}.reserve") if database else None
        self.is_spent = False

    def take(self) -> None:
        """Creates the file if twice its size is free. A full disk is not an error, but is logged."""
        if self._path is None or (self._path.exists() and not self.is_spent):
            return
        if self._free_bytes() < 2 * RESERVE_BYTES or not self._make():
            if not self.is_spent:
                logger.error("the disk of %s is full: no new work is accepted", self._path.parent)
            self.is_spent = True
            return
        if self.is_spent:
            logger.info("there is room again on the disk of %s", self._path.parent)
        self.is_spent = False

    def is_full(self, error: sa.exc.DBAPIError) -> bool:
        """Returns whether SQLite found no room. It reports a full quota, or no room for its shared-memory index, as an
        I/O error.
        """
        code = getattr(error.orig, "sqlite_errorcode", 0)
        return code == _SQLITE_FULL or (code & 0xFF == _SQLITE_IOERR and self._free_bytes() < _LEAST_BYTES)

    def give_up(self) -> bool:
        """Deletes the file; returns False if it was deleted before."""
        if self._path is None or self.is_spent:
            return False
        logger.error("the disk of %s is full: the reserve is deleted, and no new work is accepted", self._path.parent)
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
        except OSError as error:  # a quota may leave less room than statvfs reports
            if not is_full_disk(error):
                raise
            self._path.unlink()
            return False
        finally:
            os.close(descriptor)
        return True
