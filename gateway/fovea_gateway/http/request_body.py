"""Reading of request bodies. Size, time and number of elements are limited before anything is built from a body.

One byte of JSON or protobuf can become a hundred bytes of Python objects: `[[],[],` makes one list per three bytes,
`1,` an integer per two. Elements are therefore counted in the encoded bytes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Annotated, Any, NamedTuple, TypeVar

import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from fovea.tinker.v1 import tinker_pb2
from fovea.wire.errors import InvalidInput, PayloadTooLarge, RequestTimeout, similar
from fovea_gateway.access.api_keys import SUBJECT
from fovea_gateway.access.owners import QuotaUse

B = TypeVar("B", bound=BaseModel)
R = TypeVar("R")
T = TypeVar("T")

INT64_MAX = 2**63 - 1
Number = Annotated[int, Field(ge=0, le=INT64_MAX)]
"""A client's counter. It must fit into a database column and a protobuf field."""
ModelNumber = Annotated[int, Field(ge=0, lt=2**31)]
"""The same for the counter of a session's models."""
LongList = Annotated[list[T], Field(fail_fast=True)]
"""A list that may be long. Its first wrong item ends the validation, since each error costs some kilobytes and
microseconds.
"""

PREFIX_BYTES = 4096
SMALL_BYTES = 256 * 2**10
"""The limit for bodies without prompts, datums or graphs."""
SMALL_ELEMENTS = 2**14
MOST_TEXTS = 2 * SMALL_ELEMENTS
"""The default limit for names and strings in a JSON body; a small body cannot contain more."""
ELEMENT_BYTES = 64
_FORWARD_BACKWARD_ELEMENTS = 2**18
_OFF_LOOP_BYTES = 2**15
_PIECE_BYTES = 2**20
_WINDOW_BYTES = 2**23
"""The window that RFC 8878 recommends decoders to support; a frame may ask for terabytes."""
_LEAST_RATE = 16 * 2**10
"""Bytes per second that a body must reach after its first seconds."""


_SUBJECTS = (
    "session_id sampling_session_id model_id source_path path model_path upload_id request_id base_model owner key_id"
).split()
_LENGTH_DELIMITED = 2
_FIXED = {1: 8, 5: 4}
_VARINT_BYTES = 10
_UINT64_MAX = 2**64 - 1


class Body(BaseModel):
    """Base class of all JSON bodies. An unknown field is an error that names it, so that no field is silently ignored.

    `type` tags are constants of the SDK and carry no information.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Incoming(NamedTuple):
    """The limits for the body of a request; stored as `request.state.incoming`."""

    memory: QuotaUse
    patience_s: float


class BodyTooLarge(PayloadTooLarge):
    """A body above the limit. Its `prefix` is the start of the body, which is enough to identify the request."""

    reason = "PAYLOAD_TOO_LARGE"

    def __init__(self, limit: int, prefix: bytes) -> None:
        super().__init__(f"the body is above {limit} bytes; send fewer or smaller datums in one request")
        self.prefix = prefix


async def read(request: Request, limit: int = SMALL_BYTES) -> bytes:
    """Returns the bytes of the body, decompressed.

    After an error, the server discards the data that the client still sends, so that the client can read the answer.

    Raises:
        BodyTooLarge: The body has more than `limit` bytes, before or after decompression. Raised as soon as that is
            known.
        InvalidInput: The encoding is not supported.
        RequestTimeout: The body does not arrive in time.
        ResourceExhausted: Other requests fill the memory.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise InvalidInput(f"Content-Encoding {encoding!r} is not supported; use zstd or none")
    incoming: Incoming = request.state.incoming
    declared = int(request.headers.get("content-length") or 0)
    pieces, size = [], 0
    async for piece in arriving(request, incoming.patience_s):
        incoming.memory.take(len(piece))
        pieces.append(piece)
        size += len(piece)
        if max(size, declared) > limit:
            raise BodyTooLarge(limit, _plain_prefix(b"".join(pieces), encoding))
    body = b"".join(pieces)
    return await _unzstd(body, limit, incoming.memory) if encoding == "zstd" else body


async def arriving(request: Request, patience_s: float) -> AsyncIterator[bytes]:
    """Yields the chunks of a body as they arrive. Raises RequestTimeout if the client sends too slowly."""
    loop = asyncio.get_running_loop()
    stream, size, began = aiter(request.stream()), 0, loop.time()
    while True:
        try:
            async with asyncio.timeout_at(began + patience_s + size / _LEAST_RATE):
                piece = await anext(stream, None)
        except TimeoutError:
            seen = f"{size} bytes of the body arrived in {loop.time() - began:.0f} s"
            raise RequestTimeout(f"{seen}: send the request again, faster") from None
        if piece is None:
            return
        size += len(piece)
        yield piece


