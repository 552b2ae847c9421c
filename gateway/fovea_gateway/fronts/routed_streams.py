"""The bodies of requests that a router passes on, and the page's events, which it merges.

A router reads a body until it names a session, and keeps that part: up to 1 MiB in memory, and more in a temporary
file. The SDK names the session of a sample last, after the prompt.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import zstandard
from starlette.requests import Request

from fovea.runtime.tasks import BackgroundTasks
from fovea.wire.errors import InvalidInput, PayloadTooLarge, Unavailable
from fovea_gateway.database.ownership import shard_of
from fovea_gateway.http.request_body import read_varint
from fovea_gateway.live.live_routes import changes, event

_NAMES = {b"session_id", b"model_id", b"sampling_session_id", b"request_id"}
_PARENT, _SEARCHED_DEPTH = b"target", 2
"""The search also reads the fields of this object in a body."""
_MARK, _DEEP_MARK = re.compile(rb'["{}\[\]:,]'), re.compile(rb'["{}\[\]]')
_STRING_MARK = re.compile(rb'["\\]')
_MOST_TEXT = 256
_MOST_MARKS = 2**16
"""Quotes and brackets after which a search ends. Prompts have a few for each image and each span of tokens."""
_IN_MEMORY_BYTES = 2**20
_PIECE_BYTES = 2**18
_WINDOW_BYTES = 2**23


class JsonSearch:
    """A search for the first field of a JSON object that names a session. It reads a body in pieces and keeps none.

    Attributes:
        shard: The shard of that session; None until it is found.
        is_over: Whether it is found, or the body is too complicated.
    """

    def __init__(self) -> None:
        self.shard: int | None = None
        self.is_over = False
        self._count = self._depth = 0
        self._is_in_text = self._is_escaped = False
        self._text = bytearray()
        self._keys: dict[int, bytes] = {}
        self._is_value = False

    def read(self, piece: bytes) -> None:
        """Reads the next piece of the body."""
        at = 0
        while at < len(piece) and not self.is_over:
            at = self._read_text(piece, at) if self._is_in_text else self._read_marks(piece, at)

    def _read_text(self, piece: bytes, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = _STRING_MARK.search(piece, at)
        end = found.start() if found else len(piece)
        if len(self._text) <= _MOST_TEXT:
            self._text += piece[at : min(end, at + _MOST_TEXT + 1)]
        if found is None:
            return end
        if found[0] == b"\\":
            self._count += 1
            self._is_escaped, self.is_over = True, self._count > _MOST_MARKS
            self._text += b"\\"  # so that it equals no name
        else:
            self._is_in_text = False
            self._end_text()
        return end + 1

    def _end_text(self) -> None:
        is_searched = self._depth == 1 or (self._depth == 2 and self._keys.get(1) == _PARENT)
        if self._is_value and is_searched and self._keys.get(self._depth) in _NAMES:
            self.shard = shard_of(self._text.decode("latin-1"))
            self.is_over = self.shard is not None

    def _read_marks(self, piece: bytes, at: int) -> int:
        found = (_MARK if self._depth <= _SEARCHED_DEPTH else _DEEP_MARK).search(piece, at)
        if found is None:
            return len(piece)
        self._count += 1
        self.is_over = self._count > _MOST_MARKS
        match found[0]:
            case b'"':
                self._is_in_text = True
                self._text.clear()
            case b":":
                self._keys[self._depth], self._is_value = bytes(self._text), True
            case b",":
                self._is_value = False
            case b"{" | b"[":
                self._depth, self._is_value = self._depth + 1, False
                self._keys.pop(self._depth, None)
            case _:
                self._depth, self._is_value = self._depth - 1, False
        return found.end()


class ProtobufSearch:
    """A search for the model of a ForwardBackwardRequest, which clients send first.

    Attributes:
        shard: The shard of the model; None until it is found.
        is_over: Whether it is found, or does not come first.
    """

    def __init__(self) -> None:
        self.shard: int | None = None
        self.is_over = False
        self._start = b""

    def read(self, piece: bytes) -> None:
        """Reads the next piece of the body."""
        self._start += piece[:_MOST_TEXT]
        try:
            if self._start[0] == 0x0A:
                length, at = read_varint(self._start, 1)
                if len(self._start) < min(at + length, _MOST_TEXT):
                    return
                self.shard = shard_of(self._start[at : at + length].decode("latin-1"))
            self.is_over = True
        except (IndexError, InvalidInput):
            self.is_over = len(self._start) > _MOST_TEXT


class _Over(Exception):
    """The search has ended, so the rest of the body is not needed."""


class _Sink:
    """The unpacked body. Raises _Over once the search needs no more, or an unpacked body is above the limit."""

    def __init__(self, search: "JsonSearch | ProtobufSearch", most_bytes: int) -> None:
        self._search, self._left = search, most_bytes

    def write(self, piece: bytes) -> int:
        """Searches a piece."""
        self._search.read(piece)
        self._left -= len(piece)
        if self._search.is_over or self._left < 0:
            raise _Over
        return len(piece)


class Room:
    """The bytes that the bodies of all requests may use in temporary files."""

    def __init__(self, most_bytes: int) -> None:
        self._free = most_bytes

    def take(self, size_bytes: int) -> None:
        """Counts bytes. Raises Unavailable if too few are free."""
        if size_bytes > self._free:
            raise Unavailable("the router keeps the bodies of too many requests: send this request again later")
        self._free -= size_bytes

    def give(self, size_bytes: int) -> None:
        self._free += size_bytes


class RoutedBody:
    """The body of one request. Use it as a context manager.

    Args:
        arriving: The pieces of the body.
        is_packed: Whether the body is compressed with zstd.
        most_bytes: The largest body that is kept.
        room: Limits the bytes of all bodies that are kept.
    """

    def __init__(self, arriving: AsyncIterator[bytes], is_packed: bool, most_bytes: int, room: Room) -> None:
        self._arriving, self._most_bytes, self._room = arriving, most_bytes, room
        self._is_packed = is_packed
        self._kept = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 - `__exit__` closes it
        self._size = 0

    def __enter__(self) -> "RoutedBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()
        self._room.give(self._size)

    async def find(self, search: JsonSearch | ProtobufSearch) -> int | None:
        """Reads the body until it names a session; returns the shard of that session, or None if it names none.

        Raises PayloadTooLarge for a body that is too large to be kept, Unavailable if there is no room for it.
        """
        sink = _Sink(search, self._most_bytes)
        unpack: Any = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_writer
        unpacked = unpack(sink, write_size=2**16)
        async for piece in self._arriving:
            self._room.take(len(piece))
            self._size += len(piece)
            if self._size > self._most_bytes:
                raise PayloadTooLarge(f"the body is above {self._most_bytes} bytes; send fewer or smaller datums")
            self._kept.write(piece)
            try:
                (unpacked if self._is_packed else sink).write(piece)
            except (_Over, zstandard.ZstdError):
                break  # the gateway names a problem
        return search.shard

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the whole body: the part that was read, then the rest as it arrives."""
        self._kept.seek(0)
        while piece := self._kept.read(_PIECE_BYTES):
            yield piece
        async for piece in self._arriving:
            yield piece


