"""Ownership of the state, and its shards.

One gateway at a time owns the state, because two would both run the queued work. With SQLite, ownership is a lock on a
file beside the database, and a second gateway is refused. With PostgreSQL, it is an advisory lock of the session that
writes; a second gateway waits for the lock and takes over when the first one ends.

A PostgreSQL can hold the sessions in several shards. Each has a schema and a lock of its own, and a gateway owns one of
them. Shard 0 is the schema of the connection, as without shards. It also holds the tables in `COMMON`, which all shards
read and write.
"""

import asyncio
import fcntl
import json
import logging
import re
import threading
import time
import uuid
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import sqlalchemy as sa

from fovea.wire.errors import Internal, InvalidInput, Unavailable
from fovea_gateway.database.schema import SEEN_WHOLE, owner, shard_owners
from fovea_gateway.database.sql_engine import is_lost, make_engine, parse_url

logger = logging.getLogger(__name__)

_LOOK_S, _PATIENCE_S = 0.1, 30.0
_REPORTED_S, _SILENT_S = 5.0, 15.0
"""Seconds after which reports contain a new session, and after which a gateway without a report is gone."""
_LOCK = zlib.crc32(b"fovea gateway") - 2**31
_TAKE = sa.text("SELECT pg_try_advisory_lock(:lock, hashtext(:schema))")
_HOLD = sa.text("SELECT pg_advisory_xact_lock(:lock, hashtext(:schema))")
_TRY_HOLD = sa.text("SELECT pg_try_advisory_xact_lock(:lock, hashtext(:key)), set_config('lock_timeout', '50ms', true)")
_LOCK_AGAIN = sa.text("SELECT set_config('lock_timeout', NULL, true)")  # back to the default of the session
_SCHEMA = sa.text("SELECT coalesce(current_schema(), '')")
_FOUND = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, current_schema() || '_shard_')"
_COLUMNS = (
    "SELECT table_schema, table_name, column_name FROM information_schema.columns"
    " WHERE starts_with(table_schema || '_shard_', current_schema() || '_shard_')"
)
_PATH = sa.text("SELECT set_config('search_path', :path, :is_local)")
_SHARD = re.compile(r"(?:sess-[0-9a-f]{16})(?:-([0-9]{1,3}))?(?![0-9a-zA-Z])")


class Superseded(Exception):
    """Another gateway has taken over the state, so this process's memory is stale."""


