"""The directory of the shards' gateways, which a router reads from their database."""

import asyncio

from fovea_gateway.database.ownership import Directory
from tests.postgresql import Server


async def test_it_closes_the_connection_of_a_read_that_its_task_no_longer_awaits(postgresql: Server) -> None:
    directory = Directory(postgresql.new_url())
    look = asyncio.create_task(directory.look())
    await asyncio.sleep(0)
    look.cancel()
    await asyncio.gather(look, return_exceptions=True)
    await directory.close()
    await directory.look()
    assert directory.shards == []
    assert directory._engine.pool.checkedin() == 0, "it must open no other"  # type: ignore[attr-defined]
