"""SaveState and LoadState: weights, optimizer and step count in one folder.

An adapter's folder is a PEFT adapter with `optimizer.safetensors` beside it; full parameters are stored by
torch.distributed.checkpoint under `dcp/`, readable by any number of ranks, and read without running anything that
somebody else put there. Both have a `state.json`.
"""

import io
import json
import logging
import pickle
from typing import Any, NoReturn, cast

import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor

from fovea.wire.errors import FoveaError, Internal, InvalidInput
from services.trainer.model.optimizer import MOMENTS
from services.trainer.model.trained_model import AdapterModel, FullModel, TrainedModel
from services.trainer.ranks.control_group import ControlGroup
from services.trainer.ranks.plain_pickle import MetadataUnpickler
from services.trainer.snapshots import weight_files
from services.trainer.snapshots.checkpoint_folder import Folder, stage_together, write_folder

logger = logging.getLogger(__name__)

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
DCP = "dcp"
FORMAT = 1


class PlainReader(FsspecReader):
    """Reads the description of a checkpoint as plain data; files of tensors torch itself reads so."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As FsspecReader does. Raises InvalidInput for what is no description of a checkpoint."""
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with self.fs.create_stream(path, "rb") as file:
                found: Metadata = MetadataUnpickler(file).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            AttributeError,
            ImportError,
            IndexError,
            TypeError,
            ValueError,
        ) as error:
            raise InvalidInput(f"{path} is no checkpoint's description: {error}", field="uri") from None
        files = found.storage_data.values() if isinstance(found, Metadata) else [None]
        if not all(isinstance(file, _StorageInfo) and "/" not in file.relative_path for file in files):
            raise InvalidInput(f"{path} does not describe files of its own folder", field="uri")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors alone: for anything else torch would unpickle whatever is there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Refuses what is no tensor. Raises InvalidInput that names it."""
        raise InvalidInput(f"{read_item.storage_index.fqn} is no tensor", field="uri")


class StateStore:
    """Saves and loads models. All methods are collective and raise FoveaErrors on all ranks."""

    def __init__(self, control: ControlGroup, base_model: str) -> None:
        self._control = control
        self._base_model = base_model

    def save(self, model: TrainedModel, uri: str) -> int:
        """Replaces the folder at `uri`; returns its size in bytes."""
        if isinstance(model, AdapterModel):
            weights = model.weights.whole(model.weights.flat)
            moments = {key: model.weights.whole(flat) for key, flat in model.optimizer.moments()[0].items()}
            return self._control.on_rank_0(lambda: write_folder(uri, self._adapter_files(model, weights, moments)))
        assert isinstance(model, FullModel)
        return self._save_full(model, uri)

    def load(self, model: TrainedModel, uri: str, optimizer: bool) -> int:
        """Reads a folder into a model; returns the step count that it now has. Gradients are dropped.

        Raises NotFound if nothing is there, InvalidInput if it does not fit the model; the model is then unchanged.
        """
        kind = "adapter" if isinstance(model, AdapterModel) else "full"
        saved_step = self._control.on_rank_0(lambda: _saved_step(Folder.at(uri), kind))
        step = saved_step if optimizer else 0
        if isinstance(model, AdapterModel):
            self._load_adapter(model, uri, optimizer, step)
        else:
            assert isinstance(model, FullModel)
            self._load_full(model, uri, optimizer, step)
        model.resume_at(step)
        return step

    def _adapter_files(self, model: AdapterModel, flat: Tensor, flat_moments: dict[str, Tensor]) -> dict[str, bytes]:
        settings = model.settings
        moments = {
            f"{moment}.{name}": part.cpu().contiguous()
            for moment, flat_moment in flat_moments.items()
            for name, part in model.weights.named(flat_moment)
        }
        return {
            **weight_files.peft_files(model.weights.named(flat), settings.rank, settings.alpha, self._base_model),
            OPTIMIZER: save_safetensors(moments, metadata={"format": "pt"}),
            STATE: _state_json("adapter", model.step),
        }

    def _load_adapter(self, model: AdapterModel, uri: str, optimizer: bool, step: int) -> None:
        names = [weight_files.ADAPTER_CONFIG, weight_files.ADAPTER_WEIGHTS, *([OPTIMIZER] if optimizer else [])]
        files = self._control.on_rank_0(lambda: {name: Folder.at(uri).read(name) for name in names})
        flat, moments = self._control.agree(lambda: _parse_adapter(model, files, uri))
        model.weights.flat.copy_(model.weights.part(flat))
        model.optimizer.load([{key: model.weights.part(moment) for key, moment in moments.items()}], step)

    def _save_full(self, model: FullModel, uri: str) -> int:
        target, staging = stage_together(self._control, uri)
        try:
            writer = FsspecWriter(staging.url(DCP))
            save_checkpoint(_full_state(model), storage_writer=writer, process_group=self._control.group)
        except CheckpointException as error:
            self._control.on_rank_0(staging.discard)
            raise _checkpoint_failure(error, uri) from None
        return self._control.on_rank_0(lambda: _finish_full(target, staging, model.step))

    def _load_full(self, model: FullModel, uri: str, optimizer: bool, step: int) -> None:
        folder = self._control.agree(lambda: Folder.at(uri))
        reader = PlainReader(folder.url(DCP))
        state = _full_state(model, fresh=True)
        if not optimizer:
            state = {"weights": state["weights"]}
        self._control.on_rank_0(lambda: _check_shapes(reader, state, uri))
        try:
            load_checkpoint(state, storage_reader=reader, planner=TensorPlanner(), process_group=self._control.group)
        except CheckpointException as error:
            raise _checkpoint_failure(error, uri) from None
        for name, master in model.masters.items():
            master.copy_(state["weights"][name].to_local())
        moments: list[dict[str, Tensor]] = [
            {key: state[key][name].to_local() if optimizer else torch.zeros_like(master) for key in MOMENTS}
            for name, master in model.masters.items()
        ]
        model.optimizer.load(moments, step)


def _parse_adapter(model: AdapterModel, files: dict[str, bytes], uri: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights and moments in new whole buffers; moments are zero if no optimizer file is given."""
    settings = model.settings
    config = json.loads(files[weight_files.ADAPTER_CONFIG])
    if (found := (config["r"], config["lora_alpha"])) != (settings.rank, settings.alpha):
        raise InvalidInput(
            f"{uri} has rank and alpha {found}, the model has {(settings.rank, settings.alpha)}", field="uri"
        )
    flat = model.weights.flat.new_empty(model.weights.whole_size)
    tensors = weight_files.read_tensors(files[weight_files.ADAPTER_WEIGHTS], uri)
    weight_files.copy_into(model.weights.named(flat), tensors, uri)
    moments = {key: torch.zeros_like(flat) for key in MOMENTS}
    if OPTIMIZER in files:
        saved = weight_files.read_tensors(files[OPTIMIZER], uri)
        parts = [
            (f"{key}.{name}", part) for key, buffer in moments.items() for name, part in model.weights.named(buffer)
        ]
        weight_files.copy_into(parts, saved, uri)
    return flat, moments