class FileOwnership:
    """A lock on a file beside an SQLite database. The connection to such a database is never lost."""

    def __init__(self, database: str) -> None:
        self._path = Path(f"{database}.lock")
        self._file: IO[str] | None = None

    def take(self, connection: sa.Connection) -> bool:
        """Locks the file. Raises Internal if another process holds the lock."""
        if self._file is None:
            self._file = self._path.open("w")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                self._file = None
                folder = self._path.parent
                raise Internal(f"another gateway uses {folder}; give each gateway its own --state-dir") from None
        return True

    def release(self) -> None:
        """Unlocks the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def shard_of(text: str) -> int | None:
    """Returns the shard of the first session in a text, such as the id of a model or a checkpoint's path; None without
    one.
    """
    found = _SHARD.search(text)
    return int(found[1] or 0) if found else None


class Shards:
    """The shards of the sessions in one PostgreSQL, and the one that this gateway owns.

    Args:
        count: The number of shards; 1 means that the sessions are not sharded.

    Attributes:
        number: The shard of this gateway; 0 until it owns one.
    """

    def __init__(self, count: int = 1) -> None:
        self.count, self.number = count, 0
        self._base = ""
        self._is_known = count == 1

    def new_session_id(self, random: str) -> str:
        """Returns the id of a new session of this shard, from 16 random hexadecimal digits. Ids of shard 0 are those
        of a gateway without shards.
        """
        return f"sess-{random}-{self.number}" if self.number else f"sess-{random}"

    def claim(self, connection: sa.Connection, may_change: bool) -> bool:
        """Tries to lock a shard, and lets the connection work in it. Returns False if all are owned.

        Args:
            may_change: Whether another shard will do than the one that this gateway owned before.
        """
        self._base = self._base or str(connection.scalar(_SCHEMA))
        for number in range(self.count) if may_change else (self.number,):
            if connection.scalar(_TAKE, {"lock": _LOCK, "schema": self._schema(number)}):
                self.number, self._is_known = number, True
                if self.count > 1:
                    connection.execute(_PATH, {"path": self._path(), "is_local": False})
                return True
        return False

    @property
    def mine(self) -> str:
        """Returns this gateway's share of the state, as a text for logs."""
        return f"shard {self.number} of {self.count}" if self.count > 1 else "it"

    @property
    def schemas(self) -> list[str]:
        """The schemas of all shards, by number. Empty without shards."""
        return [self._schema(number) for number in range(self.count)] if self.count > 1 else []

    def hold(self, connection: sa.Connection) -> None:
        """Waits until no other gateway creates tables, and keeps all from it until the transaction ends."""
        connection.execute(_HOLD, {"lock": _LOCK, "schema": f"{self._base} tables"})

    def is_elsewhere(self, connection: sa.Connection, table: str, values: Mapping[str, str]) -> bool:
        """Returns True if another shard has such a row. If False, no other shard can add one until the transaction
        ends. Raises Unavailable while another gateway adds one, and OperationalError while a shard is being upgraded.
        """
        key = f"{self._base} {table} {' '.join(values.values())}"
        if self.count > 1 and not connection.scalar(_TRY_HOLD, {"lock": _LOCK, "key": key}):
            raise Unavailable("another gateway is answering the same request: send it again in a second")
        query = sa.select(1).where(*(sa.column(name) == value for name, value in values.items()))
        others = [sa.table(table, schema=each) for each in self.schemas if each != self._schema(self.number)]
        found = others and connection.scalar(sa.union_all(*map(query.select_from, others)))
        if others:
            connection.execute(_LOCK_AGAIN)
        return bool(found)

    def enter(self, connection: Any, _: object) -> None:
        """Lets a new connection of the driver work in the shard of this gateway, once it owns one."""
        if self.count > 1 and self._is_known:
            connection.execute("SELECT set_config('search_path', %s, false)", [self._path()])
            connection.commit()

    def _schema(self, number: int) -> str:
        return f"{self._base}_shard_{number}" if number else self._base

    def _path(self) -> str:
        return ", ".join(_quoted(name) for name in dict.fromkeys((self._schema(self.number), self._base)))


def see_whole(connection: Any, record: Any) -> None:
    """Lets a new connection of the driver read the sessions of all shards: temporary views hide its tables.

    Missing columns of a shard that is not yet upgraded read as defaults; the connection is then replaced before its
    next use.
    """
    (base,) = connection.execute("SELECT coalesce(current_schema(), '')").fetchone()
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for schema, name, column in connection.execute(_COLUMNS):
        found[schema, name].add(column)
    schemas = _by_number(base, {schema for schema, _ in found})
    for table in SEEN_WHOLE if len(schemas) > 1 else ():
        names, parts = set(table.c.keys()), []
        for schema in schemas:
            if lacking := names - found[schema, table.name]:
                record.invalidate(soft=True)
            columns = ", ".join(_default(each) if each.name in lacking else _quoted(each.name) for each in table.c)
            parts += [f"SELECT {columns} FROM {_quoted(schema)}.{_quoted(table.name)}"] if lacking != names else []
        connection.execute(f"CREATE TEMPORARY VIEW {_quoted(table.name)} AS {' UNION ALL '.join(parts)}")
    connection.commit()


def _default(column: sa.Column[Any]) -> str:
    from sqlalchemy.dialects import postgresql

    default, dialect = getattr(column.default, "arg", None), cast(Any, postgresql.dialect)
    literal = "NULL" if default is None else f"'{default if isinstance(default, str) else json.dumps(default)}'"
    return f"CAST({literal} AS {column.type.compile(dialect())}) AS {_quoted(column.name)}"


