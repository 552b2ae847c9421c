"""What the service and one image worker say to each other over a socket pair: one job at a time.

Both ends are this package in the same version on the same machine, so messages are pickled.
"""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from services.renderer.image_header import ImageHeader
from services.renderer.refusals import Cause
from services.renderer.shared_memory import Place


@dataclass(frozen=True)
class Ready:
    """The worker's first message: its processor is loaded and one image went through it."""

    settings: dict[str, Any]
    fingerprint: str


@dataclass(frozen=True)
class Job:
    """One image to process: what its header says, and the encoded file."""

    header: ImageHeader
    data: bytes


@dataclass(frozen=True)
class Done:
    """The image is processed. The tensors are in the shared memory until the next job."""

    places: list[Place]
    tensors_sha256: str
    seconds: float


@dataclass(frozen=True)
class Refused:
    """The image cannot be rendered."""

    cause: Cause
    message: str


@dataclass(frozen=True)
class Failed:
    """The worker failed, and lives on; the text is for the log."""

    error: str
    out_of_memory: bool


def send(connection: Connection, message: Ready | Job | Done | Refused | Failed) -> None:
    """Sends a message; `Connection.recv` reads it. `Connection.send` makes a pickler each time: five times the cost."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
