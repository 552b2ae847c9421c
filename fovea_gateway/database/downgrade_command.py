"""`fovea downgrade --to SCHEMA`: gives a gateway's database back the tables of an earlier version, data included."""

import argparse

import sqlalchemy as sa

from fovea.wire.errors import FailedPrecondition, FoveaError
from fovea_gateway.database import migrations
from fovea_gateway.database.sql_engine import add_state_dir, command_url, describe, make_engine, parse_url
from fovea_gateway.database.writer import make_ownership


def main() -> None:
    """Does what the command line says."""
    arguments = _parse()
    try:
        url = command_url(arguments.state_dir, may_create=False)
        downgrade(url.render_as_string(hide_password=False), arguments.to)
    except (FoveaError, sa.exc.DBAPIError) as error:
        raise SystemExit(f"fovea downgrade: {error}") from None


def downgrade(url: str, revision: int) -> None:
    """Downgrades a database that no gateway has.

    Raises:
        FailedPrecondition: A gateway has it, or it cannot have that schema.
        Internal: A gateway of this machine has it, or its schema is unknown.
    """
    engine = make_engine(parse_url(url), 1)
    name, ownership = describe(engine.url), make_ownership(engine.url)
    try:
        with engine.connect() as connection:
            with connection.begin():
                if not ownership.take(connection):
                    raise FailedPrecondition(f"a gateway has {name}: stop it first")
            with connection.begin():
                found = migrations.downgrade(connection, revision)
    finally:
        ownership.release()
        engine.dispose()
    print(f"{name}: its schema was {found} and is {revision}; start the gateway of that version")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "fovea downgrade",
        description="Gives the database of a gateway that is stopped the tables of an earlier version: the one of "
        "FOVEA_GATEWAY_DATABASE_URL, or of a state folder.",
    )
    add_state_dir(parser)
    wanted = "the schema that the earlier version needs: it says so when it refuses the database"
    parser.add_argument("--to", type=int, required=True, metavar="SCHEMA", help=wanted)
    return parser.parse_args()


if __name__ == "__main__":
    main()
