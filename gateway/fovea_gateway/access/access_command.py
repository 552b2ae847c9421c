"""`fovea keys create | list | revoke | expire`, `fovea owners list | set`, `fovea usage`, `audit` and `drain`.

The commands work on a gateway's database directly, whether or not a gateway runs; a running gateway reads changes
within seconds.
"""

import argparse
import json
import os
import pwd
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from fovea.wire.errors import FailedPrecondition, FoveaError, NotFound, similar
from fovea_gateway.access import audit_log
from fovea_gateway.access.api_keys import (
    PUBLISHED,
    Key,
    Scope,
    all_keys,
    change_key,
    check_owner,
    hash_key,
    insert_key,
    nameless,
    random_key,
)
from fovea_gateway.access.owners import FIELDS, FIGURES, LIMITS, Owner, all_owners, put_owner, read_usage
from fovea_gateway.database.database import Job, Result
from fovea_gateway.database.migrations import find_revision
from fovea_gateway.database.ownership import see_whole
from fovea_gateway.database.schema import REVISION, audit_entries, checkpoints, drained_trainers, keys, owners, usage
from fovea_gateway.database.sql_engine import add_state_dir, command_url, describe, insert_new, make_engine, refusal

_DAY_S = 24 * 3600
_DAYS = 30
_ENTRIES = 1000
_AUDITED = ("owner", "key_id", "event", "object_id", "new_values", "outcome", "count", "route")
_COMMAND = "the command line"
"""The owner of audit entries of these commands."""
_BARE = nameless(hash_key(PUBLISHED))
"""The owner of the published key. The page and these commands call it by the key."""
_HEAD = ("OWNER", *(name.upper() for name in FIELDS))


def main() -> None:
    """Runs the command line. Its first word is the `fovea` subcommand."""
    arguments = _parse()
    try:
        arguments.run(arguments)
    except FoveaError as error:
        raise SystemExit(f"fovea {sys.argv[1]}: {error}") from None


def _create(arguments: argparse.Namespace) -> None:
    expires_at = time.time() + arguments.days * _DAY_S if arguments.days else None
    scope = Scope(arguments.scope)
    text, key = random_key(arguments.owner, name=arguments.name, scope=scope, expires_at=expires_at)

    def insert(connection: sa.Connection) -> str:
        known = _known(connection)
        insert_key(connection, key)
        _note(connection, "keys create", "key_create", key.key_id, **audit_log.key_values(key))
        return "" if key.owner in known else similar(key.owner, known)

    if alike := run(arguments, insert, may_create=True):
        print(f"{key.owner} is a new owner{alike}", file=sys.stderr)
    print(f"key {key.key_id} of {key.owner}, scope {scope}; it is shown only this once:", file=sys.stderr)
    print(text)


def _list(arguments: argparse.Namespace) -> None:
    now = time.time()

    def row(key: Key) -> tuple[str, ...]:
        until = "until " + _day(key.expires_at) if key.expires_at else "yes"
        return (key.key_id, key.owner, key.name, key.scope, _day(key.created_at), key.problem(now) or until)

    print_table(("KEY ID", "OWNER", "NAME", "SCOPE", "CREATED", "VALID"), map(row, run(arguments, all_keys)))


def _revoke(arguments: argparse.Namespace) -> None:
    key, left = _change(arguments, "keys revoke", "key_revoke", revoked_at=time.time())
    print(f"key {key.key_id} of {key.owner} is revoked; a running gateway refuses it within a second", file=sys.stderr)
    now = time.time()
    if key.scope is Scope.ADMIN and not any(each.scope is Scope.ADMIN and not each.problem(now) for each in left):
        print("no valid key of scope admin is left; `fovea keys create --scope admin` makes one", file=sys.stderr)


def _expire(arguments: argparse.Namespace) -> None:
    expires_at = time.time() + arguments.days * _DAY_S if arguments.days else None
    key, _ = _change(arguments, "keys expire", "key_expiry_set", expires_at=expires_at)
    until = f"until {_day(key.expires_at)}" if key.expires_at else "until it is revoked"
    print(f"key {key.key_id} of {key.owner} is valid {until}", file=sys.stderr)


