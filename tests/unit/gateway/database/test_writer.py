"""One gateway writes at a time, and its writes survive a lost connection exactly once."""

import asyncio
import logging
import signal

import psycopg
import pytest
import sqlalchemy as sa

from fovea.wire.errors import Internal, InvalidInput, Unavailable
from fovea_gateway.database import schema
from fovea_gateway.database.database import Database
from fovea_gateway.database.sql_engine import insert_new
from tests.postgresql import Server
from tests.waiting import eventually

COUNT = sa.select(sa.func.count()).select_from(schema.published)


def keep(owner: str) -> object:
    row = {"path": owner, "published_at": 0.0}
    return lambda connection: insert_new(connection, schema.published, row)


async def count(database: Database) -> int:
    return await database.read(lambda connection: connection.execute(COUNT).scalar_one())


async def opened(url: str) -> Database:
    database = Database(url)
    await database.open()
    return database


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fovea_gateway.database")


async def second_waits(caplog: pytest.LogCaptureFixture) -> None:
    """Waits until a gateway logs that another one owns the state."""
    await eventually(lambda: "waiting until the gateway that owns it exits" in caplog.text)


async def test_a_second_gateway_waits_for_the_first(postgresql: Server, caplog: pytest.LogCaptureFixture) -> None:
    url = postgresql.new_url()
    first = await opened(url)
    elsewhere = await opened(postgresql.new_url())  # another schema belongs to another gateway
    second = Database(url)
    waiting = asyncio.create_task(second.open())
    await first.write(keep("a"))  # type: ignore[arg-type]
    await second_waits(caplog)
    assert not waiting.done()
    await first.close()
    await waiting
    assert await second.write(keep("a")) is False  # type: ignore[arg-type]
    await second.close()
    await elsewhere.close()


async def test_one_that_waits_can_be_stopped(postgresql: Server, caplog: pytest.LogCaptureFixture) -> None:
    url = postgresql.new_url()
    first, second = await opened(url), Database(url)
    waiting = asyncio.create_task(second.open())
    await second_waits(caplog)
    waiting.cancel()
    await second.close()
    await first.close()


async def test_a_second_gateway_on_a_file_is_refused(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/gateway.db"
    first, second = await opened(url), Database(url)
    with pytest.raises(Internal, match="another gateway uses"):
        await second.open()
    await second.close()
    await first.close()
    await (await opened(url)).close()


async def test_writes_and_reads_wait_for_a_server_that_restarts(postgresql: Server) -> None:
    database = await opened(postgresql.new_url())
    writes = [asyncio.create_task(database.write(keep(f"before{number}"))) for number in range(50)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    postgresql.stop(signal.SIGQUIT)
    during = [asyncio.create_task(database.write(keep(f"during{number}"))) for number in range(50)]  # type: ignore[arg-type]
    reading = asyncio.create_task(count(database))
    await asyncio.sleep(0.5)
    assert not any(write.done() for write in during)
    postgresql.start()
    assert await asyncio.gather(*writes, *during) == [True] * 100, "no write may be lost or mistaken for a repeat"
    await reading
    assert await count(database) == 100
    await database.close()


async def test_a_commit_with_a_lost_answer_is_not_repeated(postgresql: Server) -> None:
    database = Database(postgresql.new_url())
    breaks: list[str] = []

    def break_off(connection: sa.Connection) -> None:
        if breaks:  # as if the network failed between the commit and its answer, or just before the commit
            if breaks.pop() == "after":
                connection.connection.driver_connection.commit()  # type: ignore[union-attr]
            raise sa.exc.OperationalError("COMMIT", {}, psycopg.OperationalError("server closed the connection"))

    sa.event.listen(database._engine, "commit", break_off)
    await database.open()
    for when in ("before", "after"):
        breaks.append(when)
        assert await database.write(keep(when)) is True, "the row must be new, whichever attempt wrote it"  # type: ignore[arg-type]
        assert not breaks
    assert await count(database) == 2
    await database.close()


async def test_a_superseded_gateway_writes_nothing(postgresql: Server, caplog: pytest.LogCaptureFixture) -> None:
    url = postgresql.new_url()
    gone = asyncio.Event()
    first, second = Database(url, on_superseded=gone.set), Database(url)
    await first.open()
    taking_over = asyncio.create_task(second.open())
    await second_waits(caplog)
    # The first one's session ends unnoticed, which the second one waits for.
    postgresql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity JOIN pg_locks USING (pid)"
        " WHERE locktype = 'advisory' AND granted"
    )
    await taking_over
    with pytest.raises(Unavailable, match="another gateway has taken over"):
        await first.write(keep("late"))  # type: ignore[arg-type]
    assert gone.is_set()
    assert await count(second) == 0
    await first.close()
    await second.close()


async def test_closing_does_not_wait_for_a_server_that_is_away(postgresql: Server) -> None:
    database = await opened(postgresql.new_url())
    postgresql.stop()
    write = asyncio.create_task(database.write(keep("never")))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await database.close()
    with pytest.raises(Unavailable, match="send this request again"):
        await write
    postgresql.start()


async def test_a_value_that_cannot_be_stored_is_the_clients_error(postgresql: Server) -> None:
    database = await opened(postgresql.new_url())
    with pytest.raises(InvalidInput, match="NUL"):
        await database.write(keep("a\0b"))  # type: ignore[arg-type]
    assert await database.write(keep("a" * 3000)) is True, "no length may be enforced that SQLite does not enforce"  # type: ignore[arg-type]
    await database.close()
