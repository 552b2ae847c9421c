"""A gateway creates its tables, upgrades those of earlier gateways atomically, and refuses those of later ones."""

from collections.abc import Callable

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from fovea.wire.errors import FailedPrecondition, Internal, Unavailable
from fovea_gateway.access.api_keys import all_keys
from fovea_gateway.database import migrations, schema
from fovea_gateway.database.database import Database
from fovea_gateway.database.revisions import DOWNGRADES, UPGRADES
from fovea_gateway.database.sql_engine import make_engine, parse_url
from tests.postgresql import Server

_BACK = {
    4: [
        "DROP TABLE alembic_version",
        "ALTER TABLE keys DROP COLUMN scope",
        "ALTER TABLE futures DROP COLUMN key_id",
        "ALTER TABLE futures DROP COLUMN token_count",
        "DROP TABLE journal",
        "DROP TABLE journal_requests",
        "ALTER TABLE models DROP COLUMN journaled_since",
        "ALTER TABLE models DROP COLUMN model_files",
        "ALTER TABLE sessions DROP COLUMN parked_at",
        "ALTER TABLE sessions DROP COLUMN parked_bytes",
        "ALTER TABLE audit_entries DROP COLUMN new_values",
    ],
    3: ["ALTER TABLE models DROP COLUMN is_accumulating"],
    2: [
        "DROP TABLE keys",
        "CREATE TABLE api_keys (key_hash TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at FLOAT NOT NULL)",
        "INSERT INTO api_keys (key_hash, owner, created_at) VALUES (:key_hash, :owner, :created_at)",
    ],
    1: [
        "DROP INDEX futures_by_finish",
        "ALTER TABLE futures DROP COLUMN finish_number",
        "DROP INDEX ix_sampling_sessions_snapshot_id",
        "DROP INDEX ix_sampling_sessions_followed_model_id",
        "ALTER TABLE sampling_sessions DROP COLUMN client_count",
        "ALTER TABLE sampling_sessions DROP COLUMN followed_model_id",
        "ALTER TABLE sessions DROP COLUMN display_name",
    ],
}
"""Statements that turn the tables of the next version into those of a version before alembic."""
_OWNED = {"owner": "key-012345678901", "key_hash": f"{12345678901:064d}", "created_at": 7.0}


_FUTURE = sa.insert(schema.futures).values(
    future_id="f", kind="sample", owner="o", session_id="s", scope="s", seq_id=1, state="queued", created_at=1.0
)


def run(url: str, work: Callable[[sa.Connection], object]) -> None:
    """Runs a function in its own transaction, without a gateway."""
    engine = make_engine(parse_url(url), 1)
    with engine.begin() as connection:
        work(connection)
    engine.dispose()


def make_tables(connection: sa.Connection, version: int) -> None:
    """Creates the tables of a version as gateways before alembic left them; below 3 with a key of that time."""
    schema.metadata.create_all(connection)
    connection.execute(sa.insert(schema.schema_version).values(version=version))
    for later in range(4, version - 1, -1):
        for statement in _BACK[later]:
            connection.execute(sa.text(statement), _OWNED)


def differences(connection: sa.Connection) -> list[object]:
    """Returns the changes that alembic would need to get today's tables."""
    options = {"include_object": lambda _, name, *others: name != schema.alembic_version.name}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata))


def test_the_last_revision_is_that_of_a_new_database() -> None:
    assert [*UPGRADES] == list(range(2, int(schema.REVISION) + 1))


