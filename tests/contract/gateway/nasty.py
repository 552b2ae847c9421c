"""Invalid values, which tests put at every place of an otherwise valid request."""

import copy
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Change = Callable[[Any], Any]
DEEP = 100_000


class Raw(str):
    """JSON text that is written verbatim, for values that Python cannot express."""


JSON_VALUES: tuple[Any, ...] = (
    None, True, -1, 2**31, 2**63, 2**70, 10**400, 1e30, -0.5, Raw("1e400"), Raw("NaN"), Raw("9" * 5000),
    Raw('"\\ud800"'), "", "a\0b", "\n\x1b[31m", "x" * 5000, "tinker://", [], [[]], [0, 2**70], [2**40, 0], ["\0"],
    {"": {}}, {"\0": "\0"},
)  # fmt: skip
DEEP_VALUES = (Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP))
_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308)
_TEXTS = ("", "\0", "a\0b", "\n\x1b[31m", "x" * 5000, "tinker://", "\U0010ffff")
_BYTES = (b"", b"\0", b"\xff" * 7, b"\xff" * 8, b"\xff" * 40)
_OF_KIND: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOATS,
    FieldDescriptor.CPPTYPE_ENUM: (-1, 0, 99),
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS,
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 2**31, 2**62, 2**63 - 1),
    FieldDescriptor.CPPTYPE_STRING: _TEXTS,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path to every member and element of a JSON value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in members:
        yield (*path, name)
        yield from places(inner, (*path, name))


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns the body with another value at a path."""
    whole = copy.deepcopy(body)
    parent = whole
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    return whole


def to_json(value: Any) -> str:
    """Returns JSON text, with each `Raw` written verbatim."""
    raws: list[str] = []

    def mark(inner: Any) -> Any:
        if isinstance(inner, Raw):
            raws.append(str(inner))
            return f"<raw {len(raws) - 1}>"
        if isinstance(inner, dict):
            return {name: mark(member) for name, member in inner.items()}
        return [mark(element) for element in inner] if isinstance(inner, list) else inner

    text = json.dumps(mark(value))
    for index, raw in enumerate(raws):
        text = text.replace(f'"<raw {index}>"', raw)
    return text


def mutants(message: Message) -> Iterator[tuple[str, Any]]:
    """Yields copies of a message with one invalid value each, and its path. Fields that were empty are included."""
    for what, change in _changes(message):
        mutant = copy.deepcopy(message)
        change(mutant)
        yield what, mutant


def _changes(message: Any) -> Iterator[tuple[str, Change]]:
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from _map_changes(getattr(message, field.name), field)
        elif field.message_type is not None:
            yield from _message_changes(message, field)
        else:
            for value in _values(field):
                yield f"{field.name}={value!r:.40}", _setting(field, value)


def _message_changes(message: Any, field: Any) -> Iterator[tuple[str, Change]]:
    name = field.name
    yield f"no {name}", lambda m: m.ClearField(name)
    yield f"empty {name}", lambda m: getattr(m, name).add() if field.is_repeated else getattr(m, name).SetInParent()
    if field.is_repeated:
        for index, inner in enumerate(getattr(message, name)):
            for what, change in _changes(inner):
                yield f"{name}[{index}].{what}", _inside(change, _element(name, index))
    elif message.HasField(name):
        for what, change in _changes(getattr(message, name)):
            yield f"{name}.{what}", _inside(change, operator.attrgetter(name))


def _map_changes(mapping: Any, field: Any) -> Iterator[tuple[str, Change]]:
    name, value_field = field.name, field.message_type.fields_by_name["value"]
    if value_field.message_type is None:
        for key, value in itertools.product(_TEXTS, _values(value_field)):
            yield f"{name}[{key!r:.20}]={value!r:.20}", _entry(name, key, value)
        return
    for key in _TEXTS:
        yield f"{name}[{key!r:.20}]", _inside(lambda m: m.SetInParent(), _element(name, key))
    for key in mapping:
        for what, change in _changes(mapping[key]):
            yield f"{name}[{key}].{what}", _inside(change, _element(name, key))


def _values(field: Any) -> tuple[Any, ...]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _BYTES
    return _OF_KIND[field.cpp_type]


def _setting(field: Any, value: Any) -> Change:
    if field.is_repeated:
        return lambda m: getattr(m, field.name).append(value)
    return lambda m: setattr(m, field.name, value)


def _entry(name: str, key: str, value: Any) -> Change:
    return lambda m: operator.setitem(getattr(m, name), key, value)


def _element(name: str, key: int | str) -> Callable[[Any], Any]:
    return lambda m: getattr(m, name)[key]


def _inside(change: Change, way: Callable[[Any], Any]) -> Change:
    return lambda m: change(way(m))
