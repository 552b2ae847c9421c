"""How much a body would make: counted in its bytes, before anything is built out of them.

A byte of JSON or protobuf can become a hundred of Python's: `[[],[],` a list for each three, `1,` an integer each two.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from fovea.wire.errors import InvalidInput, PayloadTooLarge

_LENGTH_DELIMITED = 2
_FIXED = {1: 8, 5: 4}


def check_json(body: bytes, most: int) -> int:
    """Counts the elements of JSON. Raises PayloadTooLarge above `most`. Commas within strings count too."""
    count = body.count(b",") + body.count(b"[") + body.count(b"{")
    if count > most:
        raise PayloadTooLarge(f"the body has {count} elements; at most {most} are taken here")
    return count


def check_protobuf(body: bytes, kind: Any, most: int) -> int:
    """Counts the fields and packed numbers of a message and of all within it.

    Args:
        body: The encoded message.
        kind: Its descriptor.
        most: How many are taken.

    Raises:
        PayloadTooLarge: There are more.
        InvalidInput: The bytes are no message.
    """
    counter = _Counter(body, most)
    try:
        counter.walk(0, len(body), kind)
    except IndexError:
        raise InvalidInput("the body ends in the middle of a field") from None
    return counter.count


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A variable-length number, and where it ends. Raises IndexError if it does not end."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if not byte & 0x80:
            return value, position


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
                raise InvalidInput(f"the body has a field of wire type {wire}, which nobody sends")

    def _add(self, count: int) -> None:
        self.count += count
        if self.count > self._most:
            raise PayloadTooLarge(f"the body has more than {self._most} fields; send fewer datums in one request")
