"""A checkpoint: weights in storage, under a `tinker://` path."""

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
    """Weights in storage under a name. `snapshot_id` is set for those to sample from; `public` ones are everybody's."""

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
        """The most pixels of the longer side of a picture that it is asked about; 0 keeps every size."""
        return conventions.picture_side(self.user_metadata) or 0


class CheckpointPath(NamedTuple):
    """The parts of a `tinker://` path."""

    model_id: str
    segment: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.segment}/{self.name}"


def folder_name(model: str) -> str:
    """The folder of a model's checkpoints."""
    return model.replace(":", "_")


def check_name(name: str, field: str) -> str:
    """Returns a checkpoint's name. Raises InvalidInput for one that could not be a folder of its own."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{field} {name[:_SHOWN]!r} is not a name: use 1 to 200 letters, digits or _ . - + = @, not starting "
            "with a dot",
            field=field,
        )
    return name


_SHOWN = 300
"""Characters of a wrong path that an error repeats."""


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
