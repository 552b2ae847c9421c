"""Durable points: the state of a model after a command, copied to the host during training and written by a thread.

Every rank has a writer, and all ranks make the same calls. A failure here never fails a client's command: `KeepState`,
or the future that it returns, raises the errors of copying and writing, and `RecoveryKeeper` handles them.
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
from fovea_trainer.model.packed_attention import kernel_of
from fovea_trainer.model.trained_model import TrainedModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.recovery.recovery_folder import Point, RecoveryFolder
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.weights.checkpoint_folder import Checksums, Folder
from fovea_trainer.weights.snapshot_store import SnapshotStore
from fovea_trainer.weights.snapshot_taker import write_snapshot
from fovea_trainer.weights.training_state import ModelState, StateStore, state_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ALIGNMENT = 64
_ROUNDING = (
    "threads", "head_dtype", "expert_parallel", "token_budget", "patch_budget", "datum_ranks", "memory_limit_mib",
    "recompute", "logit_chunk_mib", "keep_gathered",
)  # fmt: skip
"""Settings that decide which values are computed together, and so the order in which floats are added."""


class HostCopies:
    """Copies of tensors on the host, in a reused buffer. On a GPU they are made while the device continues to compute.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies tensors as they are after all device work queued so far. The copies are valid until the next call.

        On a GPU the copies are asynchronous: call `wait` before reading them.

        Args:
            tensors: Tensors on the device.

        Returns:
            One host tensor per input, with the same shape and dtype.
        """
        sizes = [-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors]
        if self._memory.numel() < sum(sizes):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
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
        """Makes later device work wait until the copies are made. Call it before you change or free a copied tensor."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def fetched(self, tensor: Tensor) -> Tensor:
        """Returns one tensor on the host. Waits for this copy without delaying others. Callable from any thread."""
        if self._stream is None:
            return tensor
        with torch.cuda.stream(self._stream):
            return tensor.cpu()

    def wait(self) -> None:
        """Waits until the copies are complete. Callable from any thread."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass(frozen=True)
class Change:
    """The last command that changed a model's weights.

    Args:
        seq_id: Number of the last numbered command.
        answer: The response to it.
        count: Number of changes since the model was created or restored.
    """

    seq_id: int
    answer: Any
    count: int


class PendingState(NamedTuple):
    """A state that is being written.

    Args:
        seq_id: Number of the last command that the state includes.
        change_count: `Change.count` of the last change that the state includes.
        written: Resolves to the size in bytes once the state is durable.
    """

    seq_id: int
    change_count: int
    written: "Future[int]"


class RestoredModel(NamedTuple):
    """The description of a restored model, as its point has recorded it."""

    seq_id: int
    step: int
    answer: Any


class RecoveryWriter:
    """Writes and finds durable points. Only the rank's thread may call methods that do not say otherwise.

    Args:
        folder: The recovery store.
        control: Control group of the rank's thread.
        device: Device of this rank.
        base_model: Name of the base model, recorded in files.
        base_files: Digest of each file of the base, keyed by file name. Points of another base are rejected.
        numerics: Facts that affect the rounding of results, keyed by their names.
        adapters: The adapter snapshots that rank 0 holds.
    """

    def __init__(
        self,
        folder: RecoveryFolder,
        control: ControlGroup,
        device: torch.device,
        base_model: str,
        base_files: Mapping[str, str],
        numerics: Mapping[str, str],
        adapters: SnapshotStore,
    ) -> None:
        self.folder = folder
        self.adapters = adapters
        self._control = control
        self._base_model = base_model
        self._base = sha256(json.dumps(sorted(base_files.items())).encode()).hexdigest()
        self._numerics = dict(numerics)
        # The writer thread has its own control group, so that its collectives never interleave with those of commands.
        self._states = StateStore(ControlGroup(), base_model)
        self._copies = HostCopies(device)
        self._thread = ThreadPoolExecutor(1, "recovery")
        self._changes: dict[str, Change] = {}
        self._writing: Future[int] | None = None

    def before_change(self) -> None:
        """Waits for pending copies on the device.

        Call it before any model's weights or moments are written to or freed.
        """
        self._copies.before_writing()

    def changed(self, model_id: str, seq_id: int, answer: Any) -> None:
        """Records a command that changed weights. Call it after the command.

        A command without a number (`seq_id` 0) counts as a change, but the recorded number and answer stay those of the
        last numbered command.
        """
        before = self._changes.get(model_id, Change(0, None, 0))
        numbered = (seq_id, answer) if seq_id else (before.seq_id, before.answer)
        self._changes[model_id] = Change(*numbered, before.count + 1)

    def restored(self, model_id: str, point: Point) -> None:
        """Records that a model was restored from a point.

        Warns if rounding may differ from that of the trainer that wrote the point.
        """
        self._changes[model_id] = Change(point.seq_id, point.answer, 0)
        unlike = [name for name, value in self._numerics.items() if point.numerics.get(name, value) != value]
        if unlike and self._control.rank == 0:
            words = ", ".join(f"{name} {self._numerics[name]} instead of {point.numerics[name]}" for name in unlike)
            logger.warning("model %s continues with different numerics than before: %s", model_id, words)

    def changes_of(self, model_id: str) -> int:
        """Returns the number of changes to a model since it was created or restored. Callable from any thread."""
        return self._changes[model_id].count if model_id in self._changes else 0

    def forget(self, model_id: str) -> None:
        """Forgets the changes of a model. Call it when the model is freed."""
        self._changes.pop(model_id, None)

    def write_state(self, model: TrainedModel) -> PendingState:
        """Copies the state of a model and submits it for writing. Collective.

        Wait for the returned future before the next call, which reuses the host buffer.
        """
        if self._writing is not None:
            self._writing.exception()  # waits: rank 0 may have finished its write slightly earlier
        change = self._changes[model.model_id]
        state = state_of(model, self._control.rank, self._copied)
        self._writing = self._thread.submit(self._write, model.model_id, state, change)
        return PendingState(change.seq_id, change.count, self._writing)

    def find(self, model_id: str) -> tuple[str, Point]:
        """Returns URL and description of the newest undamaged point of a model. Collective.

        Raises:
            NotFound: The model has no undamaged point, or its newest one belongs to another base model.
        """
        damage = ""
        for url, point in self._control.on_rank_0(lambda: self.folder.whole(model_id)):
            if point.base != self._base:
                raise NotFound(f"{url} belongs to a base model other than {self._base_model}", field="model_id")
            if not (damaged := self._damaged_file(url, point)):
                return url, point
            damage = f": {url} is damaged, {damaged} does not match the recorded checksum"
            logger.error("%s is damaged: %s does not match the recorded checksum", url, damaged)
        raise NotFound(f"no durable point of model {model_id!r} is stored{damage}", field="model_id")

    def _damaged_file(self, url: str, point: Point) -> str:
        """Returns the names of a point's damaged files, joined by spaces. Each rank checks its share. Collective."""
        folder, share = Folder.at(url), sorted(point.checksums)[self._control.rank :: self._control.world_size]
        damaged = self._control.agree(
            lambda: [name for name in share if folder.checksum(name) != point.checksums[name]]
        )
        return self._control.broadcast(" ".join(name for each in self._control.gather(damaged) for name in each))

    def find_snapshot(self, snapshot_id: str) -> str | None:
        """Returns the URL of a stored snapshot, or None. Collective."""
        return self._control.on_rank_0(lambda: self.folder.find_snapshot(snapshot_id))

    def in_order(self, action: Callable[[], T]) -> "Future[T]":
        """Runs a file operation after all writes that were submitted before it. Callable from any thread."""
        return self._thread.submit(action)

    def write_snapshot(self, snapshot_id: str) -> "Future[int]":
        """Submits an adapter snapshot that rank 0 holds for writing. Callable from any thread.

        Returns:
            The size in bytes; 0 if rank 0 no longer holds the snapshot when its turn comes.
        """

        def write() -> int:
            if (found := self.adapters.get(snapshot_id)) is None:
                return 0
            tensors = {name: self._copies.fetched(tensor) for name, tensor in found.tensors.items()}
            url = self.folder.snapshot_url(found.identity.model_id, snapshot_id)
            return write_snapshot(replace(found, tensors=tensors), url, self._base_model)

        return self.in_order(write)

    def close(self) -> None:
        """Waits for pending writes and stops the thread."""
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
    """Returns the facts that affect the rounding of a trainer's results, keyed by setting."""
    is_cpu = device.type == "cpu"
    found = {
        "fovea": fovea.__version__,
        "torch": torch.__version__,
        "ranks": world_size,
        "device": torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device),
        "dtype": dtype,
        "attention": kernel_of(device, dtype)[0],
        **{name: getattr(settings, name) for name in _ROUNDING},
    }
    return {name: str(value) for name, value in found.items()}
