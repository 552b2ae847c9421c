"""TakeSnapshot: freezes live weights as a named copy with a digest. RestoreSnapshot: reads a copy back from storage."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from google.protobuf import json_format
from torch import Tensor

from fovea.api.v1 import weights_pb2
from fovea.wire.conventions import ADAPTER_CONFIG, ADAPTER_WEIGHTS, EXPERTS_NOTE, PEFT_READS_EXPERTS_OF, SNAPSHOT_FILE
from fovea.wire.errors import AlreadyExists, FoveaError, InvalidInput, NotFound
from fovea.wire.manifest import padded_bytes
from fovea_trainer.command_queue import TakeSnapshot
from fovea_trainer.model.experts import ExpertLayout
from fovea_trainer.model.lora import PEFT_PREFIX, LoraWeights
from fovea_trainer.model.memory_budget import MemoryBudget
from fovea_trainer.model.sharding import ShardedModel, local_of
from fovea_trainer.model.trained_model import AdapterModel, FullModel, TrainedModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.weights import weight_files
from fovea_trainer.weights.checkpoint_folder import Chunks, Folder, stage_together, write_folder
from fovea_trainer.weights.host_memory import SaveThread
from fovea_trainer.weights.snapshot_store import (
    PACKED,
    SnapshotStore,
    StoredSnapshot,
    digest_of,
    packed,
    size_of,
    specs_of,
    unpacked,
)
from fovea_weights.weight_transfer import device_digest

LORA = "fovea_lora.json"

_DIGEST_BYTES = 64 * 2**20


class TakenSnapshot(NamedTuple):
    """A snapshot in memory.

    Args:
        identity: Its identity.
        written: Resolves to the size in bytes once it is in storage too; None if nothing is left to write.
    """

    identity: weights_pb2.Snapshot
    written: "Future[int] | None" = None


class SnapshotTaker:
    """Freezes models. Methods are collective unless they say otherwise.

    Args:
        control: Control group of the rank's thread.
        sharded: The base model.
        adapters: Store of adapter snapshots, filled on rank 0 only.
        full: Store of full-parameter snapshots. On each rank it contains that rank's shards.
        account: Memory budget of this rank.
        model_dir: Folder of the base checkpoint.
        base_model: Name of the base model, recorded in files.
        thread: Writes snapshots of adapters on rank 0.
    """

    def __init__(
        self,
        control: ControlGroup,
        sharded: ShardedModel,
        adapters: SnapshotStore,
        full: SnapshotStore,
        account: MemoryBudget,
        model_dir: Path,
        base_model: str,
        thread: SaveThread,
    ) -> None:
        self._control = control
        self._sharded = sharded
        self._adapters = adapters
        self._full = full
        self._memory_budget = account
        self._model_dir = model_dir
        self._base_model = base_model
        self._thread = thread
        self._base_identity: weights_pb2.Snapshot | None = None
        self._packings: WeakKeyDictionary[LoraWeights, dict[torch.dtype, _Layout]] = WeakKeyDictionary()

    def take(self, command: TakeSnapshot, model: TrainedModel) -> TakenSnapshot:
        """Freezes a model in memory, and also in storage if the command has a URI.

        An adapter is only copied here, and written by a thread of rank 0. Full parameters are written here. An export
        does not stay in memory.

        Raises:
            AlreadyExists: The snapshot id already names other weights.
        """
        identity = weights_pb2.Snapshot(snapshot_id=command.snapshot_id, model_id=command.model_id, step=model.step)
        if isinstance(model, FullModel):
            return TakenSnapshot(self._take_full(identity, model, command.uri))
        assert isinstance(model, AdapterModel)
        live = model.weights.whole(model.weights.flat.detach())
        is_first = self._control.rank == 0
        taken = self._control.agree(lambda: self._take_adapter(identity, model, live, command) if is_first else None)
        written = self._thread.submit(partial(self._write_adapter, command, taken)) if taken and command.uri else None
        return TakenSnapshot(self._control.broadcast(taken.identity if taken else None), written)

    def describe_full(
        self, snapshot_id: str, live: FullModel | None
    ) -> tuple[weights_pb2.Snapshot, list[weights_pb2.TensorSpec]]:
        """Returns identity and specs of a held full-parameter snapshot. The empty id means the base.

        Args:
            snapshot_id: Id of the snapshot.
            live: The full-parameter model, if one exists. It then holds the shards of the base.

        Raises:
            NotFound: The snapshot is not held.
        """
        if snapshot_id:
            held = self._held_full(snapshot_id)
            return held.identity, held.specs
        like = dict(self._sharded.named_shards())
        specs = self._specs_of(like)
        if self._base_identity is None:
            self._base_identity = weights_pb2.Snapshot(
                digest=digest_of(specs, weight_files.gathered(self._base_locals(live), like, self._layouts)),
                size_bytes=size_of(specs),
                kind=weights_pb2.SNAPSHOT_KIND_FULL,
            )
        return self._base_identity, specs

    def locals_of(self, snapshot_id: str, live: FullModel | None) -> dict[str, Tensor]:
        """Returns this rank's shards of a held full-parameter snapshot, or of the base.

        Raises:
            NotFound: The snapshot is not held.
        """
        return self._held_full(snapshot_id).tensors if snapshot_id else self._base_locals(live)

    def restore(self, snapshot_id: str, uri: str) -> StoredSnapshot:
        """Reads a snapshot that `take` wrote to storage back into memory.

        Raises:
            NotFound: The folder has no snapshot.
            InvalidInput: The folder has another snapshot, does not fit the model, or is damaged.
        """
        identity = self._control.on_rank_0(lambda: _read_identity(Folder.at(uri), snapshot_id))
        if identity.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER:
            held = self._control.agree(lambda: _read_adapter(Folder.at(uri), identity))
            if self._control.rank == 0:
                self._adapters.put(held)
            return held
        like = dict(self._sharded.named_shards())
        shards = self._control.agree(lambda: weight_files.read_shards(Folder.at(uri), like, self._layouts))
        held = StoredSnapshot(identity, shards, self._specs_of(like), None)
        self._full.put(held)
        return held

    @property
    def _export_form(self) -> "ExportForm":
        return ExportForm(self._sharded.module.hf.config.model_type)

    @property
    def _layouts(self) -> Mapping[str, ExpertLayout]:
        return self._sharded.module.expert_layouts

    def _specs_of(self, shards: Mapping[str, Tensor]) -> list[weights_pb2.TensorSpec]:
        """Returns the specs of full parameters in the layout of checkpoint files. Transfers use the same layout."""
        return specs_of(weight_files.in_files(shards, self._layouts))

    def _held_full(self, snapshot_id: str) -> StoredSnapshot:
        held = self._full.get(snapshot_id)
        if held is None:
            raise NotFound(f"snapshot {snapshot_id!r} is not held by this trainer", field="snapshot_id")
        return held

    def _base_locals(self, live: FullModel | None) -> dict[str, Tensor]:
        if live is not None:
            return live.base
        return {name: local_of(shard) for name, shard in self._sharded.named_shards()}

    def _take_adapter(
        self, identity: weights_pb2.Snapshot, model: AdapterModel, live: Tensor, command: TakeSnapshot
    ) -> StoredSnapshot:
        # The base computes in 16 bits with adapters in 16 bits, and so do samplers. An export is for other programs.
        dtype = torch.float32 if command.is_export else self._sharded.module.hf.dtype
        layout = self._layout_of(model.weights, dtype)
        device = self._device_for(self._adapters, layout.packed_bytes, identity.model_id)
        flat = live.to(device, dtype, copy=True)
        data = flat.view(torch.uint8)
        if data.numel() != layout.packed_bytes:  # some tensor needs padding
            data = packed(layout.specs, dict(model.weights.named(flat)).values())
        identity.kind = weights_pb2.SNAPSHOT_KIND_ADAPTER
        identity.digest = packed_digest(layout.specs, data, live.device)
        identity.size_bytes = layout.size_bytes
        _refuse_reuse(self._adapters.get(identity.snapshot_id), identity)
        taken = StoredSnapshot(identity, {PACKED: data}, layout.specs, model.settings.message())
        if not command.is_export:
            self._adapters.put(taken)
        return taken

    def _write_adapter(self, command: TakeSnapshot, taken: StoredSnapshot) -> int:
        tensors = {name: self._thread.copies.fetched(tensor) for name, tensor in taken.tensors.items()}
        form = self._export_form if command.is_export else None
        try:
            return write_snapshot(replace(taken, tensors=tensors), command.uri, self._base_model, form)
        except BaseException:
            self._adapters.drop(command.snapshot_id)  # its client learns that there is no such snapshot
            raise

    def _layout_of(self, weights: LoraWeights, dtype: torch.dtype) -> "_Layout":
        layouts = self._packings.setdefault(weights, {})
        if dtype not in layouts:
            layouts[dtype] = _Layout.of(weights, dtype)
        return layouts[dtype]

    def _take_full(self, identity: weights_pb2.Snapshot, model: FullModel, uri: str) -> weights_pb2.Snapshot:
        specs = self._specs_of(model.shards)
        identity.kind = weights_pb2.SNAPSHOT_KIND_FULL
        identity.size_bytes = size_of(specs)
        self._full.make_room(identity, identity.size_bytes)
        copies = self._control.agree(lambda: self._copied(model, identity.model_id))
        identity.digest = digest_of(specs, weight_files.gathered(copies, model.shards, self._layouts))
        _refuse_reuse(self._full.get(identity.snapshot_id), identity)
        if uri:
            self._write_full(identity, copies, model, uri)
        self._full.put(StoredSnapshot(identity, copies, specs, None))
        return identity

    def _device_for(self, held: SnapshotStore, size_bytes: int, model_id: str) -> torch.device:
        """Returns the device for a new snapshot. If that device lacks room, drops older snapshots.

        Raises:
            ResourceExhausted: The snapshot still does not fit.
        """
        device = self._memory_budget.device_for(size_bytes)
        if not self._memory_budget.has_room(device, size_bytes):
            held.drop_older()
        self._memory_budget.check_copy(device, size_bytes, f"a snapshot of model {model_id!r}")
        return device

    def _copied(self, model: FullModel, model_id: str) -> dict[str, Tensor]:
        size_bytes = sum(local.numel() * local.element_size() for local in model.locals.values())
        device = self._device_for(self._full, size_bytes, model_id)
        return {name: local.to(device, copy=True) for name, local in model.locals.items()}

    def _write_full(
        self, identity: weights_pb2.Snapshot, copies: dict[str, Tensor], model: FullModel, uri: str
    ) -> None:
        target, staging = stage_together(self._control, uri)
        whole = weight_files.gathered(copies, model.shards, self._layouts)
        names = weight_files.in_files(model.shards, self._layouts)

        def finish() -> None:
            staging.write(SNAPSHOT_FILE, _identity_json(identity))
            target.commit(staging)

        try:
            weight_files.write_checkpoint(zip(names, whole, strict=True), staging, self._model_dir, self._control)
            self._control.on_rank_0(finish)
        except FoveaError:  # raised on all ranks; a partial folder would occupy space
            self._control.on_rank_0(staging.discard)
            raise


@dataclass(frozen=True)
class _Layout:
    """The transfer layout of one model's adapter, shared by all its snapshots."""

    specs: list[weights_pb2.TensorSpec]
    size_bytes: int
    packed_bytes: int

    @classmethod
    def of(cls, weights: LoraWeights, dtype: torch.dtype) -> "_Layout":
        specs = adapter_specs(weights, dtype)
        return cls(specs, size_of(specs), sum(map(padded_bytes, specs)))