async def parse_json(
    request: Request,
    kind: type[B],
    body: bytes,
    most_elements: int = SMALL_ELEMENTS,
    most_texts: int = MOST_TEXTS,
) -> B:
    """Parses and validates a JSON body.

    Raises InvalidInput that names the first wrong fields, PayloadTooLarge for too many elements, ResourceExhausted.
    """
    count, width = await off_loop(_look_over, body, most_elements, most_texts)
    request.state.incoming.memory.take(len(body) * width + count * ELEMENT_BYTES)
    value: B = await off_loop(_validated, body, kind)
    SUBJECT.set(subject_of(value))
    return value


def subject_of(message: Any) -> str:
    """Returns the ids and names by which a body or a protobuf message refers to objects, joined by slashes."""
    found = (getattr(message, name, None) for name in _SUBJECTS)
    return "/".join(each for each in found if isinstance(each, str) and each)


def _look_over(body: bytes, most_elements: int, most_texts: int) -> tuple[int, int]:
    """Returns the elements of a JSON body, and its bytes of memory per encoded byte. Raises PayloadTooLarge."""
    count = check_json_elements(body, most_elements)
    texts = _count(body, b'"') // 2
    if texts > most_texts:
        raise PayloadTooLarge(f"the body has {texts} names and strings; the limit is {most_texts}")
    # Python stores a string with a wide character as four bytes per character.
    return count, 4 if b"\\u" in body or not body.isascii() else 1


def _validated(body: bytes, kind: type[B]) -> B:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise InvalidInput(describe(error, kind.model_fields)) from None


def describe(error: ValidationError, fields: Iterable[str] = ()) -> str:
    """Returns the first five errors in a body, each with its field.

    Args:
        fields: The names that the body may have; an error about another name says which of them is most similar.
    """
    parts = []
    for item in error.errors()[:5]:
        words = item["msg"]
        if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
            words = f"there is no such field{similar(str(item['loc'][0]), fields)}"
        parts.append(f"{'.'.join(map(str, item['loc'])) or 'body'}: {words}")
    return "; ".join(parts)