def _full_state(model: FullModel, fresh: bool = False) -> dict[str, Any]:
    """Weights and moments as sharded tensors; empty ones of the same layout if `fresh`."""

    def sharded(local: Tensor, like: DTensor) -> DTensor:
        data = torch.empty_like(local) if fresh else local
        return DTensor.from_local(
            data, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    like = {name: cast(DTensor, model.shards[name]) for name in model.masters}
    state: dict[str, Any] = {"weights": {name: sharded(model.masters[name], like[name]) for name in like}}
    for key in MOMENTS:
        moments = [values[key] for values in model.optimizer.moments()]
        state[key] = {name: sharded(moment, like[name]) for name, moment in zip(like, moments, strict=True)}
    return state


def _check_shapes(reader: PlainReader, state: dict[str, Any], uri: str) -> None:
    found = reader.read_metadata().state_dict_metadata
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            entry = found.get(f"{group}.{name}")
            if not isinstance(entry, TensorStorageMetadata):
                raise InvalidInput(f"{uri} has no {group}.{name}: it was saved from another model", field="uri")
            if tuple(entry.size) != tuple(tensor.shape):
                raise InvalidInput(
                    f"{uri} has {name} {list(entry.size)}, the model needs {list(tensor.shape)}", field="uri"
                )


def _finish_full(target: Folder, staging: Folder, step: int) -> int:
    staging.write(STATE, _state_json("full", step))
    size_bytes = staging.size_bytes()
    target.commit(staging)
    return size_bytes


def _state_json(kind: str, step: int) -> bytes:
    return json.dumps({"format": FORMAT, "kind": kind, "step": step}).encode()


def _saved_step(folder: Folder, kind: str) -> int:
    state = json.loads(folder.read(STATE))
    if state.get("format") != FORMAT:
        raise InvalidInput(f"{folder.path} has format {state.get('format')}, this build reads {FORMAT}", field="uri")
    if state["kind"] != kind:
        raise InvalidInput(f"{folder.path} holds {state['kind']} parameters, the model is {kind}", field="uri")
    return int(state["step"])


def _checkpoint_failure(error: CheckpointException, uri: str) -> FoveaError:
    logger.error("checkpoint at %s failed", uri, exc_info=error)
    return Internal(f"the checkpoint at {uri} could not be written or read; the trainer's log says why")
