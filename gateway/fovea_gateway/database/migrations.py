"""Creates the tables, or migrates those of an earlier gateway with alembic; and `fovea downgrade`. The
functions of each revision are in `revisions`. The revisions after `_OLDEST` can also migrate back.

A new table needs no revision, because `create_all` creates it. Gateways from before alembic read the revision's number
in `schema_version`. The number is written there too, so that those gateways refuse unknown tables.
"""

import argparse
import logging
import time
from collections.abc import Sequence

import sqlalchemy as sa

from fovea.wire.errors import FailedPrecondition, FoveaError, Internal
from fovea_gateway.database.ownership import FileOwnership, Shards, take_all
from fovea_gateway.database.schema import COMMON, REVISION, alembic_version, metadata, schema_version
from fovea_gateway.database.sql_engine import (
    add_state_dir,
    command_url,
    describe,
    make_engine,
    parse_url,
)

logger = logging.getLogger(__name__)

_RELEASE_S = 3.0
_OLDEST = 4
"""The earliest revision that `downgrade` can reach; files from then on can migrate back."""
_FIRST_WITH_SHARDS = 6
_OWN = [table for table in metadata.sorted_tables if table not in COMMON]


def upgrade(connection: sa.Connection, shards: Shards) -> bool:
    """Creates or upgrades the tables in the connection's current transaction, which the caller commits.

    With shards, it creates the missing tables of all of them, and the rest of the transaction sees only those of this
    gateway's shard. Returns False, to be called again later, while the common tables await the gateway of shard 0.

    Raises:
        Internal: The tables have an unknown revision, such as that of a later gateway.
    """
    _begin(connection)
    if shards.schemas and not _make_shards(connection, shards):
        return False
    found = find_revision(connection)
    metadata.create_all(connection, tables=_OWN if shards.number else None)
    if found is not None and found != REVISION:
        _run_alembic(connection, found, REVISION)
    _note(connection, REVISION)
    return True


def _make_shards(connection: sa.Connection, shards: Shards) -> bool:
    shards.hold(connection)
    revisions = []
    for number, schema in enumerate(shards.schemas):
        if not sa.inspect(connection).has_schema(schema):
            connection.execute(sa.schema.CreateSchema(schema))
        _see_alone(connection, schema)
        revisions.append(find_revision(connection))
        if number == 0:
            metadata.create_all(connection)
        elif revisions[-1] is None:
            metadata.create_all(connection, tables=_OWN)
        if revisions[-1] is None:
            _note(connection, REVISION)
    _see_alone(connection, shards.schemas[shards.number])
    return shards.number == 0 or revisions[0] in (None, REVISION)


def _see_alone(connection: sa.Connection, schema: str) -> None:
    """Lets the rest of a transaction see only the tables of one schema, which need not exist yet."""
    quoted = connection.dialect.identifier_preparer.quote_identifier(schema)
    connection.execute(sa.text("SELECT set_config('search_path', :path, true)"), {"path": quoted})


def downgrade(connection: sa.Connection, revision: int, schemas: Sequence[str] = ()) -> str:
    """Migrates the tables back to an earlier revision, in the current transaction; returns the previous revision.

    Tables that were added since remain, with their content.

    Args:
        schemas: The schemas of all shards, by number, in PostgreSQL.

    Raises:
        FailedPrecondition: There are no tables, or they cannot become those of that revision.
        Internal: The tables have an unknown revision.
    """
    _begin(connection)
    found = find_revision(connection)
    if found is None or not _OLDEST <= revision < int(found):
        raise FailedPrecondition(
            f"this database has schema {found or 'none'}, which cannot be downgraded to {revision}: "
            f"{_OLDEST} is the earliest schema to return to"
        )
    _go_back(connection, found, revision)
    for schema in schemas[1:]:
        _see_alone(connection, schema)
        _go_back(connection, find_revision(connection), revision)
    return found


def _go_back(connection: sa.Connection, found: str | None, revision: int) -> None:
    if found is not None and int(found) > revision:
        _run_alembic(connection, found, str(revision))
        _note(connection, str(revision))