def parse_loosely(body: bytes, most_elements: int = SMALL_ELEMENTS, name: str = "the body") -> dict[str, Any]:
    """Parses any JSON object. Raises InvalidInput, or PayloadTooLarge for too many elements.

    Args:
        name: The name of the text in error messages.
    """
    check_json_elements(body, most_elements, name)
    try:
        # Python's json fails on deep nesting and accepts lone surrogates, which no later stage can encode.
        value = from_json(body)
    except ValueError as error:
        raise InvalidInput(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{name} is not a JSON object")
    return value


def parse_start(prefix: bytes) -> dict[str, Any]:
    """Returns the fields that are complete in the start of a JSON body; empty if it is not JSON."""
    try:
        # Cut at the last comma, since a number at the very end may be incomplete.
        value = from_json(prefix[: prefix.rfind(b",") + 1], allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


async def parse_forward_backward(
    request: Request, body: bytes, convert: Callable[[tinker_pb2.ForwardBackwardRequest, bytes], R]
) -> R:
    """Parses a protobuf body and converts it, both in one thread if it is large.

    Raises InvalidInput, PayloadTooLarge and ResourceExhausted, and what `convert` raises.
    """
    kind = tinker_pb2.ForwardBackwardRequest
    if body.startswith(b"{"):
        raise InvalidInput(
            "the body is JSON, which the SDK sent here before version 0.38; this route reads protobuf: install"
            " tinker>=0.38"
        )
    count = await off_loop(check_protobuf_elements, body, kind.DESCRIPTOR, _FORWARD_BACKWARD_ELEMENTS)
    request.state.incoming.memory.take(len(body) + count * ELEMENT_BYTES)

    def decode(body: bytes) -> R:
        try:
            message = kind.FromString(body)
        except DecodeError as error:
            raise InvalidInput(f"the body is not a ForwardBackwardRequest: {error}") from None
        return convert(message, body)

    return await off_loop(decode, body)


def peek_address(prefix: bytes) -> tuple[str, int] | None:
    """Returns model_id and seq_id from the start of a ForwardBackwardRequest; None if they are not its first fields."""
    model_id, seq_id, position = "", 0, 0
    try:
        while position < len(prefix) and not (model_id and seq_id):
            key, position = read_varint(prefix, position)
            if key == 0x0A:
                length, position = read_varint(prefix, position)
                model_id = prefix[position : position + length].decode()
                position += length
            elif key == 0x10:
                seq_id, position = read_varint(prefix, position)
            else:
                return None
    except (IndexError, UnicodeDecodeError, InvalidInput):
        return None
    return (model_id, seq_id) if model_id and 0 < seq_id <= INT64_MAX else None


async def _unzstd(body: bytes, limit: int, memory: QuotaUse) -> bytes:
    """Decompresses a body. Raises BodyTooLarge at the limit, regardless of the size that the frame claims."""
    pieces, size = [], 0
    try:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        with decompressor.stream_reader(body, read_across_frames=True) as reader:
            while piece := await asyncio.to_thread(reader.read, min(_PIECE_BYTES, limit + 1 - size)):
                memory.take(len(piece))
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise BodyTooLarge(limit, pieces[0][:PREFIX_BYTES])
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body is not zstd with a window of at most {_WINDOW_BYTES} bytes: {error}") from None
    return b"".join(pieces)


def _plain_prefix(start: bytes, encoding: str) -> bytes:
    if encoding != "zstd":
        return start[:PREFIX_BYTES]
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(start) as reader:
            plain: bytes = reader.read(PREFIX_BYTES)
    except zstandard.ZstdError:
        return b""
    return plain


async def off_loop(function: Callable[..., R], body: bytes, *rest: Any) -> R:
    """Calls a function on a body, in a thread if the body is large, so that other requests are answered meanwhile."""
    return await off_loop_by_size(len(body), function, body, *rest)


async def off_loop_by_size(size_bytes: int, function: Callable[..., R], *arguments: Any) -> R:
    """Calls a function on values from a body. Uses a thread if the body is large."""
    if size_bytes < _OFF_LOOP_BYTES:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def check_json_elements(body: bytes, most: int, name: str = "the body") -> int:
    """Counts the elements of JSON, including commas within strings. Raises PayloadTooLarge above `most`."""
    count = _count(body, b",") + _count(body, b"[") + _count(body, b"{")
    if count > most:
        raise PayloadTooLarge(f"{name} has {count} elements; the limit is {most}")
    return count


def _count(body: bytes, letter: bytes) -> int:
    """Counts a character in pieces of 1 MiB, since a single count over 128 MiB would block all other threads."""
    return sum(body.count(letter, start, start + _PIECE_BYTES) for start in range(0, len(body), _PIECE_BYTES))


def check_protobuf_elements(body: bytes, kind: Any, most: int) -> int:
    """Counts the fields of a message and of all messages within it. A packed field also counts its bytes.

    Args:
        body: The encoded message.
        kind: Its descriptor.
        most: The maximum number.

    Raises:
        PayloadTooLarge: There are more.
        InvalidInput: The bytes are not a protobuf message.
    """
    counter = _Counter(body, most)
    try:
        counter.walk(0, len(body), kind)
    except IndexError:
        raise InvalidInput("the body ends in the middle of a field") from None
    return counter.count


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns a variable-length number of at most 64 bits, and the position after it.

    Raises IndexError if it does not end, InvalidInput if it is longer than protobuf allows. Without that limit, a
    number of 200 kB takes seconds, and the time grows with the square of its length.
    """
    if data[position] < 0x80:  # Most keys and lengths have one byte.
        return data[position], position + 1
    value = 0
    for place in range(_VARINT_BYTES):
        byte = data[position + place]
        value |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return value & _UINT64_MAX, position + place + 1
    raise InvalidInput(f"the body has a varint of more than {_VARINT_BYTES} bytes, which protobuf does not allow")


class _Counter:
    def __init__(self, data: bytes, most: int) -> None:
        self._data, self._most, self.count = data, most, 0

    def walk(self, start: int, end: int, kind: Any) -> None:
        position = start
        while position < end:
            key, position = read_varint(self._data, position)
            wire, field = key & 7, kind.fields_by_number.get(key >> 3)
            self._add(1)
            if wire == _LENGTH_DELIMITED:
                length, position = read_varint(self._data, position)
                if position + length > end:
                    raise InvalidInput("the body ends in the middle of a field")
                if field is not None and field.message_type is not None:
                    self.walk(position, position + length, field.message_type)
                elif field is not None and field.cpp_type != FieldDescriptor.CPPTYPE_STRING:  # packed numbers
                    self._add(length)
                position += length
            elif wire in _FIXED:
                position += _FIXED[wire]
            elif wire == 0:
                _, position = read_varint(self._data, position)
            else:
                raise InvalidInput(f"the body has a field of wire type {wire}, which is not supported")

    def _add(self, count: int) -> None:
        self.count += count
        if self.count > self._most:
            raise PayloadTooLarge(f"the body has more than {self._most} fields; send fewer datums in one request")
