"""A session: what a client opens, keeps alive and ends."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fovea.wire.errors import InvalidInput

_MOST_METADATA_BYTES = 64 * 2**10


@dataclass(eq=False)
class Session:
    """What a client opened; owns models and sampling sessions."""

    session_id: str
    owner: str
    request_key: str | None = None
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    display_name: str | None = None
    created_at: float = field(default_factory=time.time)
    heartbeat_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    end_reason: str | None = None
    end_detail: str | None = None
    next_sampling_number: int = 0


def new_session_id() -> str:
    """A fresh session id."""
    return f"sess-{secrets.token_hex(8)}"


def check_metadata(metadata: Mapping[str, Any], field: str = "user_metadata") -> None:
    """Raises InvalidInput for more of it than is kept in memory with each thing that has some."""
    size_bytes = len(json.dumps(metadata))
    if size_bytes > _MOST_METADATA_BYTES:
        raise InvalidInput(f"{field} has {size_bytes} bytes as JSON; at most {_MOST_METADATA_BYTES}", field=field)