def _change(arguments: argparse.Namespace, words: str, event: str, **values: float | None) -> tuple[Key, list[Key]]:
    """Changes a key; returns it, and all keys after the change. Raises NotFound."""

    def change(connection: sa.Connection) -> tuple[Key, list[Key]] | None:
        found = change_key(connection, arguments.key_id, **values)
        if found is None:
            return None
        _note(connection, words, event, found.key_id, **audit_log.key_values(found))
        return found, all_keys(connection)

    changed = run(arguments, change)
    if changed is None:
        raise NotFound(f"there is no key {arguments.key_id!r}; `fovea keys list` shows all keys", field="KEY_ID")
    return changed


def _list_owners(arguments: argparse.Namespace) -> None:
    def read(connection: sa.Connection) -> dict[str, Owner]:
        found = {name: Owner(name) for name in connection.scalars(sa.select(keys.c.owner).distinct())}
        return found | {each.owner: each for each in all_owners(connection)}

    print_table(_HEAD, (_row(owner) for _, owner in sorted(run(arguments, read).items())))


def _row(owner: Owner) -> tuple[str, ...]:
    limits = (getattr(owner, name) for name in LIMITS)
    return (_shown(owner.owner), f"{owner.weight:g}", *(f"{limit:.16g}" if limit else "default" for limit in limits))


def _set_owner(arguments: argparse.Namespace) -> None:
    def change(connection: sa.Connection) -> Owner:
        if not arguments.create:
            _require_owner(connection, arguments.owner)
        known = next((each for each in all_owners(connection) if each.owner == arguments.owner), Owner(arguments.owner))
        given = {name: value for name in FIELDS if (value := getattr(arguments, name)) is not None}
        changed = Owner(**{**vars(known), **given}).checked()
        put_owner(connection, changed)
        _note(connection, "owners set", "owner_set", changed.owner, **{name: getattr(changed, name) for name in FIELDS})
        return changed

    try:
        changed = run(arguments, change, may_create=arguments.create)
    except NotFound as error:
        raise NotFound(f"{error.message}; to set limits before the first key, add --create", field="OWNER") from None
    print_table(_HEAD, [_row(changed)])
    print("a running gateway applies this within a second", file=sys.stderr)


def _known(connection: sa.Connection) -> set[str]:
    """Returns the names of all owners with a record, a key, usage or a checkpoint."""
    tables = (owners, keys, usage, checkpoints)
    return {name for table in tables for name in connection.scalars(sa.select(table.c.owner).distinct())}


def _require_owner(connection: sa.Connection, owner: str) -> None:
    """Raises NotFound for an owner that never existed, with the names that are like it."""
    known = _known(connection)
    if owner not in known:
        raise NotFound(f"there is no owner {owner!r}{similar(owner, known)}", field="OWNER")


def _usage(arguments: argparse.Namespace) -> None:
    def read(connection: sa.Connection) -> dict[str, Any]:
        if arguments.owner is not None:
            _require_owner(connection, arguments.owner)
        return read_usage(connection, arguments.owner, arguments.days)

    found = run(arguments, read)
    price = arguments.gpu_hour_price_usd
    head = ("DAY", "OWNER", "KEY ID", *(name.upper() for name in FIGURES), *(["COST USD"] if price else []))
    figures = (
        (
            *(f"{round(row[name], 1):.10g}" for name in FIGURES),
            *([f"{row['gpu_seconds'] / 3600 * price:.2f}"] if price else []),
        )
        for row in found["usage"]
    )
    who = ((row["day"], _shown(row["owner"]), row["key_id"]) for row in found["usage"])
    print_table(head, (a + b for a, b in zip(who, figures, strict=True)))
    for owner, size_bytes in sorted(found["stored_bytes"].items()):
        print(f"{_shown(owner)} has {size_bytes} bytes of checkpoints")