async def test_new_tables_are_those_of_the_last_revision(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    assert await database.read(differences) == []
    assert await database.read(migrations.find_revision) == schema.REVISION
    await database.close()


@pytest.mark.parametrize("version", [1, 2, 3, 4])
async def test_tables_of_an_earlier_version_become_todays(database_url: str, version: int) -> None:
    run(database_url, lambda connection: make_tables(connection, version))
    for _ in range(2):  # the second start has nothing to do
        database = Database(database_url)
        await database.open()
        assert await database.read(differences) == []
        assert await database.read(migrations.find_revision) == schema.REVISION
        numbers = await database.read(lambda c: c.execute(sa.select(schema.schema_version.c.version)).scalars().all())
        assert numbers == [int(schema.REVISION)], (
            "gateways from before alembic must recognise these tables or refuse them"
        )
        if version < 3:
            (key,) = await database.read(all_keys)
            assert (key.owner, key.key_hash, key.created_at) == tuple(_OWNED.values()), "its data must stay its own"
        await database.close()


async def test_a_migration_that_fails_changes_nothing(database_url: str) -> None:
    def break_something(connection: sa.Connection) -> None:
        make_tables(connection, 1)
        schema.alembic_version.create(connection)
        connection.execute(sa.insert(schema.alembic_version).values(version_num="1"))
        connection.execute(sa.text("ALTER TABLE api_keys RENAME TO lost"))

    run(database_url, break_something)
    broken = Database(database_url)
    with pytest.raises(Unavailable, match="api_keys"):
        await broken.open()
    await broken.close()
    run(database_url, lambda connection: connection.execute(sa.text("ALTER TABLE lost RENAME TO api_keys")))
    database = Database(database_url)
    await database.open()
    assert await database.read(differences) == []
    await database.close()


@pytest.mark.parametrize("kept_in", ["alembic_version", "schema_version"])
async def test_a_database_of_another_version_is_refused(database_url: str, kept_in: str) -> None:
    database = Database(database_url)
    await database.open()
    await database.close()

    def come_from_elsewhere(connection: sa.Connection) -> None:
        if kept_in == "alembic_version":
            connection.execute(sa.update(schema.alembic_version).values(version_num="99"))
        else:
            schema.alembic_version.drop(connection)
            connection.execute(sa.update(schema.schema_version).values(version=99))

    run(database_url, come_from_elsewhere)
    other = Database(database_url)
    with pytest.raises(Internal, match="schema 99"):
        await other.open()
    await other.close()


async def test_a_database_of_another_program_is_refused(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    await database.close()
    run(database_url, lambda c: c.execute(sa.update(schema.alembic_version).values(version_num="ae1027a6acf")))
    other = Database(database_url)
    with pytest.raises(Internal, match="belongs to another program"):
        await other.open()
    await other.close()


def columns(connection: sa.Connection) -> dict[str, list[tuple[str, str, bool]]]:
    """Returns name, type and nullability of each column by table, and the indexes."""
    seen = sa.inspect(connection)
    return {
        table: [(each["name"], str(each["type"]), each["nullable"]) for each in seen.get_columns(table)]
        + [(str(each["name"]), "index", each["unique"]) for each in seen.get_indexes(table)]
        for table in seen.get_table_names()
    }


def fill_in(connection: sa.Connection) -> None:
    """Inserts keys of each scope and a future."""
    for number, scope in enumerate(("train", "read", "admin")):
        connection.execute(
            sa.insert(schema.keys).values(
                key_id=f"key-{number}",
                key_hash=f"{number:064d}",
                owner="o",
                name=scope,
                source="made",
                created_at=1.0,
                scope=scope,
            )
        )
    connection.execute(_FUTURE)


async def test_the_way_back_leads_to_the_tables_of_then_and_forth_again(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    await database.write(fill_in)
    with pytest.raises((FailedPrecondition, Internal), match="gateway"):
        migrations.downgrade_database(database_url, 4)
    await database.close()
    migrations.downgrade_database(database_url, 4)
    seen: dict[str, object] = {}

    def look(connection: sa.Connection) -> None:
        seen["revision"], seen["tables"] = migrations.find_revision(connection), columns(connection)
        valid = "SELECT key_id FROM keys WHERE revoked_at IS NULL"
        seen["valid"] = connection.execute(sa.text(valid)).scalars().all()
        seen["futures"] = connection.execute(sa.text("SELECT future_id FROM futures")).scalars().all()
        for table in reversed(schema.metadata.sorted_tables):
            table.drop(connection)
        make_tables(connection, 4)
        seen["tables of then"] = {table: found for table, found in columns(connection).items()}

    run(database_url, look)
    assert (seen["revision"], seen["valid"], seen["futures"]) == ("4", ["key-0"], ["f"])
    then = seen["tables of then"]
    assert isinstance(then, dict)
    assert {table: found for table, found in seen["tables"].items() if table in then} == then  # type: ignore[attr-defined]
    database = Database(database_url)
    await database.open()
    assert await database.read(differences) == []
    await database.close()


async def test_the_way_back_leads_through_all_shards(postgresql: Server, capsys: pytest.CaptureFixture[str]) -> None:
    url = postgresql.new_url()
    schemas = [base := url.rpartition("%3D")[2], f"{base}_shard_1", f"{base}_shard_2"]

    async def start() -> list[Database]:
        databases = [Database(url, shard_count=3) for _ in schemas]
        for each in databases:
            await each.open()
        return databases

    def found(column: str, table: str) -> list[object]:
        return [postgresql.execute(f"SELECT {column} FROM {each}.{table}") for each in schemas]

    first, *others = await start()
    await first.write(fill_in)
    for each in others:
        await each.write(lambda connection: connection.execute(_FUTURE))
    await first.close()
    await others[0].close()
    with pytest.raises(FailedPrecondition, match="stop all gateways"):
        migrations.downgrade_database(url, 4)  # the gateway of the last shard still runs
    assert found("version_num", "alembic_version") == [[(schema.REVISION,)]] * 3
    await others[1].close()
    migrations.downgrade_database(url, 4)
    assert "those of 2 other shards stay" in capsys.readouterr().out
    assert found("version_num", "alembic_version") == [[("4",)]] * 3
    assert found("version", "schema_version") == [[(4,)]] * 3
    for each in schemas:
        with pytest.raises(psycopg.errors.UndefinedColumn):
            postgresql.execute(f"SELECT key_id FROM {each}.futures")
    assert found("future_id", "futures") == [[("f",)]] * 3

    for database in await start():
        assert await database.read(differences) == []
        await database.close()
    assert found("version_num", "alembic_version") == [[(schema.REVISION,)]] * 3
    assert found("key_id", "futures") == [[("",)]] * 3


def test_every_version_knows_the_way_back() -> None:
    without = [revision for revision in UPGRADES if revision > 4 and revision not in DOWNGRADES]
    assert without == [], "write a downgrade, for operators who go back to the last release (docs/guides/durability.md)"


async def test_no_further_back_than_is_known(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    await database.close()
    for revision in (3, int(schema.REVISION)):
        with pytest.raises(FailedPrecondition, match=f"cannot be downgraded to {revision}"):
            migrations.downgrade_database(database_url, revision)
