"""The database of one world: real SQLite files that outlive the gateway, on a disk that may be full."""

import asyncio
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from chaos.inventory import Finish, Inventory
from fovea_gateway.database.database import Database

_ROOMY = 2**34
_PAGE_LIMIT = 2**30


class DatabaseFiles:
    """The database files, and the space left for them.

    Args:
        folder: An empty folder.
        template: A database that already has its tables.
    """

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder = folder
        self.path = folder / "gateway.db"
        self._reserve = folder / "gateway.db.reserve"
        self._is_full = False
        shutil.copy(template, self.path)

    def fill(self) -> None:
        """Fills the disk except for the reserve."""
        self._is_full = True

    def make_room(self) -> None:
        """Frees the disk."""
        self._is_full = False

    def free_bytes(self) -> int:
        """Free bytes, as `statvfs` reports them."""
        return 0 if self._is_full else _ROOMY

    def limit(self, connection: sa.Connection) -> None:
        """Limits a connection before each transaction, so that SQLite itself reports a full disk."""
        is_limited = self._is_full and self._reserve.exists()
        if is_limited or "is_limited" in connection.info:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one() if is_limited else _PAGE_LIMIT
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
            connection.info["is_limited"] = True

    def ledger(self, scopes: Iterable[str]) -> list[Finish]:
        """Returns how the commands of these models ended."""
        query = "SELECT scope, seq_id, kind, state, finish_number FROM futures WHERE scope = ? ORDER BY seq_id"
        return [Finish(*row) for scope in scopes for row in self.read(query, scope)]

    def rows(self) -> Inventory:
        """Returns the number of rows of each table."""
        tables = [name for (name,) in self.read("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return Inventory({f"rows of {table}": self.read(f'SELECT count(*) FROM "{table}"')[0][0] for table in tables})

    def read(self, query: str, *values: str) -> list[Any]:
        """Returns the rows of a query of the checker."""
        with closing(sqlite3.connect(self.path)) as database:
            return database.execute(query, values).fetchall()

    def write(self, statement: str, *values: str) -> None:
        """Runs a statement of another process. Does nothing if the disk is full, as a command that fails."""
        with closing(sqlite3.connect(self.path)) as database, suppress(sqlite3.OperationalError), database:
            database.execute(statement, values)


def make_template(path: Path) -> Path:
    """Creates a database with its tables."""

    async def make() -> None:
        database = Database(f"sqlite:///{path}")
        await database.open()
        await database.close()

    asyncio.run(make())
    for suffix in ("reserve", "lock"):
        Path(f"{path}.{suffix}").unlink()
    return path
