"""Makes the tables, or brings those of an earlier gateway up to date by alembic: a file in `versions` per
revision, which knows the way back too.

A new table needs no revision: `create_all` makes it. Gateways from before alembic read the revision's number in
`schema_version`; it is written there too, so that they go on refusing tables that they do not know.
"""

import logging
from pathlib import Path

import sqlalchemy as sa

from fovea.wire.errors import FailedPrecondition, Internal
from fovea_gateway.database.schema import REVISION, alembic_version, metadata, schema_version

logger = logging.getLogger(__name__)

_OLDEST = 4
"""Back to which `downgrade` leads: files since then know the way back."""


def upgrade(connection: sa.Connection) -> None:
    """Makes or upgrades the tables in the transaction that the connection is in, which the caller commits.

    Raises:
        Internal: The tables are of a revision that is not known, such as that of a later gateway.
    """
    _begin(connection)
    found = find_revision(connection)
    metadata.create_all(connection)
    if found is not None and found != REVISION:
        _run_alembic(connection, found, REVISION)
    _note(connection, REVISION)


def downgrade(connection: sa.Connection, revision: int) -> str:
    """Makes the tables those of an earlier revision, in the same way; returns what they were.

    Tables that came since stay, with what is in them.

    Raises:
        FailedPrecondition: There are no tables, or they cannot become those.
        Internal: They are of a revision that is not known.
    """
    _begin(connection)
    found = find_revision(connection)
    if found is None or not _OLDEST <= revision < int(found):
        raise FailedPrecondition(
            f"it has schema {found or 'none'}, which cannot become {revision}: from here one goes back to schema "
            f"{_OLDEST} at the most"
        )
    _run_alembic(connection, found, str(revision))
    _note(connection, str(revision))
    return found


def find_revision(connection: sa.Connection) -> str | None:
    """The revision of the tables, or None where there are none."""
    for column in (alembic_version.c.version_num, schema_version.c.version):
        if sa.inspect(connection).has_table(column.table.name):
            found = connection.execute(sa.select(column)).scalar()
            if found is not None:
                return str(found)
    return None


def _begin(connection: sa.Connection) -> None:
    if connection.dialect.name == "sqlite":
        # Python's driver begins a transaction only where rows change: each table would be changed by itself.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(sa.text("SET LOCAL statement_timeout = 0"))


def _note(connection: sa.Connection, revision: str) -> None:
    # One or both have no row where the tables are new, or come from a gateway from before alembic.
    connection.execute(sa.delete(alembic_version))
    connection.execute(sa.insert(alembic_version).values(version_num=revision))
    connection.execute(sa.delete(schema_version))
    connection.execute(sa.insert(schema_version).values(version=int(revision)))


def _run_alembic(connection: sa.Connection, found: str, wanted: str) -> None:
    from alembic import command  # 0.13 s of processor time, which a start that migrates nothing is spared
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    try:
        command.stamp(config, found)
    except CommandError:
        raise Internal(
            f"the database has schema {found}, this gateway needs {REVISION}: start a newer gateway, or let that "
            f"one's `fovea downgrade --to {REVISION}` change it"
        ) from None
    logger.info("the database goes from schema %s to %s", found, wanted)
    if int(wanted) > int(found):
        command.upgrade(config, wanted)
    else:
        command.downgrade(config, wanted)