def adapter_specs(weights: LoraWeights, dtype: torch.dtype) -> list[weights_pb2.TensorSpec]:
    """Returns the specs of an adapter's snapshots in a dtype."""
    return specs_of(dict(weights.named(torch.empty(weights.whole_size, dtype=dtype, device="meta"))))


@dataclass(frozen=True)
class ExportForm:
    """The form of an adapter export, which other programs read.

    Args:
        model_type: `model_type` of the base checkpoint's configuration.
    """

    model_type: str

    def files(self, tensors: Mapping[str, Tensor], lora: weights_pb2.LoraConfig, base_model: str) -> dict[str, Chunks]:
        """Returns the adapter's two files.

        If PEFT cannot read the experts' factors for this model type, a note in the configuration says so.
        """
        spread = dict(weight_files.one_by_one(tensors))
        is_lost = spread.keys() != tensors.keys() and self.model_type not in PEFT_READS_EXPERTS_OF
        note = EXPERTS_NOTE if is_lost else ""
        return weight_files.peft_files(spread.items(), lora.rank, lora.alpha, base_model, note)


def write_snapshot(snapshot: StoredSnapshot, uri: str, base_model: str, export: ExportForm | None = None) -> int:
    """Writes an adapter to `uri`, as an export or in the form that `restore` reads. Returns the size in bytes."""
    lora = snapshot.lora
    assert lora is not None
    tensors = dict(unpacked(snapshot.specs, snapshot.tensors[PACKED]))
    if export is not None:
        files = export.files(tensors, lora, base_model)
    else:
        files = weight_files.peft_files(tensors.items(), lora.rank, lora.alpha, base_model)
    lora_json = json_format.MessageToJson(lora).encode()
    return write_folder(uri, {**files, LORA: lora_json, SNAPSHOT_FILE: _identity_json(snapshot.identity)})