def _drain(arguments: argparse.Namespace) -> None:
    def change(connection: sa.Connection) -> list[str]:
        if arguments.address and arguments.undo:
            connection.execute(sa.delete(drained_trainers).where(drained_trainers.c.address == arguments.address))
        elif arguments.address:
            insert_new(connection, drained_trainers, {"address": arguments.address})
        if arguments.address:
            _note(connection, "drain --undo" if arguments.undo else "drain", audit_log.DRAIN, arguments.address)
        return sorted(connection.scalars(sa.select(drained_trainers.c.address)))

    found = run(arguments, change)
    print_table(("DRAINED TRAINER",), ((address,) for address in found))
    if arguments.address:
        print("a running gateway applies this within a second", file=sys.stderr)


def _audit(arguments: argparse.Namespace) -> None:
    given = {name: value for name in ("owner", "event") if (value := getattr(arguments, name)) is not None}
    question = audit_log.question_of(given, arguments.days)
    rows = run(arguments, lambda connection: audit_log.read_entries(connection, question, arguments.most))
    if arguments.json:
        for row in rows:
            print(json.dumps(audit_log.entry_of(row)))
    else:
        rows_shown = ({**row, "new_values": audit_log.show_values(row["new_values"])} for row in rows)
        shown = ((_day(row["at"], time.gmtime), *(_shown(str(row[name])) for name in _AUDITED)) for row in rows_shown)
        print_table(("TIME (UTC)", *(name.upper().replace("_", " ") for name in _AUDITED)), shown)
    if len(rows) == arguments.most:
        print(f"these are the newest {arguments.most}; --most shows more", file=sys.stderr)


def _note(connection: sa.Connection, words: str, event: str, object_id: str, **new_values: Any) -> None:
    """Writes the audit entry of a command, `fovea` with these words, into its transaction."""
    # The views of all shards hide the tables, and take no rows.
    schema = connection.scalar(sa.func.current_schema()) if connection.dialect.name == "postgresql" else None
    caller, values = f"{_user()}@{socket.gethostname()}", audit_log.encode(new_values)
    action = audit_log.Action(_COMMAND, caller, event, f"fovea {words}", object_id, audit_log.OK, values)
    audit_log.put_entries(connection, [action.row(time.time(), 1)], schema)


