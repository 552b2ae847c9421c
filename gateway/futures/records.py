"""Several protobuf messages in one blob: how requests of many records and results are kept."""

import io
from collections.abc import Iterable
from typing import TypeVar

from google.protobuf import proto
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def join(messages: Iterable[Message]) -> bytes:
    """Writes messages one after another, each after its length."""
    blob = io.BytesIO()
    for message in messages:
        proto.serialize_length_prefixed(message, blob)
    return blob.getvalue()


def split(kind: type[M], blob: bytes) -> list[M]:
    """Reads what `join` wrote."""
    stream = io.BytesIO(blob)
    messages: list[M] = []
    while stream.tell() < len(blob):
        message = proto.parse_length_prefixed(kind, stream)
        assert message is not None
        messages.append(message)
    return messages
