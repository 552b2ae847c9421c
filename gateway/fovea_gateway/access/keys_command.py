"""`fovea keys create | list | revoke | expire`: manages the API keys in a gateway's database.

The command writes to the database directly, whether or not a gateway runs; a running gateway reads the change within
seconds.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import sqlalchemy as sa

from fovea.wire.errors import FailedPrecondition, FoveaError, NotFound
from fovea_gateway.access.api_keys import Key, Scope, all_keys, change_key, check_owner, insert_key, random_key
from fovea_gateway.database.database import Job, Result
from fovea_gateway.database.migrations import find_revision
from fovea_gateway.database.schema import REVISION, checkpoints, keys, owners, usage
from fovea_gateway.database.sql_engine import add_state_dir, command_url, describe, make_engine

_DAY_S = 24 * 3600


def main() -> None:
    """Runs the command that the command line gives."""
    arguments = _parse()
    try:
        arguments.run(arguments)
    except (FoveaError, sa.exc.DBAPIError) as error:
        raise SystemExit(f"fovea keys: {error}") from None


def _create(arguments: argparse.Namespace) -> None:
    expires_at = time.time() + arguments.days * _DAY_S if arguments.days else None
    scope = Scope(arguments.scope)
    text, key = random_key(arguments.owner, name=arguments.name, scope=scope, expires_at=expires_at)
    run(arguments, lambda connection: insert_key(connection, key), may_create=True)
    print(f"key {key.key_id} of {key.owner}, scope {scope}; it is shown only this once:", file=sys.stderr)
    print(text)


def _list(arguments: argparse.Namespace) -> None:
    now = time.time()

    def row(key: Key) -> tuple[str, ...]:
        until = "until " + _day(key.expires_at) if key.expires_at else "yes"
        return (key.key_id, key.owner, key.name, key.scope, _day(key.created_at), key.problem(now) or until)

    print_table(("KEY ID", "OWNER", "NAME", "SCOPE", "CREATED", "VALID"), map(row, run(arguments, all_keys)))


def _revoke(arguments: argparse.Namespace) -> None:
    key = _change(arguments, revoked_at=time.time())
    print(f"key {key.key_id} of {key.owner} is revoked; a running gateway refuses it within a second", file=sys.stderr)


def _expire(arguments: argparse.Namespace) -> None:
    key = _change(arguments, expires_at=time.time() + arguments.days * _DAY_S if arguments.days else None)
    until = f"until {_day(key.expires_at)}" if key.expires_at else "until it is revoked"
    print(f"key {key.key_id} of {key.owner} is valid {until}", file=sys.stderr)


def _change(arguments: argparse.Namespace, **values: float | None) -> Key:
    key = run(arguments, lambda connection: change_key(connection, arguments.key_id, **values))
    if key is None:
        raise NotFound(f"there is no key {arguments.key_id!r}; `fovea keys list` shows all keys", field="KEY_ID")
    return key


def run(arguments: argparse.Namespace, job: Job[Result], *, may_create: bool = False) -> Result:
    """Runs a job in a committed transaction and returns its result.

    Args:
        may_create: Whether to create a database in a folder that the command line or the environment names.

    Raises:
        FailedPrecondition: The database has another schema version.
        NotFound: There is no database.
    """
    url = command_url(arguments.state_dir, may_create=may_create)
    is_new = url.get_backend_name() == "sqlite" and not os.path.exists(url.database or "")
    engine = make_engine(url, 1)
    print(f"{describe(url)}{', a new database' if is_new else ''}:", file=sys.stderr)
    with engine.begin() as connection:
        found = find_revision(connection)
        if found not in (None, REVISION):
            raise FailedPrecondition(
                f"this database has schema {found}, and this version of Fovea uses {REVISION}: start this version's "
                "gateway on it first"
            )
        for table in (keys, owners, usage, checkpoints):
            table.create(connection, checkfirst=True)
        return job(connection)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows in aligned columns."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "fovea keys",
        description="Manages the API keys in a gateway's database: at FOVEA_GATEWAY_DATABASE_URL, or in a state folder."
        " To rotate a key, create another for the same owner, then revoke the old one: data belongs to the owner.",
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], words: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, description=words)
        added.set_defaults(run=run)
        add_state_dir(added)
        return added

    create = command("create", _create, "Create a key and print it. Only its hash is stored.")
    create.add_argument(
        "--owner", type=_owner, required=True, help="owner of the key; all keys of an owner see the same data"
    )
    create.add_argument("--name", default="", help="description of the key's purpose")
    create.add_argument("--days", type=_days, help="days until the key expires; default: never")
    create.add_argument(
        "--scope",
        choices=list(Scope),
        default=Scope.TRAIN,
        help="permissions, each including those before it: read, sample, train, administer all owners; default: train",
    )
    command("list", _list, "Show all keys.")
    command("revoke", _revoke, "Revoke a key permanently.").add_argument("key_id", metavar="KEY_ID")
    expire = command("expire", _expire, "Set when a valid key expires, or remove its expiry.")
    expire.add_argument("key_id", metavar="KEY_ID")
    expire.add_argument("--days", type=_days, help="days from now until the key expires; default: never")
    return parser.parse_args()


def _owner(text: str) -> str:
    try:
        return check_owner(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _days(text: str) -> float:
    if not (days := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return days


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


if __name__ == "__main__":
    main()
