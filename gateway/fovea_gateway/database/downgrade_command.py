"""`fovea downgrade --to SCHEMA`: migrates a gateway's database back to the tables of an earlier version, with its
data.
"""

import argparse

import sqlalchemy as sa

from fovea.wire.errors import FailedPrecondition, FoveaError
from fovea_gateway.database import migrations
from fovea_gateway.database.ownership import make_ownership
from fovea_gateway.database.sql_engine import add_state_dir, command_url, describe, make_engine, parse_url


def main() -> None:
    """Runs the command line."""
    arguments = _parse()
    try:
        url = command_url(arguments.state_dir, may_create=False)
        downgrade(url.render_as_string(hide_password=False), arguments.to)
    except (FoveaError, sa.exc.DBAPIError) as error:
        raise SystemExit(f"fovea downgrade: {error}") from None


def downgrade(url: str, revision: int) -> None:
    """Downgrades a database that no gateway uses.

    Raises:
        FailedPrecondition: A gateway uses the database, or it cannot be migrated to that schema.
        Internal: A gateway on this machine uses it, or its schema is unknown.
    """
    engine = make_engine(parse_url(url), 1)
    name, ownership = describe(engine.url), make_ownership(engine.url)
    try:
        with engine.connect() as connection:
            with connection.begin():
                if not ownership.take(connection):
                    raise FailedPrecondition(f"a gateway is using {name}: stop it first")
            with connection.begin():
                found = migrations.downgrade(connection, revision)
    finally:
        ownership.release()
        engine.dispose()
    print(f"{name}: migrated from schema {found} to {revision}; start the gateway of that version")


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
