"""Durable points: what a model is after a command, copied to the host beside training, written by a thread.

Every rank has a writer, and all are called alike. Nothing here ends a command of a client: what cannot be copied or
written is an error of `KeepState` or of the future that it gives, which `RecoveryKeeper` meets.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import fovea
from fovea.wire.errors import NotFound
from fovea_services.trainer.model.trained_model import TrainedModel
from fovea_services.trainer.ranks.control_group import ControlGroup
from fovea_services.trainer.settings import TrainerSettings
from fovea_services.trainer.snapshots.checkpoint_folder import Checksums, Folder
from fovea_services.trainer.snapshots.recovery_folder import Point, RecoveryFolder
from fovea_services.trainer.snapshots.snapshot_store import SnapshotStore
from fovea_services.trainer.snapshots.snapshot_taker import write_snapshot
from fovea_services.trainer.snapshots.training_state import ModelState, StateStore, state_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ALIGNMENT = 64
_ROUNDING = (
    "threads", "head_dtype", "expert_parallel", "token_budget", "patch_budget", "memory_limit_mib", "recompute",
    "logit_chunk_mib", "keep_gathered",
)  # fmt: skip
"""Settings that decide what is computed together, and so in what order numbers are added."""


class HostCopies:
    """Copies on the host, in memory that is used again; made while the device goes on computing.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of tensors as they are once what the device has been given is done; until the next call."""
        sizes = [-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors]
        if self._memory.numel() < sum(sizes):
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._stream is not None)
        parts = torch.split(self._memory[: sum(sizes)], sizes)
        copies = [
            part[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for part, t in zip(parts, tensors, strict=True)
        ]
        if self._stream is None:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            return copies
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
        self._copied = self._stream.record_event()
        return copies

    def before_writing(self) -> None:
        """To be called before tensors that were copied are written to: has the device finish copying first."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def fetched(self, tensor: Tensor) -> Tensor:
        """One tensor on the host; waits for it, and keeps nothing else waiting. From any thread."""
        if self._stream is None:
            return tensor
        with torch.cuda.stream(self._stream):
            return tensor.cpu()

    def wait(self) -> None:
        """Returns once the copies are made. From any thread."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass(frozen=True)
class Change:
    """The last command that changed a model's weights: which, what it answered, and how many there were with it."""

    seq_id: int
    answer: Any
    count: int


class KeptState(NamedTuple):
    """What is being written: the change that is the last in it, and the size in bytes once it is durable."""

    seq_id: int
    change_count: int
    written: "Future[int]"


class RestoredModel(NamedTuple):
    """What a point says of the model that was made from it."""

    seq_id: int
    step: int
    answer: Any


