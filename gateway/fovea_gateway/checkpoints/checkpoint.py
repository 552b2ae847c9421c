"""A checkpoint: stored weights that a `tinker://` path names."""

import re
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from fovea.api.v1 import weights_pb2
from fovea.wire import conventions
from fovea.wire.errors import InvalidInput

SCHEME = "tinker://"
TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
_SEGMENTS = (TRAINING, SAMPLER, EXTERNAL)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-+=@]{0,199}")


@dataclass(eq=False)
class Checkpoint:
    """Stored weights under a name.

    `snapshot_id` is set for weights to sample from. Every caller can read a `public` checkpoint.
    """

    path: str
    model_id: str
    owner: str
    segment: str
    name: str
    uri: str
    base_model: str
    lora: weights_pb2.LoraConfig
    snapshot_id: str = ""
    step: int = 0
    size_bytes: int = 0
    user_metadata: dict[str, str] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    expires_at: float | None = None
    public: bool = False

    @property
    def picture_side(self) -> int:
        """The maximum number of pixels of the longer side of images sent to it; 0 means that images keep their size."""
        return conventions.picture_side(self.user_metadata) or 0


class CheckpointPath(NamedTuple):
    """The components of a `tinker://` path."""

    model_id: str
    segment: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.segment}/{self.name}"


def folder_name(model: str) -> str:
    """Returns the name of the folder that holds a model's checkpoints."""
    return model.replace(":", "_")


def check_name(name: str, field: str) -> str:
    """Returns a checkpoint's name. Raises InvalidInput if the name could not be the name of a folder."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{field} {name[:_SHOWN]!r} is not a name: use 1 to 200 letters, digits or _ . - + = @, not starting "
            "with a dot",
            field=field,
        )
    return name


_SHOWN = 300
"""Characters of a wrong path that an error message repeats."""


def parse_path(path: str, field: str) -> CheckpointPath:
    """Splits a `tinker://` path. Raises InvalidInput if it is not one."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in _SEGMENTS or not all(parts):
        raise InvalidInput(
            f"{field} {path[:_SHOWN]!r} is not a checkpoint: expected {SCHEME}<run id>/weights/<name>, "
            f"{SCHEME}<run id>/sampler_weights/<name> or {SCHEME}<run id>/external_weights/<name>",
            field=field,
        )
    return CheckpointPath(*parts)