def _user() -> str:
    """Returns the name of the operating system's user, or its number if it has no name, as in many containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def run(arguments: argparse.Namespace, job: Job[Result], *, may_create: bool = False) -> Result:
    """Runs a job in a committed transaction and returns its result.

    Args:
        may_create: Whether to create a database in a folder that the command line or the environment names.

    Raises:
        FailedPrecondition: The database has another schema version.
        NotFound: There is no database.
        Unavailable: The database refuses the connection or the job.
    """
    url = command_url(arguments.state_dir, may_create=may_create)
    is_new = url.get_backend_name() == "sqlite" and not os.path.exists(url.database or "")
    engine = make_engine(url, 1)
    if engine.dialect.name == "postgresql":
        sa.event.listen(engine, "connect", see_whole)
    print(f"{describe(url)}{', a new database' if is_new else ''}:", file=sys.stderr)
    try:
        with engine.begin() as connection:
            found = find_revision(connection)
            if found not in (None, REVISION):
                raise FailedPrecondition(
                    f"this database has schema {found}, and this version of Fovea uses {REVISION}: start this "
                    "version's gateway on it first"
                )
            for table in (keys, owners, usage, checkpoints, drained_trainers, audit_entries):
                table.create(connection, checkfirst=True)
            return job(connection)
    except sa.exc.DBAPIError as error:
        raise refusal(url, error) from None


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows in aligned columns."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("fovea")
    commands = parser.add_subparsers(required=True)
    _add_keys(commands)
    _add_owners(commands)
    usage = commands.add_parser("usage", description="Show the usage of owners, by key and day.")
    usage.set_defaults(run=_usage)
    usage.add_argument("--owner", type=_known_as, help="show only this owner")
    usage.add_argument(
        "--days", type=int, default=_DAYS, help=f"number of days to show, including today; default: {_DAYS}"
    )
    usage.add_argument(
        "--gpu-hour-price-usd", type=float, default=os.environ.get("FOVEA_GATEWAY_GPU_HOUR_PRICE_USD", 0.0),
        help="US dollars that one GPU costs in an hour; adds a column with costs. Default: "
        "FOVEA_GATEWAY_GPU_HOUR_PRICE_USD, or none",
    )  # fmt: skip
    add_state_dir(usage)
    audit = commands.add_parser(
        "audit", description="Show the audit log: which key, or which user of these commands, did what. Newest last."
    )
    audit.set_defaults(run=_audit)
    audit.add_argument(
        "--owner", type=_known_as, help=f"show only this owner's entries; {_COMMAND!r} is these commands"
    )
    audit.add_argument("--event", help="show only this event, such as key_create")
    audit.add_argument(
        "--days", type=int, default=_DAYS, help=f"number of days to show, including today (UTC); default: {_DAYS}"
    )
    audit.add_argument("--most", type=int, default=_ENTRIES, help=f"number of entries to show; default: {_ENTRIES}")
    audit.add_argument("--json", action="store_true", help="print each entry as a line of JSON, as in `GET audit`")
    add_state_dir(audit)
    drain = commands.add_parser(
        "drain",
        description="Moves the models of one of several trainers to the others, so that it can be stopped. Without an"
        " address, lists the drained trainers.",
    )
    drain.set_defaults(run=_drain)
    drain.add_argument(
        "address", metavar="ADDRESS", nargs="?", default="", help="host:port, as in the gateway's --trainer"
    )
    drain.add_argument("--undo", action="store_true", help="use the trainer again")
    add_state_dir(drain)
    return parser.parse_args()


def _add_keys(programs: Any) -> None:
    keys = programs.add_parser(
        "keys",
        description="Manages the API keys in a gateway's database: at FOVEA_GATEWAY_DATABASE_URL, or in a state folder."
        " To rotate a key, create another for the same owner, then revoke the old one: data belongs to the owner.",
    )
    commands = keys.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], words: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=words, description=words)
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
        choices=[scope.value for scope in Scope],
        default=Scope.TRAIN,
        help="permissions, each including those before it: read, sample, train, administer all owners; default: train",
    )
    command("list", _list, "Show all keys.")
    command("revoke", _revoke, "Revoke a key permanently.").add_argument("key_id", metavar="KEY_ID")
    expire = command("expire", _expire, "Set when a valid key expires, or remove its expiry.")
    expire.add_argument("key_id", metavar="KEY_ID")
    expire.add_argument("--days", type=_days, help="days from now until the key expires; default: never")


def _add_owners(programs: Any) -> None:
    words = "Manages owners' shares of trainer and samplers, and their limits. A limit of 0 means the default."
    owners = programs.add_parser("owners", description=words).add_subparsers(required=True)
    listing = owners.add_parser("list", description="Show all owners with a record or a key.")
    listing.set_defaults(run=_list_owners)
    setting = owners.add_parser(
        "set", description="Change an owner's record. Options that are not given keep their values."
    )
    setting.set_defaults(run=_set_owner)
    setting.add_argument("owner", metavar="OWNER", type=_known_as)
    setting.add_argument("--create", action="store_true", help="accept an owner without a key, usage or checkpoint yet")
    setting.add_argument("--weight", type=float, help="weight of its share relative to other owners; default: 1")
    for name in LIMITS:
        kind = float if name.endswith("_per_s") else int
        setting.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help="0 leaves the gateway's default limit; default: 0"
        )
    for each in (listing, setting):
        add_state_dir(each)


def _owner(text: str) -> str:
    try:
        return check_owner(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _known_as(name: str) -> str:
    """Returns the owner's stored name for the name that these commands print."""
    return _BARE if name == PUBLISHED else name


def _shown(owner: str) -> str:
    return PUBLISHED if owner == _BARE else owner


def _days(text: str) -> float:
    if not (days := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return days


def _day(at: float, zone: Callable[[float], time.struct_time] = time.localtime) -> str:
    return time.strftime("%Y-%m-%d %H:%M", zone(at))


if __name__ == "__main__":
    main()