def take_all(connection: sa.Connection) -> list[str]:
    """Locks all shards of a PostgreSQL until the connection ends. Returns their schemas by number; none if a gateway
    owns one of them.
    """
    schemas = _by_number(str(connection.scalar(_SCHEMA)), connection.scalars(sa.text(_FOUND)))
    free = [connection.scalar(_TAKE, {"lock": _LOCK, "schema": schema}) for schema in schemas]
    return schemas if all(free) else []


def _by_number(base: str, found: Iterable[str]) -> list[str]:
    names = [name for name in found if name.removeprefix(f"{base}_shard_").isdecimal()]
    return [base, *sorted(names, key=lambda name: (len(name), name))]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class SessionOwnership:
    """An advisory lock, and a row that every transaction of its holder updates.

    The lock ends with the database session, and the next gateway acquires it. The row stops a gateway that has lost its
    session without noticing: its updates find no row with its name. The row also contains the number of the last
    transaction. If the answer to a commit was lost, that number shows whether the commit took place: once the gateway
    has the lock again, its earlier session has ended, and the number is final.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._name = uuid.uuid4().hex
        self._has_begun = False
        self._mine = owner.c.name == self._name
        self._numbered = sa.update(owner).where(self._mine).values(last_mark=sa.bindparam("number"))

    def take(self, connection: sa.Connection) -> bool:
        """Tries to acquire the lock, again on each new connection. Raises Superseded if another gateway has owned the
        state since `begin`.
        """
        if self._has_begun:
            self.last_mark(connection)
        return self._shards.claim(connection, may_change=not self._has_begun)

    def begin(self, connection: sa.Connection) -> None:
        """Replaces the previous owner's row, once the tables exist."""
        connection.execute(sa.delete(owner))
        connection.execute(sa.insert(owner).values(name=self._name, last_mark=0))
        self._has_begun = True

    def mark(self, connection: sa.Connection, number: int) -> None:
        """Records a transaction's number within it. Raises Superseded if another gateway owns the state."""
        if connection.execute(self._numbered, {"number": number}).rowcount == 0:
            raise Superseded

    def last_mark(self, connection: sa.Connection) -> int:
        """Returns the number of the last committed transaction. Raises Superseded like `mark`."""
        number: int | None = connection.execute(sa.select(owner.c.last_mark).where(self._mine)).scalar()
        if number is None:
            raise Superseded
        return number

    def release(self) -> None:
        """Does nothing: the lock ends with its session."""


class ShardOwner(NamedTuple):
    """The gateway of a shard, as it reports itself.

    Attributes:
        rest: host:port of its REST API.
        grpc: host:port of its gRPC API.
        report: The figures that `Health.report` returns.
        updated_at: The time of the report, in seconds since the epoch.
    """

    shard: int
    rest: str
    grpc: str
    report: dict[str, Any]
    updated_at: float


def read_owners(connection: sa.Connection) -> list[ShardOwner]:
    """Returns the gateways of all shards that have had one, by shard."""
    rows = connection.execute(sa.select(shard_owners).order_by(shard_owners.c.shard))
    return [ShardOwner(*row) for row in rows]


def write_owner(connection: sa.Connection, mine: ShardOwner) -> None:
    """Writes the report of a shard's gateway in place of the last one."""
    values = mine._asdict()
    if not connection.execute(
        sa.update(shard_owners).where(shard_owners.c.shard == mine.shard).values(values)
    ).rowcount:
        connection.execute(sa.insert(shard_owners).values(values))