class RecoveryWriter:
    """Writes and finds durable points. The methods are for the rank's thread unless they say otherwise.

    Args:
        folder: Where they are kept.
        control: Of the rank's thread.
        device: Of this rank.
        base_model: Name of the base, for files.
        base_files: Digests of the base's files, by name: points of another base are none.
        numerics: What the last bits of what is computed depend on, by name.
    """

    def __init__(
        self,
        folder: RecoveryFolder,
        control: ControlGroup,
        device: torch.device,
        base_model: str,
        base_files: Mapping[str, str],
        numerics: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self._control = control
        self._base_model = base_model
        self._base = sha256(json.dumps(sorted(base_files.items())).encode()).hexdigest()
        self._numerics = dict(numerics)
        # Ranks talk of what they write beside what they talk of commands.
        self._states = StateStore(ControlGroup(), base_model)
        self._copies = HostCopies(device)
        self._thread = ThreadPoolExecutor(1, "recovery")
        self._changes: dict[str, Change] = {}
        self._writing: Future[int] | None = None

    def before_change(self) -> None:
        """To be called before weights or moments of any model are written to or freed."""
        self._copies.before_writing()

    def changed(self, model_id: str, seq_id: int, answer: Any) -> None:
        """To be called after a command that changed weights; without a number it counts to the one before."""
        before = self._changes.get(model_id, Change(0, None, 0))
        numbered = (seq_id, answer) if seq_id else (before.seq_id, before.answer)
        self._changes[model_id] = Change(*numbered, before.count + 1)

    def restored(self, model_id: str, point: Point) -> None:
        """To be called when a model was made from a point."""
        self._changes[model_id] = Change(point.seq_id, point.answer, 0)
        unlike = [name for name, value in self._numerics.items() if point.numerics.get(name, value) != value]
        if unlike and self._control.rank == 0:
            words = ", ".join(f"{name} {self._numerics[name]} instead of {point.numerics[name]}" for name in unlike)
            logger.warning("model %s goes on with other numerics than before: %s", model_id, words)

    def changes_of(self, model_id: str) -> int:
        """How often a model's weights have changed since it was made. From any thread."""
        return self._changes[model_id].count if model_id in self._changes else 0

    def forget(self, model_id: str) -> None:
        """To be called when a model is freed."""
        self._changes.pop(model_id, None)

    def keep(self, model: TrainedModel) -> KeptState:
        """Copies a model as it is and has it written; to be called again once that is done. Collective."""
        if self._writing is not None:
            self._writing.exception()  # other ranks may be a moment behind
        change = self._changes[model.model_id]
        state = state_of(model, self._control.rank, self._copied)
        self._writing = self._thread.submit(self._write, model.model_id, state, change)
        return KeptState(change.seq_id, change.count, self._writing)

    def find(self, model_id: str) -> tuple[str, Point]:
        """URL and description of the newest undamaged point of a model on this base. Collective. Raises NotFound."""
        damage = ""
        for url, point in self._control.on_rank_0(lambda: self.folder.whole(model_id)):
            if point.base != self._base:
                raise NotFound(f"{url} is of another base than {self._base_model}", field="model_id")
            if not (damaged := self._damaged_file(url, point)):
                return url, point
            damage = f": {url} is damaged, {damaged} is not what was written"
            logger.error("%s is damaged: %s is not what was written", url, damaged)
        raise NotFound(f"no durable point of model {model_id!r} is kept{damage}", field="model_id")

    def _damaged_file(self, url: str, point: Point) -> str:
        """A file of a point that is not what was written; empty if there is none. Every rank reads its share."""
        folder, share = Folder.at(url), sorted(point.checksums)[self._control.rank :: self._control.world_size]
        damaged = self._control.agree(
            lambda: [name for name in share if folder.checksum(name) != point.checksums[name]]
        )
        return self._control.broadcast(" ".join(name for each in self._control.gather(damaged) for name in each))

    def find_snapshot(self, snapshot_id: str) -> str | None:
        """URL of a snapshot that is kept. Collective."""
        return self._control.on_rank_0(lambda: self.folder.find_snapshot(snapshot_id))

    def in_order(self, action: Callable[[], T]) -> "Future[T]":
        """Runs what concerns files once all that was asked for before is written. From any thread."""
        return self._thread.submit(action)

    def write_snapshot(self, snapshot_id: str, held: SnapshotStore) -> "Future[int]":
        """Has an adapter written that rank 0 holds; 0 bytes if it is held no longer. From any thread."""

        def write() -> int:
            if (found := held.get(snapshot_id)) is None:
                return 0
            tensors = {name: self._copies.fetched(tensor) for name, tensor in found.tensors.items()}
            url = self.folder.snapshot_url(found.identity.model_id, snapshot_id)
            return write_snapshot(replace(found, tensors=tensors), url, self._base_model)

        return self.in_order(write)

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.shutdown()

    def _copied(self, live: Sequence[Tensor]) -> list[Tensor]:
        return self._control.agree(lambda: self._copies.of(live))

    def _write(self, model_id: str, state: ModelState, change: Change) -> int:
        self._copies.wait()

        def describe(folder: Folder, checksums: Checksums) -> None:
            lora = asdict(state.lora) if state.lora else None
            point = Point(change.seq_id, state.step, change.answer, lora, self._base, time.time(), folder.sizes())
            replace(point, numerics=self._numerics, checksums=checksums).write_to(folder)

        size_bytes = self._states.write(state, self.folder.point_url(model_id, change.seq_id), describe)
        if self._control.rank == 0:
            self.folder.drop_older(model_id, change.seq_id)
        return size_bytes


def numerics_of(settings: TrainerSettings, dtype: torch.dtype, device: torch.device, world_size: int) -> dict[str, str]:
    """What the last bits of what a trainer computes depend on, by name."""
    is_cpu = device.type == "cpu"
    found = {
        "fovea": fovea.__version__,
        "torch": torch.__version__,
        "ranks": world_size,
        "device": torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device),
        "dtype": dtype,
        **{name: getattr(settings, name) for name in _ROUNDING},
    }
    return {name: str(value) for name, value in found.items()}