def find_revision(connection: sa.Connection) -> str | None:
    """Returns the revision of the tables, or None if there are none."""
    for column in (alembic_version.c.version_num, schema_version.c.version):
        if sa.inspect(connection).has_table(column.table.name):
            found = connection.execute(sa.select(column)).scalar()
            if found is not None:
                return str(found)
    return None


def _begin(connection: sa.Connection) -> None:
    if connection.dialect.name == "sqlite":
        # Python's driver starts transactions only for statements that change rows, so ALTER TABLE would commit at once.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(sa.text("SET LOCAL statement_timeout = 0"))


def _note(connection: sa.Connection, revision: str) -> None:
    # One or both have no row if the tables are new or come from a gateway from before alembic.
    connection.execute(sa.delete(alembic_version))
    connection.execute(sa.insert(alembic_version).values(version_num=revision))
    connection.execute(sa.delete(schema_version))
    connection.execute(sa.insert(schema_version).values(version=int(revision)))


def _run_alembic(connection: sa.Connection, found: str, wanted: str) -> None:
    # Imported late: it takes 0.13 s of CPU, and most starts do not need it.
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    from fovea_gateway.database.revisions import DOWNGRADES, UPGRADES

    if not found.isdecimal():
        raise Internal(f"this database belongs to another program (schema {found}): give the gateway one of its own")
    start, end = int(found), int(wanted)
    if start > max(UPGRADES):
        raise Internal(
            f"this database was created by a newer version of Fovea (schema {found}; this one supports {REVISION}): "
            f"start a newer gateway, or run its `fovea downgrade --to {REVISION}` first"
        )
    logger.info("migrating the database from schema %s to %s", found, wanted)
    with Operations.context(MigrationContext.configure(connection)):
        for number in range(start + 1, end + 1):
            UPGRADES[number]()
        for number in range(start, end, -1):
            DOWNGRADES[number]()


def main() -> None:
    """Runs the command line."""
    arguments = _parse()
    try:
        url = command_url(arguments.state_dir)
        downgrade_database(url.render_as_string(hide_password=False), arguments.to)
    except (FoveaError, sa.exc.DBAPIError) as error:
        raise SystemExit(f"fovea downgrade: {error}") from None


def _take_all_soon(connection: sa.Connection) -> list[str]:
    """Returns the same as `take_all`. A server may release the locks of an ended gateway some moments after its end."""
    give_up_at = time.monotonic() + _RELEASE_S
    while not (schemas := take_all(connection)) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    return schemas


def downgrade_database(url: str, revision: int) -> None:
    """Downgrades a database that no gateway uses.

    Raises:
        FailedPrecondition: A gateway owns a shard of the database, or it cannot be migrated to that schema.
        Internal: A gateway on this machine uses it, or its schema is unknown.
    """
    engine = make_engine(parse_url(url), 1)
    name, file = describe(engine.url), FileOwnership(engine.url.database or "")
    schemas: list[str] = []
    try:
        with engine.connect() as connection:
            with connection.begin():
                if engine.dialect.name == "sqlite":
                    file.take(connection)
                elif not (schemas := _take_all_soon(connection)):
                    raise FailedPrecondition(f"a gateway is using {name}: stop all gateways first")
            with connection.begin():
                found = downgrade(connection, revision, schemas)
    finally:
        file.release()
        engine.dispose()
    print(f"{name}: migrated from schema {found} to {revision}; start the gateway of that version")
    if len(schemas) > 1 and revision < _FIRST_WITH_SHARDS:
        print(
            f"that gateway serves the sessions of shard 0 only; those of {len(schemas) - 1} other shards stay until a"
            " gateway with --shards migrates them again"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "fovea downgrade",
        description="Migrates the database of a stopped gateway back to the tables of an earlier version: the one at "
        "FOVEA_GATEWAY_DATABASE_URL, or in a state folder.",
    )
    add_state_dir(parser)
    wanted = "the schema that the earlier version supports: its error message names it"
    parser.add_argument("--to", type=int, required=True, metavar="SCHEMA", help=wanted)
    return parser.parse_args()


if __name__ == "__main__":
    main()
