"""Idle, oversized and excess connections are closed, while health checks are still answered."""

import asyncio
import logging
import socket
import struct

import pytest

from fovea_gateway.http import connections
from fovea_gateway.http.connections import MAX_HEAD_BYTES, MAX_HEADERS, Seldom
from tests.contract.gateway.conftest import Stand

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CAPABILITIES = b"GET /api/v1/get_server_capabilities HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: tml-local\r\n\r\n"
HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: a\r\n\r\n"


async def connect(stand: Stand, data: bytes = b"") -> Pair:
    """Opens a bare connection and sends some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
    writer.write(data)
    return reader, writer


async def ending(pair: Pair) -> bytes:
    """Reads until the server closes the connection."""
    received = b""
    try:
        async with asyncio.timeout(20):
            while piece := await pair[0].read(65536):
                received += piece
    except ConnectionError:
        pass
    pair[1].close()
    return received


async def none_open(stand: Stand) -> None:
    """Waits until the gateway counts no connection."""
    assert stand.gateway is not None
    async with asyncio.timeout(20):
        while len(stand.gateway.connections):  # noqa: ASYNC110 (a count, not an event of this process)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"GET /api/v1/healthz HTTP/1.1\r\nHost:",
        HEALTH + b"GET /",
        b"POST /api/v1/create_session HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "lines", "half a head", "half of a second head", "half a body"],
)
async def test_a_connection_with_half_a_request_is_closed(stand: Stand, data: bytes) -> None:
    await stand.stop()
    await stand.start(request_timeout_s=0.3)
    await ending(await connect(stand, data))
    await none_open(stand)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 4 * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 4 * MAX_HEADERS,
        b"GET /" + b"a" * 4 * MAX_HEAD_BYTES,
    ],
    ids=["a long header", "many headers", "a long path"],
)
async def test_a_head_has_an_end(stand: Stand, data: bytes) -> None:
    assert b"200 OK" not in await ending(await connect(stand, data))


def test_warnings_caused_by_strangers_are_limited_to_one_per_second_each() -> None:
    seldom, said = Seldom(), []
    for created, level, text in [
        (7.0, logging.WARNING, "closed because %s"),
        (7.1, logging.WARNING, "closed because %s"),
        (7.2, logging.WARNING, "closed because %s"),
        (7.3, logging.WARNING, "invalid"),
        (7.4, logging.ERROR, "failed"),
        (7.5, logging.ERROR, "failed"),
        (8.1, logging.WARNING, "closed because %s"),
        (2.0, logging.WARNING, "closed because %s"),  # the clock was set back
    ]:
        record = logging.LogRecord("a", level, "", 0, text, ("b",) if "%" in text else (), None)
        record.created = created
        if seldom.filter(record):
            said.append(record.getMessage())
    assert said == [
        "closed because b",
        "invalid",
        "failed",
        "failed",
        "closed because b (2 more since the last one)",
        "closed because b",
    ]


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\r\n\r\n", HEALTH.replace(b"Host: a", b"Connection: upgrade\r\nUpgrade: websocket")],
    ids=["no request", "an upgrade"],
)
async def test_no_bad_request_has_a_line_of_its_own(
    stand: Stand, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(connections, "_SAY_EVERY_S", 24 * 3600.0)
    monkeypatch.setattr(connections.logger, "filters", [Seldom()])
    for _ in range(50):
        reader, writer = await connect(stand, data)
        assert await asyncio.wait_for(reader.readline(), 20)
        writer.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings
    assert len(warnings) == len(set(warnings)), "each message is logged once, whichever logger emits it"


async def test_health_is_answered_while_idle_connections_take_all_places(stand: Stand) -> None:
    await stand.stop()
    await stand.start(max_connections=20)
    idle = [await connect(stand) for _ in range(60)]
    reader, writer = await connect(stand, HEALTH)
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), 20)
    for pair in idle[:40]:
        assert await ending(pair) == b"", "the oldest connections must be closed first"
    for _, other in (*idle, (reader, writer)):
        other.close()


WORKING = (
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: tml-local\r\nContent-Length: 900\r\n\r\n"
)
"""The start of a request; its body is incomplete."""


async def connect_from(stand: Stand, address: str, data: bytes) -> Pair:
    """Connects from another address of this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.port, local_addr=(address, 0))
    writer.write(data)
    return reader, writer


