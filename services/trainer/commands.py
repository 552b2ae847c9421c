"""What rank 0 tells all ranks to do. Plain data, sent to our own processes only."""

from dataclasses import dataclass
from typing import Any

from services.trainer.batches.datum_decoding import Datum
from services.trainer.batches.packing import DatumSize
from services.trainer.model.lora import LoraSettings
from services.trainer.model.optimizer import Adam


@dataclass(frozen=True)
class Heartbeat:
    """Nothing; keeps idle connections alive and notices ranks that do not answer."""


@dataclass(frozen=True)
class Shutdown:
    """Leave the loop."""


@dataclass(frozen=True)
class CreateModel:
    """Make a model; full parameters if `lora` is None."""

    model_id: str
    lora: LoraSettings | None


@dataclass(frozen=True)
class DeleteModel:
    """Free a model."""

    model_id: str


@dataclass(frozen=True)
class PrepareLosses:
    """Start what traced losses are computed with, without waiting for it; says whether all ranks have it ready."""


@dataclass(frozen=True)
class ForwardBackward:
    """Compute a loss. `header` and `datums` are serialized messages that were checked on rank 0; `sizes` are theirs.

    `drop_gradients` drops those that are there already, first. `decoded` is what rank 0 made of the datums when it
    checked; it is not sent.
    """

    model_id: str
    header: bytes
    backward: bool
    drop_gradients: bool
    datums: list[bytes]
    sizes: list[DatumSize]
    decoded: list[Datum] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "decoded": None}


@dataclass(frozen=True)
class ClearGradients:
    """Drop gradients."""

    model_id: str


@dataclass(frozen=True)
class OptimStep:
    """Apply gradients."""

    model_id: str
    adam: Adam


@dataclass(frozen=True)
class SaveState:
    """Write weights and optimizer."""

    model_id: str
    uri: str


@dataclass(frozen=True)
class LoadState:
    """Read weights, and the optimizer if asked."""

    model_id: str
    uri: str
    optimizer: bool


@dataclass(frozen=True)
class TakeSnapshot:
    """Freeze weights under a name."""

    model_id: str
    snapshot_id: str
    uri: str


@dataclass(frozen=True)
class RestoreSnapshot:
    """Read a snapshot that was dropped from memory back from storage."""

    snapshot_id: str
    uri: str


@dataclass(frozen=True)
class ForgetSnapshot:
    """Drop a snapshot from memory."""

    snapshot_id: str


@dataclass(frozen=True)
class BroadcastFull:
    """Gather a snapshot of full parameters and send it over the transfer group that rank 0 holds open."""

    snapshot_id: str
    group_id: str
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class DescribeFull:
    """Identity and tensors of a snapshot of full parameters, kept until `UnpinFull`; the empty name is the base."""

    snapshot_id: str


@dataclass(frozen=True)
class UnpinFull:
    """The push of a snapshot that was described is over."""

    snapshot_id: str


Command = (
    Heartbeat
    | Shutdown
    | CreateModel
    | DeleteModel
    | PrepareLosses
    | ForwardBackward
    | ClearGradients
    | OptimStep
    | SaveState
    | LoadState
    | TakeSnapshot
    | RestoreSnapshot
    | ForgetSnapshot
    | BroadcastFull
    | DescribeFull
    | UnpinFull
)
