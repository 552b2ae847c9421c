"""Names: of models, sessions, futures, snapshots and checkpoints, and the rules that they follow.

session            sess-4f1c...                     made here
model              <session>:train:<model_seq_id>   the SDK derives the same string by itself
sampling session   <session>:sample:<n>
future             <model or sampling session>:<seq_id>, so that a repeat has the same id
snapshot           <model>@<n>, never reused
checkpoint         tinker://<model>/<segment>/<name>
"""

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from fovea.wire.errors import InvalidInput

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-+=@]{0,199}")
SCHEME = "tinker://"
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
_SEGMENTS = (TRAINING, SAMPLER, EXTERNAL)
INT64_MAX = 2**63 - 1
_MOST_METADATA_BYTES = 64 * 2**10


class Caller(NamedTuple):
    """Who sent a request."""

    owner: str


class CheckpointPath(NamedTuple):
    """The parts of a `tinker://` path."""

    model_id: str
    segment: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.segment}/{self.name}"


def new_session_id() -> str:
    """A fresh session id."""
    return f"sess-{secrets.token_hex(8)}"


def model_id(session_id: str, model_seq_id: int) -> str:
    """The id that the SDK expects for a session's n-th model."""
    return f"{session_id}:train:{model_seq_id}"


def folder_name(model: str) -> str:
    """The folder of a model's checkpoints."""
    return model.replace(":", "_")


def sampling_session_id(session_id: str, number: int) -> str:
    """Id of a session's n-th sampling session."""
    return f"{session_id}:sample:{number}"


def future_id(scope: str, seq_id: int) -> str:
    """Id of the command `seq_id` of a model or a sampling session."""
    return f"{scope}:{seq_id}"


def snapshot_id(model: str, number: int) -> str:
    """Id of a model's n-th snapshot."""
    return f"{model}@{number}"


def version_of(snapshot: str) -> tuple[str, int] | None:
    """The model and the number of a snapshot that can be sampled; None for the base and for exports."""
    model, _, number = snapshot.partition("@")
    return (model, int(number)) if number.isdecimal() else None


def export_snapshot_id(model: str, seq_id: int) -> str:
    """Id of the snapshot that the export command `seq_id` of a model writes; never sampled from."""
    return f"{model}@export-{seq_id}"


def sequence_ids(request_id: str, count: int) -> list[str]:
    """Ids of the sequences that a sample request will return."""
    return [f"{request_id}:{index}" for index in range(count)]


def check_name(name: str, field: str) -> str:
    """Returns a checkpoint's name. Raises InvalidInput for one that could not be a folder of its own."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{field} {name!r} is not a name: use 1 to 200 letters, digits or _ . - + = @, not starting with a dot",
            field=field,
        )
    return name


def parse_path(path: str, field: str) -> CheckpointPath:
    """Splits a `tinker://` path. Raises InvalidInput if it is not one."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in _SEGMENTS or not all(parts):
        raise InvalidInput(
            f"{field} {path!r} is not a checkpoint: expected {SCHEME}<run id>/weights/<name>, "
            f"{SCHEME}<run id>/sampler_weights/<name> or {SCHEME}<run id>/external_weights/<name>",
            field=field,
        )
    return CheckpointPath(*parts)


def check_metadata(metadata: Mapping[str, Any], field: str = "user_metadata") -> None:
    """Raises InvalidInput for more of it than is kept in memory with each thing that has some."""
    size_bytes = len(json.dumps(metadata))
    if size_bytes > _MOST_METADATA_BYTES:
        raise InvalidInput(f"{field} has {size_bytes} bytes as JSON; at most {_MOST_METADATA_BYTES}", field=field)


def check_seq_id(seq_id: int, field: str, least: int) -> int:
    """Returns a sequence number. Raises InvalidInput outside `least` .. 2^63-1."""
    if not least <= seq_id <= INT64_MAX:
        raise InvalidInput(f"{field} is {seq_id}; it counts up from {least}", field=field)
    return seq_id