async def test_one_address_with_slow_bodies_in_all_places_leaves_room_for_others(stand: Stand) -> None:
    await stand.stop()
    await stand.start(max_connections=20)
    slow = [await connect(stand, WORKING) for _ in range(60)]
    await asyncio.sleep(0.3)
    own = await connect(stand, CAPABILITIES)
    assert b"503 " in await asyncio.wait_for(own[0].readline(), 20), (
        "further connections of the same address are refused with 503"
    )
    served = [await connect_from(stand, "127.0.0.2", CAPABILITIES) for _ in range(5)]
    for reader, _ in served:
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), 20)
    for _, writer in (*slow, *served, own):
        writer.close()


async def test_the_address_with_most_idle_connections_loses_some_first(stand: Stand) -> None:
    await stand.stop()
    await stand.start(max_connections=20)
    early = [await connect_from(stand, "127.0.0.2", CAPABILITIES) for _ in range(3)]
    for reader, _ in early:
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), 20)
    idle = [await connect(stand) for _ in range(60)]
    for pair in idle[:40]:
        assert await ending(pair) == b""
    for _, writer in early:
        assert not writer.transport.is_closing()
        writer.write(CAPABILITIES)
    for reader, _ in early:
        assert await asyncio.wait_for(reader.readuntil(b"200 OK"), 20)
    for _, other in (*early, *idle):
        other.close()


UPGRADE = (
    b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
RESET = struct.pack("ii", 1, 0)


@pytest.mark.parametrize(
    "data",
    [
        HEALTH + UPGRADE,
        UPGRADE,
        UPGRADE.replace(b"websocket", b"h2c"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEALTH * 5,
        HEALTH * 40,
        WORKING + b"{",
        b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"",
    ],
    ids=[
        "upgrade after a request",
        "upgrade",
        "h2c",
        "HTTP/2",
        "pipelined",
        "too many",
        "half a body",
        "CONNECT",
        "none",
    ],
)
@pytest.mark.parametrize("ended_by", ["close", "reset", "half close"])
async def test_the_count_of_connections_returns_to_zero(stand: Stand, data: bytes, ended_by: str) -> None:
    """Every way to close a connection decrements the count. A leak of 10,064 connections once stopped the gateway for
    good.
    """
    for _ in range(3):
        reader, writer = await connect(stand, data)
        await asyncio.sleep(0.05)
        if ended_by == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if ended_by == "half close":
            writer.write_eof()
            await ending((reader, writer))
        else:
            writer.close()
    await none_open(stand)


async def test_a_request_has_no_caller_of_another_on_its_connection(stand: Stand) -> None:
    """Errors of unauthenticated requests were attributed to an earlier caller on the same proxied connection."""
    body = b'{"session_id":"' + b"x" * 300_000 + b'"}'
    head = b"POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: tml-local\r\nContent-Length: %d\r\n\r\n"
    reader, writer = await connect(stand, head % len(body) + body)
    answers = [await answer_of(reader)]
    for request in (
        b"GET /api/v1/exports/a/external_weights/b/c?expires=9&signature=x HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /api/v1/sessions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: tml-wrong\r\n\r\n",
    ):
        writer.write(request)
        answers.append(await answer_of(reader))
    writer.close()
    assert [answer.split()[1] for answer in answers] == [b"400", b"403", b"401"]
    assert stand.gateway is not None
    live_state = stand.gateway.components.live_state
    await live_state.tick()
    noted = {error.what for owner, error in live_state.errors(None) if owner}
    assert noted == {"asample"}


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """Returns the status line of an answer after reading its body."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head.partition(b"\r\n")[0]


@pytest.mark.parametrize("header", [b"Host: evil.example", b"Host: localhost\r\nOrigin: http://evil.example"])
@pytest.mark.parametrize("path", [b"/api/v1/sessions", b"/api/v1/live/events", b"/v1/models"])
async def test_a_site_that_rebinds_its_name_to_this_machine_is_refused(
    stand: Stand, header: bytes, path: bytes
) -> None:
    reader, writer = await connect(stand, b"GET %s HTTP/1.1\r\n%s\r\nX-Api-Key: tml-local\r\n\r\n" % (path, header))
    assert b"403 " in await asyncio.wait_for(reader.readline(), 20)
    writer.close()


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (None, ""),
    ],
)
def test_whose_connection_it_is(peer: tuple[str, int] | None, client: str) -> None:
    assert connections.client_of(peer) == client