async def arriving(request: Request, is_read: asyncio.Event) -> AsyncIterator[bytes]:
    """Yields the pieces of a request's body, and sets `is_read` at its end."""
    async for piece in request.stream():
        if piece:
            yield piece
    is_read.set()


async def chained(first: bytes | None, rest: AsyncIterator[bytes] | None) -> AsyncIterator[bytes]:
    """Yields the first message of a gRPC call, if there is one, and then the others."""
    if first is not None:
        yield first
    if rest is not None:
        async for each in rest:
            yield each


async def until_gone(request: Request, is_read: asyncio.Event) -> None:
    """Waits until the client of a request disconnects. Its body must be read by another task, which sets `is_read`."""
    if "content-length" in request.headers or "transfer-encoding" in request.headers:
        await is_read.wait()
    while (await request.receive())["type"] != "http.disconnect":
        pass


_SUMMED = {"total", "count", "inside", "waiting", "unfinished"}
_MOST_MODELS = 200
_OF_CALLER = {"caller", "refused"}
_SERVICES = {"base_models", "trainers", "samplers", "renderers"}


async def read_events(lines: AsyncIterable[bytes]) -> AsyncIterator[tuple[str, Any]]:
    """Yields the name and the data of each server-sent event in a stream of lines; an empty name for a comment."""
    name = ""
    async for line in lines:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)
            name = ""
        elif not field and value:
            yield "", None


class PageSections:
    """The sections of the live page in one shard, as its events report them."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}

    def note(self, name: str, data: Any) -> None:
        """Applies an event."""
        if name == "models":
            known = self.sections.get(name, {}) | {model["id"]: model for model in data["changed"]}
            data = {model_id: known[model_id] for model_id in data["order"] if model_id in known}
        self.sections[name] = data


async def merged_events(streams: Sequence[AsyncIterable[bytes]], closing: asyncio.Event) -> AsyncIterator[str]:
    """Yields the merged events of the page until one of the streams ends; the page then opens it again.

    Args:
        streams: The lines of the events of each gateway.
        closing: Set once the router stops.
    """
    arrived: asyncio.Queue[tuple[int, str, Any] | None] = asyncio.Queue()

    async def read(number: int, lines: AsyncIterable[bytes]) -> None:
        with suppress(aiohttp.ClientError):
            async for name, data in read_events(lines):
                arrived.put_nowait((number, name, data))
        arrived.put_nowait(None)

    async def close() -> None:
        await closing.wait()
        arrived.put_nowait(None)

    pages, sent, tasks = [PageSections() for _ in streams], dict[str, Any](), BackgroundTasks()
    for number, lines in enumerate(streams):
        tasks.start(read(number, lines), f"events of gateway {number}")
    tasks.start(close(), "end of the page's events")
    try:
        while (found := await arrived.get()) is not None:
            number, name, data = found
            if name in _OF_CALLER:
                if number == 0:
                    yield event(name, data)
            elif name:
                pages[number].note(name, data)
            if arrived.empty():
                yield "".join(changes(merge_pages(pages), sent)) or ": nothing new\n\n"
    finally:
        await tasks.cancel()


def merge_pages(pages: Sequence[PageSections]) -> dict[str, Any]:
    """Returns the sections of all shards as one page: the most recently used models, all lists joined, counts added."""
    merged = merge([page.sections for page in pages])
    models = sorted(merged.get("models", {}).values(), key=lambda model: -model["used_at"])
    return merged | ({"models": {model["id"]: model for model in models[:_MOST_MODELS]}} if models else {})


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one JSON object for those of all gateways: all lists joined, counts added."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged = _merged(merged, part, "")
    return merged


def _merged(a: Any, b: Any, name: str) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _merged(a[key], b[key], key) if key in a and key in b else a.get(key, b.get(key)) for key in a | b}
    if isinstance(a, list) and isinstance(b, list):
        if name in _SERVICES:  # the same ones, as each gateway sees them
            return [_merged(x, y, "") for x, y in zip(a, b, strict=False)]
        return [*a, *(each for each in b if each not in a)]
    if name in _SUMMED or (name == "version" and isinstance(a, int)):
        return a + b
    return a