def write_snapshot_of_point(snapshot: StoredSnapshot, uri: str, point: Folder) -> int:
    """Writes an adapter to `uri` that has the weights of a durable point: the two share one file on a disk.

    The point may be removed afterwards. An object store copies the file.

    Returns:
        The bytes that were written and not copied.
    """
    assert snapshot.lora is not None
    own = {
        LORA: json_format.MessageToJson(snapshot.lora).encode(),
        SNAPSHOT_FILE: _identity_json(snapshot.identity),
    }
    write_folder(uri, own, shared={name: point for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)})
    return sum(map(len, own.values()))


def packed_digest(specs: Sequence[weights_pb2.TensorSpec], data: Tensor, device: torch.device) -> str:
    """Returns the digest of tensors that are already packed, computed on `device` in chunks.

    Args:
        specs: Specs of the tensors.
        data: uint8 [n].
        device: Device that computes the digest.
    """
    digest = device_digest()
    digest.add(specs, torch.empty(0, dtype=torch.int64, device=device))
    for part in torch.split(data, _DIGEST_BYTES):
        digest.add((), part.to(device).view(torch.int64))
    return digest.hexdigest()


def _refuse_reuse(held: StoredSnapshot | None, identity: weights_pb2.Snapshot) -> None:
    if held is not None and held.identity.digest != identity.digest:
        raise AlreadyExists(
            f"snapshot_id {identity.snapshot_id!r} already names other weights; a snapshot cannot be changed",
            field="snapshot_id",
        )


