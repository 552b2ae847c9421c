"""Several gateways own one shard each of the sessions in one PostgreSQL; some tables are shared."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from fovea.wire.errors import InvalidInput, ResourceExhausted, Unavailable
from fovea_gateway.database import schema
from fovea_gateway.database.database import Database
from fovea_gateway.database.migrations import downgrade_database, find_revision
from fovea_gateway.database.ownership import Directory, ShardOwner, Shards, shard_of, write_owner
from fovea_gateway.database.sql_engine import insert_new
from fovea_gateway.sessions.sessions import Session, Sessions, get_session, insert_session, list_sessions
from tests.postgresql import Server
from tests.unit.gateway.sessions.test_sessions import make_sessions

COUNT = 3


@pytest.fixture
async def shards(postgresql: Server) -> AsyncIterator[list[Database]]:
    """The databases of the gateways, by shard."""
    url = postgresql.new_url()
    opened = [Database(url, shard_count=COUNT) for _ in range(COUNT)]
    await asyncio.gather(*(each.open() for each in opened))
    yield sorted(opened, key=lambda each: each.shards.number)
    for each in opened:
        await each.close()


async def add_session(database: Database, created_at: float = 0.0) -> str:
    """Stores a session of the gateway's shard; returns its id."""
    session = Session(database.shards.new_session_id(secrets.token_hex(8)), "ann", created_at=created_at)
    assert await database.write(lambda connection: insert_session(connection, session))
    return session.session_id


async def test_each_gateway_owns_another_shard_and_has_sessions_of_its_own(shards: list[Database]) -> None:
    assert [each.shards.number for each in shards] == list(range(COUNT))
    ids = [await add_session(each) for each in shards]
    assert [shard_of(session_id) for session_id in ids] == list(range(COUNT))
    for owner in shards:
        found = [await owner.read(lambda c, i=session_id: get_session(c, i)) for session_id in ids]  # type: ignore[misc]
        assert [session is not None for session in found] == [number == owner.shards.number for number in range(COUNT)]


async def test_the_whole_is_read_by_any_gateway(shards: list[Database]) -> None:
    ids = [await add_session(each, float(at)) for at, each in enumerate(shards)]
    for each in shards:
        assert await each.read_whole(lambda c: list_sessions(c, "ann", 10, 0)) == ids[::-1]
        assert await each.read_whole(lambda c: list_sessions(c, "ann", 1, 1)) == [ids[1]]


async def test_the_whole_is_read_while_a_shard_awaits_its_upgrade(postgresql: Server) -> None:
    url = postgresql.new_url()
    opened = [Database(url, shard_count=2) for _ in range(2)]
    for each in opened:
        await each.open()
    ids = [await add_session(each, float(at)) for at, each in enumerate(opened)]
    for each in opened:
        await each.close()
    downgrade_database(url, 5)
    late = f"{url.rpartition('%3D')[2]}_shard_1"
    postgresql.execute(f"DROP TABLE {late}.run_labels")
    first, second = (Database(url, shard_count=2) for _ in range(2))
    await first.open()

    async def found() -> dict[str, tuple[float | None, int]]:
        columns = (schema.sessions.c.session_id, schema.sessions.c.parked_at, schema.sessions.c.parked_bytes)
        return await first.read_whole(lambda c: {row[0]: (row[1], row[2]) for row in c.execute(sa.select(*columns))})

    assert await found() == dict.fromkeys(ids, (None, 0))
    assert await first.read_whole(lambda c: list(c.execute(sa.select(schema.run_labels)))) == []
    await second.open()
    await second.write(lambda c: c.execute(sa.update(schema.sessions).values(parked_at=2.0, parked_bytes=3)))
    assert await found() == {ids[0]: (None, 0), ids[1]: (2.0, 3)}, "and not as before the upgrade"
    await first.close()
    await second.close()


async def test_common_tables_are_one(shards: list[Database]) -> None:
    row = {"path": "tinker://a/weights/b", "published_at": 0.0}
    results = await asyncio.gather(*(each.write(lambda c: insert_new(c, schema.published, row)) for each in shards))
    assert sorted(results) == [False, False, True]
    query = sa.select(schema.published.c.path)
    assert [await each.read(lambda c: list(c.scalars(query))) for each in shards] == [[row["path"]]] * COUNT


async def test_a_request_key_opens_one_session_in_all_shards(shards: list[Database]) -> None:
    each_sessions = [make_sessions(each, 100) for each in shards]

    async def create(sessions: Sessions, key: str) -> str:
        while True:
            try:
                return (await sessions.create("ann", [], {}, key)).session_id
            except Unavailable:  # of a request with the same key, which another gateway answers just now
                await asyncio.sleep(0.01)

    first = await create(each_sessions[0], "first")
    assert {await create(each, "first") for each in each_sessions} == {first}
    for number in range(10):
        opened = await asyncio.gather(*(create(each, f"at once {number}") for each in each_sessions))
        assert len(set(opened)) == 1
    assert len(await shards[1].read_whole(lambda c: list_sessions(c, "ann", 100, 0))) == 11


