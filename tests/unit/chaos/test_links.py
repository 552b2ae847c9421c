"""A link forwards bytes in both directions, and can be cut, stalled and slowed."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from chaos.links import Link, Trouble


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    """A link to a server that echoes each line."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link("a-b", server.sockets[0].getsockname()[1])
    await link.open()
    yield link
    await link.close()
    server.close()


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"hello\n")
    return await reader.readline()


async def test_bytes_pass_and_an_end_does(link: Link) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    assert await asked(reader, writer) == b"hello\n"
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def test_a_cut_resets_connections_until_it_is_healed(link: Link) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    assert await asked(reader, writer) == b"hello\n"
    link.disturb(Trouble.CUT)
    with pytest.raises(ConnectionError):
        await asked(reader, writer)
    with pytest.raises(ConnectionError):
        await asked(*await asyncio.open_connection("127.0.0.1", link.port))
    link.disturb(Trouble.NONE)
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    assert await asked(reader, writer) == b"hello\n"
    writer.close()


async def test_what_hangs_passes_when_it_is_healed(link: Link) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    link.disturb(Trouble.HANG)
    answer = asyncio.create_task(asked(reader, writer))
    _, pending = await asyncio.wait({answer}, timeout=0.2)
    assert pending
    link.disturb(Trouble.NONE)
    assert await answer == b"hello\n"
    writer.close()


async def test_what_is_slow_takes_its_time_both_ways(link: Link) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    link.disturb(Trouble.SLOW, 0.05)
    begun = time.monotonic()
    assert await asked(reader, writer) == b"hello\n"
    assert time.monotonic() - begun >= 0.1
    writer.close()
