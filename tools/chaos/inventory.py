"""Counts the database rows, files, processes and listening ports of a Fovea; undisturbed runs give the right counts."""

import hashlib
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa
from safetensors import safe_open

from chaos.stack import Stack
from fovea.api.v1 import weights_pb2

_NUMBERS = re.compile(
    r"(?<=sess-)[0-9a-f]{16}(?:-[0-9]{1,3})?|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=-)[a-z0-9_]{8}(?=/)|[0-9a-f]{8,}|\d+"
)
"""Matches names that differ in each run: session ids, UUIDs, names from `tempfile`, digests and counts."""


@dataclass(frozen=True)
class Finish:
    """The gateway's database entry of one command. `number` is its position in the order of completion."""

    scope: str
    seq_id: int
    kind: str
    state: str
    number: int | None


_URIS = "SELECT uri FROM {table}"
Inventory = Counter[str]
"""Counts of each kind of object, such as `rows of futures`."""
UNNAMED = "checkpoint folders that no row names"
"""Count of folders that killed gateways left. The collector removes those that it has found twice, in 20 minutes."""
_LOGS = {"audit_entries"}
"""Tables with an entry for each outcome of a request: faults add outcomes, so these counts differ by design."""


def take(stack: Stack) -> Inventory:
    """Returns the current counts."""
    found: Inventory = Counter()
    with _database(stack) as database:
        for table in database.tables - _LOGS:
            found[f"rows of {table}"] = sum(count for (count,) in database.rows(table, "SELECT count(*) FROM {table}"))
        uris = [uri for table in ("checkpoints", "snapshots") for (uri,) in database.rows(table, _URIS)]
    named, unnamed = {stack.local(uri) for uri in uris if uri}, set()
    for root in _roots(stack):
        for path in _files(root):
            folder = _checkpoint_folder(root, path)
            if folder is not None and folder not in named:
                unnamed.add(folder)
                continue
            found[f"files {root.name}/{_NUMBERS.sub('#', str(path.relative_to(root)))}"] += 1
    found[UNNAMED] = len(unnamed)
    for process in stack.marked():
        with suppress(psutil.Error):
            found[f"processes {role(process)}"] += 1
            listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            found[f"ports of {role(process)}"] += len(listening)
    return found


def _checkpoint_folder(root: Path, path: Path) -> Path | None:
    """Returns the folder ROOT/checkpoints/MODEL/SEGMENT/NAME of a file, or None for other files."""
    parts = path.relative_to(root).parts
    return root.joinpath(*parts[:4]) if parts[0] == "checkpoints" and len(parts) > 4 else None


def growth(before: Inventory, after: Inventory) -> Inventory:
    """Returns the signed differences of two inventories."""
    return Counter(
        {name: after[name] - before[name] for name in before.keys() | after.keys() if after[name] != before[name]}
    )


def left_after_stop(stack: Stack) -> list[str]:
    """Returns what remains after everything was stopped."""
    left = [f"process {process.pid} {role(process)}" for process in stack.marked()]
    left += [f"port {port}" for port in stack.ports if _is_taken(port)]
    left += [f"folder {folder}" for folder in stack.temporary[1:] if folder.exists()]
    return left + [f"file {path}" for root in _roots(stack)[1:] for path in _files(root)]


def ledger(stack: Stack, scopes: Iterable[str]) -> list[Finish]:
    """Returns the entries of these models' commands."""
    query = "SELECT scope, seq_id, kind, state, finish_number FROM {table} WHERE scope = :scope ORDER BY seq_id"
    with _database(stack) as database:
        return [Finish(*row) for scope in scopes for row in database.rows("futures", query, scope=scope)]


def snapshots(stack: Stack, model_id: str) -> list[str]:
    """Returns digests of the weights of a model's snapshots, in the order of creation."""
    query = "SELECT identity FROM {table} WHERE model_id = :model_id ORDER BY created_at"
    with _database(stack) as database:
        rows = database.rows("snapshots", query, model_id=model_id)
    return [weights_pb2.Snapshot.FromString(identity).digest for (identity,) in rows]


def saved_tensors(stack: Stack, path: str) -> dict[str, str]:
    """Returns the digest of each tensor of a saved state, tinker://..., keyed by file and tensor."""
    with _database(stack) as database:
        ((uri,),) = database.rows("checkpoints", "SELECT uri FROM {table} WHERE path = :path", path=path)
    folder, digests = stack.local(uri), {}
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                tensor = tensors.get_tensor(name).contiguous()
                data = tensor.view(-1).numpy().tobytes() if tensor.numel() else b""
                digests[f"{file.relative_to(folder)}:{name}"] = hashlib.sha256(data).hexdigest()[:16]
    return digests


class _Database:
    """The tables of the gateway, or of the shards of two gateways, to read."""

    def __init__(self, connection: sa.Connection, schemas: Sequence[str | None]) -> None:
        self._connection = connection
        found = sa.inspect(connection)
        self._schemas = {schema: set(found.get_table_names(schema)) for schema in schemas}

    @property
    def tables(self) -> set[str]:
        """Names of all tables."""
        return set().union(*self._schemas.values())

    def rows(self, table: str, query: str, **values: str) -> list[Any]:
        """Returns the rows of a query on `{table}`, of all schemas that have the table."""
        found: list[Any] = []
        for schema, tables in self._schemas.items():
            if table in tables:
                name = f'"{schema}"."{table}"' if schema else f'"{table}"'
                found += self._connection.execute(sa.text(query.format(table=name)), values)
        return found


@contextmanager
def _database(stack: Stack) -> Iterator[_Database]:
    """Opens the database; of SQLite a copy, because it would resolve the link /proc/PID/root to another folder here."""
    with tempfile.TemporaryDirectory() as folder:
        if not stack.database_url:
            for name in ("gateway.db", "gateway.db-wal"):
                shutil.copy(stack.folder / name, folder)
        url = stack.database_url.replace("postgresql:", "postgresql+psycopg:") or f"sqlite:///{folder}/gateway.db"
        engine = sa.create_engine(url)
        with closing(engine.connect()) as connection:
            base = connection.scalar(sa.text("SELECT current_schema()")) if stack.database_url else None
            yield _Database(connection, [base, f"{base}_shard_1"] if base else [None])
        engine.dispose()


def _roots(stack: Stack) -> list[Path]:
    """Returns the folders with files: first the state folder, which is kept, then temporary ones."""
    return [stack.folder, *stack.temporary, *([stack.disk.shared_memory] if stack.disk else [])]


def _files(root: Path) -> list[Path]:
    """Returns the files that exist now, sockets included. A file may vanish meanwhile."""
    return [path for path in root.rglob("*") if not path.is_dir()] if root.exists() else []


def role(process: psutil.Process) -> str:
    """Returns a description of a process that is the same after each start."""
    words = process.cmdline()
    if "-m" in words:
        module = words[words.index("-m") + 1]
        _, is_rank, rank = process.name().partition("trainer-rank")
        return f"{module} rank {rank}" if is_rank else module
    return _NUMBERS.sub("#", " ".join(words).strip()[:60])


def _is_taken(port: int) -> bool:
    return any(one.laddr[1:2] == (port,) and one.status == psutil.CONN_LISTEN for one in psutil.net_connections("tcp"))