def _identity_json(identity: weights_pb2.Snapshot) -> bytes:
    return json_format.MessageToJson(identity).encode()


def _read_identity(folder: Folder, snapshot_id: str) -> weights_pb2.Snapshot:
    identity = json_format.Parse(folder.read(SNAPSHOT_FILE), weights_pb2.Snapshot())
    if identity.snapshot_id != snapshot_id:
        raise InvalidInput(f"{folder.path} holds snapshot {identity.snapshot_id!r}, not {snapshot_id!r}", field="uri")
    return identity


def _read_adapter(folder: Folder, identity: weights_pb2.Snapshot) -> StoredSnapshot:
    tensors = weight_files.read_tensors(folder.read(ADAPTER_WEIGHTS), folder.path)
    order = json.loads(folder.read(ADAPTER_CONFIG))["target_modules"]
    named = {
        name: tensors[name]
        for module in order
        for name in (f"{PEFT_PREFIX}{module}.lora_{part}.weight" for part in "AB")
    }
    specs = specs_of(named)
    if size_of(specs) != identity.size_bytes:  # a file of a durable point, which has the weights in float32
        named = {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}
        specs = specs_of(named)
    data = packed(specs, named.values())
    digest = packed_digest(specs, data, data.device)
    if digest != identity.digest:
        raise InvalidInput(f"{folder.path} has digest {digest}, not {identity.digest}: it is damaged", field="uri")
    lora = json_format.Parse(folder.read(LORA), weights_pb2.LoraConfig())
    return StoredSnapshot(identity, {PACKED: data}, specs, lora)
