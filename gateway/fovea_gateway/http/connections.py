"""Limits on the connections of REST clients: their number, their duration and the data they may send unasked.

uvicorn's protocol lacks these limits. A connection counts as idle while it has no request in progress. Requests are
authenticated before a byte of their body is read, so a connection that is not idle belongs to a caller with a valid
key.
"""

import asyncio
import ipaddress
import logging
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""The limit for a request's line and headers together, for a chunk's extension, and for trailers."""
MAX_HEADERS = 128
MAX_PIPELINED = 16
RESERVE = 64
"""Connections above the limit, so that health checks are answered while all other connections are busy."""
_ALIVE = b"/healthz"
_SAY_EVERY_S = 1.0


class Seldom(logging.Filter):
    """A filter that passes at most one warning of each kind per second, because any client can cause them. The next
    warning states how many were suppressed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said_at: defaultdict[str, float] = defaultdict(float)
        self._kept_back: defaultdict[str, int] = defaultdict(int)

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to write a record. Warnings with the same message before formatting are of one kind."""
        kind = record.msg
        if record.levelno != logging.WARNING:
            return True
        if 0 <= record.created - self._said_at[kind] < _SAY_EVERY_S:
            self._kept_back[kind] += 1
            return False
        self._said_at[kind] = record.created
        if kept_back := self._kept_back.pop(kind, 0):
            record.msg = f"{kind} ({kept_back} more since the last one)"
        return True


logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


@dataclass
class Client:
    """The connections of one address. In each state, those that have been in it for longest come first."""

    idle: dict["Connection", None] = field(default_factory=dict)
    busy: dict["Connection", None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)


class Connections:
    """All connections of one server.

    Above `most`, each new connection replaces an idle one. Among the clients with idle connections, the one with the
    most connections loses the connection that has been idle for longest. If no connection is idle, a client with fewer
    than half as many connections as the largest client takes the place of that client's oldest request; clients repeat
    such requests. Otherwise the new connection may only send health checks.

    Args:
        most: The maximum number of open connections.
        timeout_s: Seconds within which the head of a request, or the rest of a refused body, must arrive.
    """

    def __init__(self, most: int, timeout_s: float) -> None:
        self.most, self.timeout_s = most, timeout_s
        self._count = 0
        self._clients: dict[str, Client] = {}

    def __len__(self) -> int:
        """Returns how many connections are open."""
        return self._count

    def admit(self, connection: "Connection") -> bool:
        """Counts a new connection and makes room for it; returns whether it is in the reserve. Drops it if the reserve
        is full.
        """
        own = self._clients.setdefault(connection.client_address, Client())
        own.idle[connection] = None
        self._count += 1
        if self._count <= self.most:
            return False
        if victim := self._victim(connection, own):
            victim.drop(f"{self.most} connections are open, most of them from {victim.client_address}")
        is_in_reserve = self._count > self.most
        if self._count > self.most + RESERVE:
            connection.drop(f"{self.most} connections are busy")
        return is_in_reserve

    def leave(self, connection: "Connection") -> None:
        client = self._clients.get(connection.client_address)
        if client is None or (connection not in client.idle and connection not in client.busy):
            return
        client.idle.pop(connection, None)
        client.busy.pop(connection, None)
        self._count -= 1
        if not len(client):
            del self._clients[connection.client_address]

    def set_busy(self, connection: "Connection", busy: bool) -> None:
        """Records that a request begins, or has been answered."""
        client = self._clients.get(connection.client_address)
        if client is None:
            return
        before, after = (client.idle, client.busy) if busy else (client.busy, client.idle)
        if connection in before:
            del before[connection]
            after[connection] = None

    def is_idle(self, connection: "Connection") -> bool:
        """Returns whether a connection is open and has no request in progress."""
        client = self._clients.get(connection.client_address)
        return client is not None and connection in client.idle

    def _victim(self, new: "Connection", own: Client) -> "Connection | None":
        """Returns the connection to close for a new one; None if there is none."""
        with_idle = (client for client in self._clients.values() if len(client.idle) > (new in client.idle))
        if client := max(with_idle, key=len, default=None):
            return next(connection for connection in client.idle if connection is not new)
        most = max(self._clients.values(), key=len)
        return next(iter(most.busy), None) if len(most) > 2 * len(own) else None


def client_of(peer: tuple[str, int] | None) -> str:
    """Returns the client of a connection: its IPv4 address, or its IPv6 /64 network, because one machine may have a
    whole /64.
    """
    if peer is None:
        return ""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class Connection(HttpToolsProtocol):
    """One connection, with limits."""

    def __init__(self, *args: Any, connections: Connections, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.logger = logger  # uvicorn's own logs every bad request
        self._all = connections
        self.client_address = ""
        self._unread_bytes = 0  # since the last data of a body; the application limits bodies
        self._timer: asyncio.TimerHandle | None = None
        self._is_whole = True
        self._is_in_reserve = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts to wait for the first request."""
        super().connection_made(transport)
        self.client_address = client_of(self.client)
        self._wait("no request came")
        self._is_in_reserve = self._all.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._all.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received data, unless a head or trailer exceeds its limit."""
        if self.transport.is_closing():
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > MAX_HEAD_BYTES:
            self.drop(f"the head of a request had more than {MAX_HEAD_BYTES} bytes")
        elif self._timer is None and self._all.is_idle(self):
            self._wait("the head of a request did not come")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_whole = False
        if self._timer is None:
            self._wait("the head of a request did not come")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a header or trailer. An exception ends the connection with a 400."""
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Passes a request to the application."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")
        self._stop_waiting()
        self._unread_bytes = 0
        self._all.set_busy(self, True)
        is_refused = self._is_in_reserve and not self.url.partition(b"?")[0].endswith(_ALIVE)
        self.app = service_unavailable if is_refused else self.config.loaded_app
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Passes a chunk of a body on."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Records that a request is complete."""
        self._unread_bytes = 0
        self._is_whole = True
        if self.cycle.response_complete:
            self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Waits for the next request, or for the rest of a refused body."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._all.set_busy(self, False)
            if not self._is_whole:
                self._wait("the rest of a refused body did not come")

    def drop(self, reason: str) -> None:
        """Closes the connection at once, without an answer."""
        self._all.leave(self)
        logger.warning("closed a connection because %s", reason)
        self.transport.abort()

    def _wait(self, what: str) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self._all.timeout_s, partial(self.drop, what))

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RestServer(uvicorn.Server):
    """A uvicorn server without signal handlers and without pauses at its end, since its process stops it.

    uvicorn's own server checks ten times a second whether it must stop, and then sleeps even if no client is connected.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_soon(self) -> None:
        """Stops accepting requests, and ends the server once the requests in progress are answered."""
        self.should_exit = True
        self._asked.set()

    async def main_loop(self) -> None:
        # uvicorn ticks ten times a second; every tenth tick sets the Date header of responses.
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for each in (*self.servers, *(sockets or ())):
            each.close()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only for sockets that name TCP; otherwise every answer waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener
