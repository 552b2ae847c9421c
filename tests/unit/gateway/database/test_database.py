"""The single writer."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from fovea.wire.errors import Internal
from gateway.access import key_rows as keys
from gateway.database import schema
from gateway.database.database import Database, insert_new


def keep(owner: str) -> object:
    row = {"path": owner, "published_at": 0.0}
    return lambda connection: connection.execute(sa.insert(schema.published).values(**row)).rowcount


async def test_one_bad_job_does_not_fail_its_neighbours(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    await database.write(keep("taken"))  # type: ignore[arg-type]
    jobs = [keep(f"o{i}") if i != 5 else keep("taken") for i in range(10)]
    results = await asyncio.gather(*(database.write(job) for job in jobs), return_exceptions=True)  # type: ignore[arg-type]
    assert [isinstance(result, sa.exc.IntegrityError) for result in results] == [i == 5 for i in range(10)]
    count = await database.read(lambda c: c.execute(sa.select(sa.func.count()).select_from(schema.published)).scalar())
    assert count == 10
    await database.close()


async def test_readers_and_hundreds_of_writers_never_lock_each_other_out(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    counting = sa.select(sa.func.count()).select_from(schema.published)
    reads = [database.read(lambda c: c.execute(counting).scalar()) for _ in range(100)]
    await asyncio.gather(*(database.write(keep(f"o{i}")) for i in range(500)), *reads)  # type: ignore[arg-type]
    assert await database.read(lambda c: c.execute(counting).scalar()) == 500
    await database.close()


async def test_insert_new_tells_new_from_known(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    row = {"path": "a", "published_at": 0.0}
    assert await database.write(lambda c: insert_new(c, schema.published, row)) is True
    assert await database.write(lambda c: insert_new(c, schema.published, row)) is False
    await database.close()


async def test_a_database_of_another_version_is_refused(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    await database.write(lambda c: c.execute(sa.update(schema.schema_version).values(version=99)))
    await database.close()
    other = Database(database_url)
    with pytest.raises(Internal, match="schema 99"):
        await other.open()
    await other.close()


async def test_a_database_of_the_first_version_gets_todays_tables(tmp_path: Path) -> None:
    def shape(connection: sa.Connection) -> dict[str, tuple[set[str], set[str | None]]]:
        inspector = sa.inspect(connection)
        return {
            table: (
                {column["name"] for column in inspector.get_columns(table)},
                {index["name"] for index in inspector.get_indexes(table)},
            )
            for table in inspector.get_table_names()
        }

    new, old = Database(f"sqlite:///{tmp_path / 'new.db'}"), f"sqlite:///{tmp_path / 'old.db'}"
    await new.open()
    first = sa.MetaData()
    added = {"display_name", "followed_model_id", "client_count", "finish_number", "is_accumulating"}
    for table in schema.metadata.tables.values():
        if table is schema.keys:
            continue
        columns = [column._copy() for column in table.columns if column.name not in added]
        for column in columns:
            column.index = column.index and column.name != "snapshot_id"
        sa.Table(table.name, first, *columns)
    texts = [sa.Column(name, sa.Text, nullable=False) for name in ("owner", "key_hash")]
    api_keys = sa.Table("api_keys", first, *texts, sa.Column("created_at", sa.Float, nullable=False))
    engine = sa.create_engine(old)
    with engine.begin() as connection:
        first.create_all(connection)
        connection.execute(sa.insert(schema.schema_version).values(version=1))
        owned = {"owner": "key-012345678901", "key_hash": f"{12345678901:064d}", "created_at": 7.0}
        connection.execute(sa.insert(api_keys).values(owned))
    engine.dispose()
    for _ in range(2):
        database = Database(old)
        await database.open()
        assert await database.read(shape) == await new.read(shape)
        (key,) = await database.read(keys.every)
        assert (key.owner, key.key_hash, key.created_at) == tuple(owned.values()), "its data stays its own"
        await database.close()
    await new.close()