class Directory:
    """The gateways that own the shards, read from their database."""

    def __init__(self, database_url: str) -> None:
        self._engine = make_engine(parse_url(database_url), 1).execution_options(isolation_level="AUTOCOMMIT")
        self._reading, self._is_closed = threading.Lock(), False
        self._owners: dict[int, ShardOwner] = {}
        self._placed: deque[tuple[float, int]] = deque()
        self._turn = 0

    async def look(self) -> None:
        """Reads the owners again."""
        found = {owner.shard: owner for owner in await asyncio.to_thread(self._read)}
        for shard in found.keys() - self._owners.keys():
            logger.info("shard %d belongs to the gateway at %s", shard, found[shard].rest)
        self._owners = found

    async def close(self) -> None:
        """Closes the connection, once a cancelled `look` no longer uses it."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._reading:
            self._is_closed = True
            self._engine.dispose()

    @property
    def shards(self) -> list[int | None]:
        """The shards that have had a gateway."""
        return list(self._owners)

    @property
    def is_served(self) -> bool:
        """True once a gateway has reported that all its services answer."""
        return any(owner.report.get("serves") for owner in self._owners.values())

    async def all(self) -> list[ShardOwner]:
        """Returns the gateways of all shards. Waits for the first one; raises Unavailable if none starts."""
        give_up_at = time.monotonic() + _PATIENCE_S
        while not self._owners:
            if time.monotonic() > give_up_at:
                raise Unavailable("no gateway has started yet: send this request again later")
            await asyncio.sleep(_LOOK_S)
        return list(self._owners.values())

    async def owner(self, shard: int | None) -> ShardOwner:
        """Returns the gateway of a shard, or any for None or an unknown shard.

        Waits while the shard's last gateway is known to own another one. Raises Unavailable if there is no gateway.
        """
        await self.all()
        if shard is None or shard not in self._owners:
            self._turn += 1
            living = self._living()
            shard = living[self._turn % len(living)]
        give_up_at = time.monotonic() + _PATIENCE_S
        while self._is_left(shard):
            if time.monotonic() > give_up_at:
                raise Unavailable(f"no gateway owns shard {shard} now: send this request again")
            await asyncio.sleep(_LOOK_S)
        return self._owners[shard]

    def _is_left(self, shard: int) -> bool:
        """Returns whether the last gateway of a shard has restarted at the same address and owns another shard now."""
        last = self._owners[shard]
        return any(each.rest == last.rest and each.updated_at > last.updated_at for each in self._owners.values())

    def place(self) -> int | None:
        """Returns the shard for a new session: the one with the fewest. None if no gateway has started yet."""
        now = time.monotonic()
        while self._placed and now - self._placed[0][0] > _REPORTED_S:
            self._placed.popleft()
        placed = Counter(shard for _, shard in self._placed)  # reports may lack them
        loads = {shard: self._owners[shard].report.get("sessions", 0) + placed[shard] for shard in self._living()}
        shard = min(loads, key=lambda each: (loads[each], each), default=None)
        if shard is not None:
            self._placed.append((now, shard))
        return shard

    def _living(self) -> list[int]:
        """Returns the shards with gateways that report, or all if none does."""
        last = max((owner.updated_at for owner in self._owners.values()), default=0.0)
        return [shard for shard, owner in self._owners.items() if last - owner.updated_at < _SILENT_S]

    def _read(self) -> list[ShardOwner]:
        with self._reading:
            return list(self._owners.values()) if self._is_closed else self._read_now()

    def _read_now(self) -> list[ShardOwner]:
        try:
            with self._engine.connect() as connection:
                return read_owners(connection)
        except sa.exc.ProgrammingError:  # the gateways have not created the table yet
            return []
        except sa.exc.DBAPIError as error:
            if not is_lost(error):
                raise
            return list(self._owners.values())


def make_ownership(url: sa.URL, shards: Shards) -> FileOwnership | SessionOwnership:
    """Returns a file lock for SQLite, an advisory lock for PostgreSQL. Raises InvalidInput for shards in SQLite."""
    if url.get_backend_name() != "sqlite":
        return SessionOwnership(shards)
    if shards.count > 1:
        raise InvalidInput("shards need a PostgreSQL: set database_url, or leave shards at 1", field="shards")
    return FileOwnership(url.database or "")
