"""Sessions over a real database that can refuse a write."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fovea.runtime.durable import ExpiryClock
from fovea.wire.errors import ResourceExhausted, Unavailable
from fovea_gateway.access.kept_rows import KeptRows
from fovea_gateway.access.owners import Quota
from fovea_gateway.database.database import Database
from fovea_gateway.sessions.sessions import Sessions


class Failing(Database):
    """A database that can refuse the next write."""

    refuses = False

    async def write(self, job: Any) -> Any:
        if self.refuses:
            self.refuses = False
            raise Unavailable("refused")
        return await super().write(job)


async def _forget(model_id: str) -> None:
    """Does nothing, because there are no checkpoints."""


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Failing]:
    opened = Failing(database_url)
    await opened.open()
    yield opened
    await opened.close()


def make_sessions(database: Database, capacity: int = 2) -> Sessions:
    rows = KeptRows(database, 2**20, 3600.0, ExpiryClock(), _forget)
    return Sessions(database, 60.0, Quota("max_sessions", capacity, "sessions"), rows, 60.0)


async def test_a_repeated_creation_finds_its_session_although_the_owner_has_no_share_left(database: Failing) -> None:
    sessions = make_sessions(database)
    first = await sessions.create("owner", [], {}, "key")
    with pytest.raises(ResourceExhausted):
        await sessions.create("owner", [], {}, "another key")
    assert await sessions.create("owner", [], {}, "key") is first


async def test_an_end_that_is_not_stored_leaves_the_session_open(database: Failing) -> None:
    sessions = make_sessions(database)
    session = await sessions.create("owner", [], {}, None)
    database.refuses = True
    with pytest.raises(Unavailable):
        await sessions.finish("owner", session.session_id, "success", None)
    assert (await sessions.require("owner", session.session_id)).ended_at is None
    with pytest.raises(ResourceExhausted):
        await sessions.create("owner", [], {}, None)  # its share is still in use
    await sessions.finish("owner", session.session_id, "success", None)
    assert await sessions.next_ended() is session


async def test_parking_and_resuming_that_are_not_stored_change_nothing(database: Failing) -> None:
    sessions = make_sessions(database)
    session = await sessions.create("owner", [], {}, None)
    database.refuses = True
    with pytest.raises(Unavailable):
        await sessions.park(session, 10)
    assert (session.parked_at, session.parked_bytes) == (None, 0)
    assert sessions.cached(session.session_id) is session
    with pytest.raises(ResourceExhausted):
        await sessions.create("owner", [], {}, None)
    await sessions.park(session, 10)
    database.refuses = True
    with pytest.raises(Unavailable):
        await sessions.require("owner", session.session_id)
    assert [one.session_id for one in await sessions.parked("owner")] == [session.session_id]
    resumed = await sessions.require("owner", session.session_id)
    assert resumed.parked_at is None
    assert await sessions.parked("owner") == []
