"""What the service and one image worker say to each other over a socket pair: one job at a time, header then bytes.

Both ends are this package in the same version on the same machine, so headers are pickled by `Connection`.
"""

from dataclasses import dataclass
from typing import Any

from services.renderer.image_header import ImageHeader
from services.renderer.refusals import Cause


@dataclass(frozen=True)
class Ready:
    """The worker's first message: its processor is loaded and one image went through it."""

    settings: dict[str, Any]
    fingerprint: str


@dataclass(frozen=True)
class Job:
    """One image to process. The encoded bytes follow."""

    header: ImageHeader


@dataclass(frozen=True)
class Done:
    """The image is processed. The bytes of each tensor follow, in this order."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each tensor."""
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
