"""Reading request bodies: bounded, decompressed within the bound, decoded once."""

import asyncio
from typing import Any, TypeVar

import zstandard
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from fovea.tinker.v1 import tinker_pb2
from fovea.wire.errors import InvalidInput, PayloadTooLarge

B = TypeVar("B", bound=BaseModel)

PREFIX_BYTES = 4096
_OFF_LOOP_BYTES = 2**20


class BodyTooLarge(PayloadTooLarge):
    """A body above the limit, with the start of it: enough to know which request it was."""

    reason = "PAYLOAD_TOO_LARGE"

    def __init__(self, limit: int, prefix: bytes) -> None:
        super().__init__(f"the body is above {limit} bytes; send fewer or smaller datums in one request")
        self.prefix = prefix


async def read(request: Request, limit: int) -> bytes:
    """The body's bytes. Raises BodyTooLarge as soon as it is known, InvalidInput for an encoding we do not read.

    What the client still sends is discarded by the server, so that the client comes to read the answer.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise InvalidInput(f"Content-Encoding {encoding!r} is not supported; use zstd or none")
    declared = int(request.headers.get("content-length") or 0)
    pieces, size = [], 0
    async for piece in request.stream():
        pieces.append(piece)
        size += len(piece)
        if max(size, declared) > limit:
            raise BodyTooLarge(limit, _plain_prefix(b"".join(pieces), encoding))
    body = b"".join(pieces)
    return await _off_loop(_unzstd, body, limit) if encoding == "zstd" else body


async def parse_json(kind: type[B], body: bytes) -> B:
    """Decodes a JSON body. Raises InvalidInput that names the first wrong fields."""
    try:
        decoded: B = await _off_loop(kind.model_validate_json, body)
        return decoded
    except ValidationError as error:
        raise InvalidInput(describe(error)) from None


def describe(error: ValidationError) -> str:
    """What is wrong with a body, by field."""
    parts = [f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors()[:5]]
    return "; ".join(parts)


def parse_loosely(body: bytes) -> dict[str, Any]:
    """The object of a JSON body whatever is in it. Raises InvalidInput if it is none."""
    try:
        # Not Python's json, which fails on deep nesting and takes lone surrogates, which nothing behind us can encode.
        value = from_json(body)
    except ValueError as error:
        raise InvalidInput(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput("the body is not a JSON object")
    return value


async def parse_forward_backward(body: bytes) -> tinker_pb2.ForwardBackwardRequest:
    """Decodes a protobuf body. Raises InvalidInput."""
    try:
        decoded: tinker_pb2.ForwardBackwardRequest = await _off_loop(tinker_pb2.ForwardBackwardRequest.FromString, body)
        return decoded
    except DecodeError as error:
        raise InvalidInput(f"the body is not a ForwardBackwardRequest: {error}") from None


def peek_address(prefix: bytes) -> tuple[str, int] | None:
    """model_id and seq_id out of the start of a ForwardBackwardRequest, which has them first; None if it has not."""
    model_id, seq_id, position = "", 0, 0
    try:
        while position < len(prefix) and not (model_id and seq_id):
            key, position = _varint(prefix, position)
            if key == 0x0A:
                length, position = _varint(prefix, position)
                model_id = prefix[position : position + length].decode()
                position += length
            elif key == 0x10:
                seq_id, position = _varint(prefix, position)
            else:
                return None
    except (IndexError, UnicodeDecodeError):
        return None
    return (model_id, seq_id) if model_id and seq_id else None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if not byte & 0x80:
            return value, position


def _unzstd(body: bytes, limit: int) -> bytes:
    """Decompresses, stopping at the limit whatever the frame claims."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True) as reader:
            plain: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body is not zstd: {error}") from None
    if len(plain) > limit:
        raise BodyTooLarge(limit, plain[:PREFIX_BYTES])
    return plain


def _plain_prefix(start: bytes, encoding: str) -> bytes:
    if encoding != "zstd":
        return start[:PREFIX_BYTES]
    try:
        with zstandard.ZstdDecompressor().stream_reader(start) as reader:
            plain: bytes = reader.read(PREFIX_BYTES)
    except zstandard.ZstdError:
        return b""
    return plain


async def _off_loop(function: Any, body: bytes, *rest: Any) -> Any:
    """Decodes a large body in a thread, so that others are answered meanwhile."""
    if len(body) < _OFF_LOOP_BYTES:
        return function(body, *rest)
    return await asyncio.to_thread(function, body, *rest)
