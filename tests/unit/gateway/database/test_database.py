"""The single writer."""

import asyncio
import threading

import pytest
import sqlalchemy as sa

from fovea.wire.errors import Unavailable
from fovea_gateway.database import database as database_module
from fovea_gateway.database import schema
from fovea_gateway.database.database import Database
from fovea_gateway.database.sql_engine import insert_new


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


async def test_a_change_that_is_of_no_use_later_has_no_effect_once_the_database_is_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "SOON_S", 0.2)
    monkeypatch.setattr(database_module, "_COMMIT_S", 0.1)
    database = Database(database_url)
    await database.open()
    began, back = threading.Event(), threading.Event()
    waiting = asyncio.create_task(database.write(lambda connection: began.set() or back.wait(30)))
    assert await asyncio.to_thread(began.wait, 30)
    with pytest.raises(Unavailable, match="has not answered for 0 s, so nothing is changed"):
        await database.write_soon(keep("a"))  # type: ignore[arg-type]
    back.set()
    assert await waiting

    def slow(connection: sa.Connection) -> object:
        threading.Event().wait(1)
        return keep("late")(connection)  # type: ignore[operator]

    with pytest.raises(Unavailable, match="may still take effect"):
        await database.write_soon(slow)
    await database.write(lambda connection: None)  # waits for the slow change
    monkeypatch.setattr(database_module, "SOON_S", 30.0)
    await database.write_soon(keep("b"))  # type: ignore[arg-type]
    found = await database.read(lambda c: sorted(c.scalars(sa.select(schema.published.c.path))))
    assert found == ["b", "late"]
    await database.close()


async def test_insert_new_tells_new_from_known(database_url: str) -> None:
    database = Database(database_url)
    await database.open()
    row = {"path": "a", "published_at": 0.0}
    assert await database.write(lambda c: insert_new(c, schema.published, row)) is True
    assert await database.write(lambda c: insert_new(c, schema.published, row)) is False
    await database.close()


async def test_a_read_that_gets_no_connection_is_refused_for_now(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(database_url)
    await database.open()
    held = [database._engine.connect() for _ in range(4)]  # the writer has the fifth
    monkeypatch.setattr(database._engine.pool, "_timeout", 0.1)
    with pytest.raises(Unavailable, match="could not run this now"):
        await database.read(lambda c: c.scalar(sa.text("SELECT 1")))
    for connection in held:
        connection.close()
    assert await database.read(lambda c: c.scalar(sa.text("SELECT 1"))) == 1
    await database.close()
