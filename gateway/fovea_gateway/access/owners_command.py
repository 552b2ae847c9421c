"""`fovea owners list | set` and `fovea usage`: owners' shares, limits and usage in a gateway's database.

Like `fovea keys`, these commands work on the database directly.
"""

import argparse
import sys

import sqlalchemy as sa

from fovea.wire.errors import FoveaError
from fovea_gateway.access.keys_command import print_table, run
from fovea_gateway.access.owners import FIELDS, FIGURES, LIMITS, Owner, all_owners, put_owner, read_usage
from fovea_gateway.database.sql_engine import add_state_dir

_DAYS = 30
_HEAD = ("OWNER", *(name.upper() for name in FIELDS))


def main() -> None:
    """Runs the command line. Its first word is the `fovea` subcommand."""
    arguments = _parse()
    try:
        arguments.run(arguments)
    except (FoveaError, sa.exc.DBAPIError) as error:
        raise SystemExit(f"fovea {sys.argv[1]}: {error}") from None


def _list(arguments: argparse.Namespace) -> None:
    found = run(arguments, all_owners)
    print_table(_HEAD, map(_row, found))


def _row(owner: Owner) -> tuple[str, ...]:
    return (owner.owner, f"{owner.weight:g}", *(f"{getattr(owner, name):.16g}" for name in LIMITS))


def _set(arguments: argparse.Namespace) -> None:
    def change(connection: sa.Connection) -> Owner:
        known = next((each for each in all_owners(connection) if each.owner == arguments.owner), Owner(arguments.owner))
        given = {name: value for name in FIELDS if (value := getattr(arguments, name)) is not None}
        changed = Owner(**{**vars(known), **given}).checked()
        put_owner(connection, changed)
        return changed

    changed = run(arguments, change, may_create=True)
    print_table(_HEAD, [_row(changed)])
    print("a running gateway applies this within a second", file=sys.stderr)


def _usage(arguments: argparse.Namespace) -> None:
    found = run(arguments, lambda connection: read_usage(connection, arguments.owner, arguments.days))
    head = ("DAY", "OWNER", "KEY ID", *(name.upper() for name in FIGURES))
    figures = (tuple(f"{row[name]:.10g}" for name in FIGURES) for row in found["usage"])
    who = ((row["day"], row["owner"], row["key_id"]) for row in found["usage"])
    print_table(head, (a + b for a, b in zip(who, figures, strict=True)))
    for owner, size_bytes in sorted(found["stored_bytes"].items()):
        print(f"{owner} has {size_bytes} bytes of checkpoints")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("fovea")
    commands = parser.add_subparsers(required=True)
    words = (
        "Manages each owner's share of trainer and samplers, and its limits. A limit of 0 leaves the gateway's default."
    )
    owners = commands.add_parser("owners", description=words).add_subparsers(required=True)
    listing = owners.add_parser("list", description="Show all records. An owner without a record has the defaults.")
    listing.set_defaults(run=_list)
    setting = owners.add_parser(
        "set", description="Change an owner's record. Options that are not given keep their values."
    )
    setting.set_defaults(run=_set)
    setting.add_argument("owner", metavar="OWNER")
    setting.add_argument("--weight", type=float, help="weight of its share relative to other owners; default: 1")
    for name in LIMITS:
        kind = float if name.endswith("_per_s") else int
        setting.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help="0 leaves the gateway's default limit; default: 0"
        )
    usage = commands.add_parser("usage", description="Show the usage of owners, by key and day.")
    usage.set_defaults(run=_usage)
    usage.add_argument("--owner", help="show only this owner")
    usage.add_argument(
        "--days", type=int, default=_DAYS, help=f"number of days to show, including today; default: {_DAYS}"
    )
    for each in (listing, setting, usage):
        add_state_dir(each)
    return parser.parse_args()


if __name__ == "__main__":
    main()