async def test_a_full_gateway_finds_the_session_that_another_one_opened_for_the_key(shards: list[Database]) -> None:
    each_sessions = [make_sessions(each, 1) for each in shards]
    opened = [await sessions.create("ann", [], {}, str(at)) for at, sessions in enumerate(each_sessions)]
    assert (await each_sessions[0].create("ann", [], {}, "2")).session_id == opened[2].session_id
    with pytest.raises(ResourceExhausted):
        await each_sessions[0].create("ann", [], {}, "3")


async def test_a_shard_that_is_being_upgraded_delays_only_what_needs_all_shards(shards: list[Database]) -> None:
    sessions = make_sessions(shards[0], 100)
    first = await sessions.create("ann", [], {}, "first")
    is_locked, ends = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def upgrade(connection: sa.Connection) -> None:
        connection.execute(sa.text("LOCK TABLE sessions IN ACCESS EXCLUSIVE MODE"))
        loop.call_soon_threadsafe(is_locked.set)
        ends.wait()

    upgrading = asyncio.create_task(shards[1].write(upgrade))
    try:
        await is_locked.wait()
        delayed = [asyncio.create_task(shards[0].read_whole(lambda c: list_sessions(c, "ann", 9, 0))) for _ in range(9)]
        with pytest.raises(Unavailable, match="now"):
            await sessions.create("ann", [], {}, "second")
        assert (await sessions.create("ann", [], {}, "first")).session_id == first.session_id
        kept = await add_session(shards[0])
        assert await shards[0].read(lambda c: get_session(c, kept)) is not None
        assert not any(task.done() for task in delayed)
    finally:
        ends.set()
    await upgrading
    assert {len(found) for found in await asyncio.gather(*delayed)} == {2}
    assert (await sessions.create("ann", [], {}, "second")).session_id != first.session_id


async def test_a_search_in_other_shards_leaves_the_patience_of_later_statements(shards: list[Database]) -> None:
    def search(connection: sa.Connection) -> tuple[str, bool, str]:
        show = sa.text("SHOW lock_timeout")
        before, same = connection.scalar(show), {"owner": "ann", "request_key": "none"}
        found = shards[0].shards.is_elsewhere(connection, schema.sessions.name, same)
        return str(before), found, str(connection.scalar(show))

    assert await shards[0].write(search) == ("0", False, "0")


async def test_a_waiting_gateway_takes_the_shard_that_becomes_free(postgresql: Server) -> None:
    url = postgresql.new_url()
    first, second, third = (Database(url, shard_count=2) for _ in range(3))
    await asyncio.gather(first.open(), second.open())
    waiting = asyncio.create_task(third.open())
    kept = await add_session(second)
    await asyncio.sleep(0.5)
    assert not waiting.done()
    second.abandon()
    await waiting
    assert third.shards.number == second.shards.number
    assert await third.read(lambda c: get_session(c, kept)) is not None
    await first.close()
    await third.close()


async def test_a_router_waits_for_a_shard_if_its_gateway_owns_another_one_since_a_restart(postgresql: Server) -> None:
    url = postgresql.new_url()
    database, directory = Database(url, shard_count=2), Directory(url)
    await database.open()
    before = ShardOwner(0, "127.0.0.1:1", "127.0.0.1:2", {}, 10.0)
    for owner in (before, before._replace(shard=1, updated_at=11.0)):
        await database.write(lambda connection, owner=owner: write_owner(connection, owner))  # type: ignore[misc]
    await directory.look()
    assert (await directory.owner(1)).rest == "127.0.0.1:1"
    waiting = asyncio.create_task(directory.owner(0))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    after = ShardOwner(0, "127.0.0.1:3", "127.0.0.1:4", {}, 12.0)
    await database.write(lambda connection: write_owner(connection, after))
    await directory.look()
    assert await waiting == after
    await directory.close()
    await database.close()


async def test_a_gateway_without_shards_becomes_shard_0(postgresql: Server) -> None:
    url = postgresql.new_url()
    alone = Database(url)
    await alone.open()
    kept = await add_session(alone)
    assert shard_of(kept) == 0
    await alone.close()
    opened = [Database(url, shard_count=2) for _ in range(2)]
    await asyncio.gather(*(each.open() for each in opened))
    for each in opened:
        found = await each.read(lambda c: get_session(c, kept))
        assert (found is not None) == (each.shards.number == 0)
        assert await each.read(find_revision) == schema.REVISION
        await each.close()


def test_an_id_names_its_shard() -> None:
    session = Shards().new_session_id("0123456789abcdef")
    assert shard_of(session) == 0
    assert shard_of(f"{session}:train:3") == 0
    for text in ("sess-0123456789abcdef-12", "tinker://sess-0123456789abcdef-12:train:0/weights/a-1"):
        assert shard_of(text) == 12
    assert shard_of("tinker://upload-1234567890-0123456789abcdef/external_weights/a") is None


def test_sqlite_has_no_shards(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="PostgreSQL"):
        Database(f"sqlite:///{tmp_path / 'gateway.db'}", shard_count=2)
