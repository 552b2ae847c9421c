"""Datasets of prompts: JSON lines or parquet, one record per row.

    {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
                                             {"type": "text", "text": "How many?"}]}],
     "env_class": "count", "reward_spec": {"method": "rule", "ground_truth": 7}}

An environment that makes its own prompt and reward needs only a ticket:

    {"prompt": [{"role": "user", "content": "placeholder"}], "env_class": "visgym", "visgym_env_id": "maze_2d/easy"}

Pictures of a column `images` or `image` (bytes of files, `{"bytes": ...}`, paths) replace `<image>` in the prompt's
texts. In a prompt without that mark they come first in the first user message.

Further columns are passed on to the environment. A null field is the same as a missing field, because parquet gives all
rows of a column the same fields.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fovea.wire.errors import FailedPrecondition, InvalidInput, NotFound
from fovea_rollout.environments.environment import Environment, make
from fovea_rollout.messages import Message, Part, Picture, parse_messages
from fovea_rollout.pictures import PictureColumn, read_picture


@dataclass(frozen=True)
class Record:
    """A prompt, its environment and its reward.

    Attributes:
        prompt: The messages that the model reads first. All rollouts of the record share the pictures.
        env_class: Name of a registered kind of environment, or `module:factory`.
        reward_spec: `{"method": "rule", "ground_truth": ...}` for the environment; empty if the environment needs none.
        extra: All other columns.
    """

    prompt: tuple[Message, ...]
    env_class: str
    reward_spec: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, Any]:
        """The record for the environment's factory, with a parsed `prompt`, and `reward_spec` if it is given."""
        spec = {"reward_spec": self.reward_spec} if self.reward_spec else {}
        return {**self.extra, "prompt": self.prompt, "env_class": self.env_class, **spec}


Source = Record | Callable[[], Environment]
"""A source of environments for rollouts."""


def load_records(path: pathlib.Path) -> list[Record]:
    """Reads a `.jsonl` or `.parquet` file.

    Raises:
        NotFound: There is no such file.
        InvalidInput: A record is wrong. The error names the file, the line (in parquet the row, from 1) and the field.
        FailedPrecondition: The file is parquet, and pyarrow is not installed.
    """
    readers = {".jsonl": _read_json_lines, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise InvalidInput(f"{path} is not a .jsonl or .parquet file: convert it to one of the two", field="path")
    if not path.is_file():
        raise NotFound(f"{path} does not exist", field="path")
    return [parse_record(row, where, path.parent) for where, row in readers[path.suffix](path)]


def parse_record(row: Any, where: str = "record", folder: pathlib.Path | None = None) -> Record:
    """Parses one record. Raises InvalidInput, which names `where` and the field, if it is wrong.

    Args:
        row: The columns.
        where: Name of the record in errors.
        folder: Folder of relative paths of pictures; the working directory by default.
    """
    if not isinstance(row, Mapping):
        raise InvalidInput(f"{where}: a record must be an object, not {type(row).__name__}", field=where)
    found = _without_nulls(row)
    for name, kind, wanted in (("prompt", list, "a list of messages"), ("env_class", str, "a name")):
        if name not in row:
            raise InvalidInput(f"{where}: {name} is missing", field=f"{where}.{name}")
        if not isinstance(found.get(name), kind) or not found[name]:
            raise InvalidInput(f"{where}: {name} is {row[name]!r}; it must be {wanted}", field=f"{where}.{name}")
    spec = found.get("reward_spec", {})
    if not isinstance(spec, Mapping) or (spec and (spec.get("method") != "rule" or "ground_truth" not in spec)):
        raise InvalidInput(
            f"{where}: reward_spec is {spec!r}; write {{'method': 'rule', 'ground_truth': ...}}, or leave it out",
            field=f"{where}.reward_spec",
        )
    prompt = _pictured(parse_messages(found["prompt"], f"{where}: prompt"), found, where, folder)
    extra = {name: value for name, value in found.items() if name not in ("prompt", "env_class", "reward_spec")}
    return Record(prompt, found["env_class"], spec, extra)


def _pictured(
    prompt: Sequence[Message], row: Mapping[str, Any], where: str, folder: pathlib.Path | None
) -> tuple[Message, ...]:
    """Puts the pictures of a row's column in place of `<image>` in its prompt, or first. Raises InvalidInput."""
    column = PictureColumn(row, f"{where}: prompt", partial(read_picture, folder=folder))
    spliced = [replace(message, parts=tuple(_spliced(message.parts, column))) for message in prompt]
    return tuple(column.placed(spliced))


def _spliced(parts: Sequence[Part], column: PictureColumn) -> Iterator[Part]:
    for part in parts:
        yield from column.spliced(part) if isinstance(part, str) else [part]


def environment_of(record: Record) -> Environment:
    """Makes an environment for one rollout of a record. Raises InvalidInput if its class is unknown."""
    return make(record.env_class, record.columns)


def environment_factory(source: Source) -> Callable[[], Environment]:
    """Returns the function that makes a source's environments."""
    return partial(environment_of, source) if isinstance(source, Record) else source


def shuffled(records: Sequence[Record], seed: int) -> list[Record]:
    """Returns the records in an order that depends on the seed."""
    return [records[index] for index in np.random.default_rng(seed).permutation(len(records))]


def fingerprint(sources: Sequence[Source]) -> str:
    """Returns a text that depends on the number of sources and the content of records. All factories count the same."""
    digest = hashlib.sha256()
    for source in sources:
        content = source.columns if isinstance(source, Record) else None
        digest.update(json.dumps(content, sort_keys=True, default=_digestible).encode())
    return f"{len(sources)} sources, {digest.hexdigest()[:16]}"


def _digestible(value: Any) -> Any:
    """Returns a JSON value for a value that JSON does not have; the name of the type for an unknown type."""
    if isinstance(value, Picture):
        return value.digest
    if isinstance(value, Message):
        return [value.role, value.name, value.tool_call_id, list(value.parts)]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return type(value).__name__


def _read_json_lines(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise InvalidInput(f"{where}: the line is not JSON: {error}", field=where) from None


def _read_parquet(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped]
        import pyarrow.parquet  # type: ignore[import-not-found, import-untyped]
    except ImportError:
        raise FailedPrecondition(f"{path} needs pyarrow: install it, or convert the file to .jsonl") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InvalidInput(f"{path} is not a parquet file: {error}", field="path") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(inner) for inner in value]
    return value
