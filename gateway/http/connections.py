"""The connections of REST clients, before any of them is known: how many, how long and how much they may keep us.

uvicorn's protocol with what it leaves out. A connection counts as idle while it has no request in progress: requests
are let in by their key before a byte of their body is read, so whoever is not idle is a caller of ours.
"""

import asyncio
import logging
from collections import OrderedDict, defaultdict
from functools import partial
from typing import Any

from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Of a request's line and headers together, of a chunk's extension, of trailers."""
MAX_HEADERS = 128
MAX_PIPELINED = 16
RESERVE = 64
"""Connections above the limit, so that whoever asks for our health is answered while all others are at work."""
_ALIVE = b"/healthz"
_SAY_EVERY_S = 1.0


class Seldom(logging.Filter):
    """Lets one warning of each kind through per second, with the number of those before it: strangers cause them."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at: defaultdict[str, float] = defaultdict(float)
        self._kept_back: defaultdict[str, int] = defaultdict(int)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written. Kinds are texts before anything is filled in, so they are few."""
        kind = record.msg
        if record.levelno != logging.WARNING:
            return True
        if 0 <= record.created - self._said_at[kind] < _SAY_EVERY_S:
            self._kept_back[kind] += 1
            return False
        self._said_at[kind] = record.created
        if kept_back := self._kept_back.pop(kind, 0):
            record.msg = f"{kind} ({kept_back} more since the last time)"
        return True


logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


class Connections:
    """All connections of one server.

    Above `most`, each new one takes the place of the one that has been idle for longest; if none is idle, it may only
    ask for our health.

    Args:
        most: How many may be open at once.
        timeout_s: Seconds in which a request's head must be complete, and what follows an answer read.
    """

    def __init__(self, most: int, timeout_s: float) -> None:
        self.most, self.timeout_s = most, timeout_s
        self.open: set[Connection] = set()
        self.idle: OrderedDict[Connection, None] = OrderedDict()

    def admit(self, connection: "Connection") -> bool:
        """Counts a new connection, and makes room for it; returns whether it is in the reserve."""
        self.open.add(connection)
        if len(self.open) > self.most and self.idle:
            oldest, _ = self.idle.popitem(last=False)
            oldest.drop(f"{self.most} connections are open")
        is_in_reserve = len(self.open) > self.most
        if len(self.open) > self.most + RESERVE:
            connection.drop(f"{self.most} connections are at work")
        else:
            self.idle[connection] = None
        return is_in_reserve

    def leave(self, connection: "Connection") -> None:
        self.open.discard(connection)
        self.idle.pop(connection, None)


class Connection(HttpToolsProtocol):
    """One connection, with limits."""

    def __init__(self, *args: Any, connections: Connections, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.logger = logger  # uvicorn's own says each bad request
        self._all = connections
        self._unread_bytes = 0  # since something of a body came, which the application bounds
        self._timer: asyncio.TimerHandle | None = None
        self._is_whole = True
        self._is_in_reserve = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._wait("no request came")
        self._is_in_reserve = self._all.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._all.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on, unless what came is the endless head of a request, or its endless tail."""
        if self.transport.is_closing():
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > MAX_HEAD_BYTES:
            self.drop(f"a head had more than {MAX_HEAD_BYTES} bytes")
        elif self in self._all.idle and self._timer is None:
            self._wait("the head of a request did not come")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_whole = False
        if self._timer is None:
            self._wait("the head of a request did not come")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header; what it raises ends the connection with a 400. Trailers are headers too."""
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hands a request to the application."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")
        self._stop_waiting()
        self._unread_bytes = 0
        self._all.idle.pop(self, None)
        is_refused = self._is_in_reserve and not self.url.partition(b"?")[0].endswith(_ALIVE)
        self.app = service_unavailable if is_refused else self.config.loaded_app
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Hands on a piece of a body."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._unread_bytes = 0
        self._is_whole = True
        if self.cycle.response_complete:
            self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Waits for the next request, or for the rest of a body that was refused."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._all.idle[self] = None
            if not self._is_whole:
                self._wait("the rest of a refused body did not come")

    def drop(self, reason: str) -> None:
        """Closes at once: whoever is here has been told nothing yet, or does not read."""
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
