"""SaveState and LoadState: weights, optimizer and step count in one folder.

An adapter's folder is a PEFT adapter with an additional `optimizer.safetensors`. Full parameters are stored by
torch.distributed.checkpoint under `dcp/`, which any number of ranks can read. Reading never unpickles arbitrary
objects, so a malicious checkpoint cannot run code. Both kinds have a `state.json`. An adapter without `state.json` is
an export or comes from another program; it loads as a model that has taken no step.
"""

import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fovea.wire.conventions import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fovea.wire.errors import FoveaError, Internal, InvalidInput
from fovea_trainer.model.lora import PEFT_PREFIX, LoraSettings
from fovea_trainer.model.model_family import LoraTarget
from fovea_trainer.model.optimizer import MOMENTS
from fovea_trainer.model.sharding import local_of
from fovea_trainer.model.trained_model import AdapterModel, FullModel, TrainedModel
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.weights import weight_files
from fovea_trainer.weights.checkpoint_folder import (
    Chunks,
    Describe,
    Folder,
    stage_together,
    write_folder,
)
from fovea_trainer.weights.host_memory import SaveThread
from fovea_trainer.weights.torch_checkpoint import PlainReader, TensorPlanner, Writer

logger = logging.getLogger(__name__)

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
DCP = "dcp"
FORMAT = 1


@dataclass(frozen=True)
class ModelState:
    """The saved state of a model.

    Args:
        step: Optimizer steps that the model has taken.
        lora: Settings of an adapter; None for full parameters.
        tensors: For "weights" and each of MOMENTS, a mapping from parameter name to tensor. Tensors of an adapter are
            unsharded and on rank 0 only. Full parameters are DTensors if there are several ranks.
    """

    step: int
    lora: LoraSettings | None
    tensors: dict[str, dict[str, Tensor]]

    @property
    def kind(self) -> str:
        """The kind of state, as written in `state.json`."""
        return "full" if self.lora is None else "adapter"


Copying = Callable[[Sequence[Tensor]], list[Tensor]]
"""Copies tensors, to a device that the function chooses."""


def state_of(model: TrainedModel, rank: int, copied: Copying = list) -> ModelState:
    """Returns the current state of a model. Collective.

    Args:
        model: The model.
        rank: This rank.
        copied: Copies the tensors; called once on each rank. By default the state refers to the live tensors.
    """
    if isinstance(model, FullModel):
        return ModelState(model.step, None, _full_tensors(model, copied))
    assert isinstance(model, AdapterModel)
    live = {"weights": model.weights.flat.detach(), **model.optimizer.moments()[0]}
    whole = {group: model.weights.whole(flat) for group, flat in live.items()}
    flats = copied(list(whole.values()) if rank == 0 else [])
    tensors = {group: dict(model.weights.named(flat)) for group, flat in zip(whole, flats, strict=False)}
    return ModelState(model.step, model.settings, tensors)


class PendingSave(NamedTuple):
    """A saved state.

    Args:
        written: Resolves to the size in bytes once the state is in storage.
        step: Optimizer steps that the model had taken.
    """

    written: "Future[int]"
    step: int


class StateStore:
    """Saves and loads models. All methods are collective, and raise FoveaErrors on all ranks."""

    def __init__(self, control: ControlGroup, base_model: str) -> None:
        self._control = control
        self._base_model = base_model

    def save(self, model: TrainedModel, uri: str, thread: SaveThread) -> PendingSave:
        """Replaces the folder at `uri` by the state of the model.

        The state of an adapter is only copied here, and written by a thread of rank 0: start no other save before it is
        written. Full parameters, which share the trainer with no other model, are written here.
        """
        if isinstance(model, FullModel):
            written: Future[int] = Future()
            written.set_result(self.write(state_of(model, self._control.rank), uri))
            return PendingSave(written, model.step)

        def copied(live: Sequence[Tensor]) -> list[Tensor]:
            return self._control.agree(lambda: thread.copies.of(live, model.model_id))

        state = state_of(model, self._control.rank, copied)

        def write() -> int:
            thread.copies.wait()
            return write_folder(uri, self._adapter_files(state))

        return PendingSave(thread.submit(write) if self._control.rank == 0 else Future(), model.step)

    def write(self, state: ModelState, uri: str, last: Describe | None = None) -> int:
        """Replaces the folder at `uri`. Returns its size in bytes.

        Args:
            state: State of a model, which may have been freed since.
            uri: Path or fsspec URL of the folder.
            last: Writes a description of the files, on rank 0.
        """
        if state.lora is None:
            return self._write_full(state, uri, last)
        return self._control.on_rank_0(lambda: write_folder(uri, self._adapter_files(state), last))

    def load(self, model: TrainedModel, uri: str, optimizer: bool) -> int:
        """Loads a folder into a model and drops its gradients. Returns the model's new step count.

        After an error the model is unchanged.

        Raises:
            NotFound: The folder does not exist.
            InvalidInput: The state does not fit the model.
        """
        kind = "adapter" if isinstance(model, AdapterModel) else "full"
        saved_step = self._control.on_rank_0(lambda: _saved_step(Folder.at(uri), kind))
        step = (saved_step or 0) if optimizer else 0
        if isinstance(model, AdapterModel):
            self._load_adapter(model, uri, optimizer, step, is_foreign=saved_step is None)
        else:
            assert isinstance(model, FullModel)
            self._load_full(model, uri, optimizer, step)
        model.resume_at(step)
        return step

    def _adapter_files(self, state: ModelState) -> dict[str, bytes | Chunks]:
        settings, weights = state.lora, state.tensors["weights"]
        assert settings is not None
        moments = [(f"{key}.{name}", part) for key in MOMENTS for name, part in state.tensors[key].items()]
        return {
            **weight_files.peft_files(weights.items(), settings.rank, settings.alpha, self._base_model),
            OPTIMIZER: weight_files.tensor_file(moments),
            STATE: _state_json(state),
        }

    def _load_adapter(self, model: AdapterModel, uri: str, optimizer: bool, step: int, is_foreign: bool) -> None:
        names = [ADAPTER_WEIGHTS, *([OPTIMIZER] if optimizer else [])]
        self._control.on_rank_0(lambda: _check_adapter(model, uri, optimizer, is_foreign))
        files = self._control.on_rank_0(lambda: {name: Folder.at(uri).read(name) for name in names})
        flat, moments = self._control.agree(lambda: _parse_adapter(model, files, uri, is_foreign))
        model.weights.flat.copy_(model.weights.part(flat))
        model.optimizer.load([{key: model.weights.part(moment) for key, moment in moments.items()}], step)

    def _write_full(self, state: ModelState, uri: str, last: Describe | None) -> int:
        target, staging = stage_together(self._control, uri)
        writer = Writer(staging.url(DCP), target.path, is_summed=last is not None)
        try:
            save_checkpoint(dict(state.tensors), storage_writer=writer, process_group=self._control.group)
        except CheckpointException as error:
            self._control.on_rank_0(staging.discard)
            raise _checkpoint_failure(error, uri) from None
        found = self._control.gather(writer.written.checksums)
        sums = {f"{DCP}/{name}": value for each in found for name, value in each.items()}

        def finish(staging: Folder) -> None:
            staging.write(STATE, _state_json(state))
            if last is not None:
                last(staging, {**sums, STATE: zlib.crc32(_state_json(state))})

        return self._control.on_rank_0(lambda: target.replace(staging, finish))

    def _load_full(self, model: FullModel, uri: str, optimizer: bool, step: int) -> None:
        folder = self._control.agree(lambda: Folder.at(uri))
        reader = PlainReader(folder.url(DCP))
        state: dict[str, Any] = _full_tensors(model, lambda live: [torch.empty_like(tensor) for tensor in live])
        if not optimizer:
            state = {"weights": state["weights"]}
        self._control.on_rank_0(lambda: _check_shapes(reader, state, uri))
        try:
            load_checkpoint(state, storage_reader=reader, planner=TensorPlanner(), process_group=self._control.group)
        except CheckpointException as error:
            raise _checkpoint_failure(error, uri) from None
        weights = {name: local_of(state["weights"][name]) for name in model.masters}
        self._control.agree(lambda: _check_sizes(weights, model.optimizer.largest, uri))
        for name, master in model.masters.items():
            master.copy_(weights[name])
        moments: list[dict[str, Tensor]] = [
            {key: local_of(state[key][name]) if optimizer else torch.zeros_like(master) for key in MOMENTS}
            for name, master in model.masters.items()
        ]
        model.optimizer.load(moments, step)


def _check_adapter(model: AdapterModel, uri: str, optimizer: bool, is_foreign: bool) -> None:
    """Checks an adapter's files by their headers, so that only files of the right size are read and sent to all ranks.

    Raises:
        NotFound: A file is missing.
        InvalidInput: The adapter does not fit the model.
    """
    folder, settings = Folder.at(uri), model.settings
    config = _parse_json(folder.read(ADAPTER_CONFIG), f"{uri}/{ADAPTER_CONFIG}")
    if (found := (config.get("r"), config.get("lora_alpha"))) != (settings.rank, settings.alpha):
        raise InvalidInput(
            f"{uri} has (rank, alpha) {found}, but the model has {(settings.rank, settings.alpha)}", field="uri"
        )
    targets = dict(model.weights.named(torch.empty(model.weights.whole_size, device="meta")))
    shapes = weight_files.read_shapes(folder, ADAPTER_WEIGHTS)
    weight_files.check_shapes(shapes, targets, uri, is_foreign)
    if optimizer:
        moments = {f"{key}.{name}": target for key in MOMENTS for name, target in targets.items()}
        weight_files.check_shapes(weight_files.read_shapes(folder, OPTIMIZER), moments, uri, is_foreign=False)


def check_upload(settings: LoraSettings, targets: Sequence[LoraTarget], uri: str) -> None:
    """Compares the header of an uploaded adapter with a model of these settings. Reads no tensor.

    Raises:
        NotFound: The file is missing.
        InvalidInput: Names the first tensor that does not fit, and what the model needs.
    """
    shapes = weight_files.read_shapes(Folder.at(uri), ADAPTER_WEIGHTS)
    needed = settings.shapes(targets).items()
    tensors = {f"{PEFT_PREFIX}{name}.weight": torch.empty(shape, device="meta") for name, shape in needed}
    weight_files.check_shapes(shapes, tensors, ADAPTER_WEIGHTS, is_foreign=True)


def _parse_adapter(
    model: AdapterModel, files: dict[str, bytes], uri: str, is_foreign: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns weights and moments as new unsharded flat buffers. Moments are zero if `files` has no optimizer file.

    Args:
        model: The model.
        files: Content of the files, keyed by file name. Entries are removed once parsed, to free memory.
        uri: The folder, for error messages.
        is_foreign: True if the folder has no `state.json`. Modules that the adapter lacks then start as in a new model.
    """
    settings = model.settings
    flat = model.weights.initial() if is_foreign else model.weights.flat.new_empty(model.weights.whole_size)
    tensors = weight_files.read_tensors(files.pop(ADAPTER_WEIGHTS), uri)
    targets = dict(model.weights.named(flat))
    if is_foreign:
        tensors = weight_files.of_experts(tensors, targets)
        adapted = {name.rpartition(".lora_")[0] for name in tensors}
        targets = {name: part for name, part in targets.items() if name.rpartition(".lora_")[0] in adapted}
    _check_sizes(tensors, settings.largest, uri)
    weight_files.copy_into(targets.items(), tensors, uri)
    moments = {key: torch.zeros_like(flat) for key in MOMENTS}
    if OPTIMIZER in files:
        del tensors
        saved = weight_files.read_tensors(files.pop(OPTIMIZER), uri)
        parts = [
            (f"{key}.{name}", part) for key, buffer in moments.items() for name, part in model.weights.named(buffer)
        ]
        weight_files.copy_into(parts, saved, uri)
    return flat, moments


def _check_sizes(tensors: Mapping[str, Tensor], largest: float, uri: str) -> None:
    """Checks that all values are finite and at most `largest` in magnitude.

    Raises:
        InvalidInput: Names the first tensor with another value.
    """
    for name, tensor in tensors.items():
        found = torch.linalg.vector_norm(tensor, math.inf).item() if tensor.numel() else 0.0
        if not found <= largest:  # written so that NaN fails too
            if not math.isfinite(found):
                raise InvalidInput(f"{uri} has values in {name} that are not finite", field="uri")
            problem = f"{found:.3g} in {name}; the limit is {largest:.6g}, because larger weights overflow in sampling"
            raise InvalidInput(f"{uri} has {problem}", field="uri")


def _full_tensors(model: FullModel, copied: Copying) -> dict[str, dict[str, Tensor]]:
    """Returns weights and moments, sharded like the parameters. Their local parts are the results of `copied`."""
    like = {name: model.shards[name] for name in model.masters}
    moments = model.optimizer.moments()
    locals_ = [*model.masters.values(), *(values[key] for key in MOMENTS for values in moments)]
    parts = iter(copied(locals_))
    return {
        group: {name: _sharded(next(parts), shard) for name, shard in like.items()} for group in ("weights", *MOMENTS)
    }


def _sharded(local: Tensor, like: Tensor) -> Tensor:
    """Wraps a local part as a DTensor. `DTensor.from_local` would move the part to the device of the mesh."""
    if not isinstance(like, DTensor):  # a single rank holds the whole tensor
        return local
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)  # type: ignore[no-untyped-call]


def _check_shapes(reader: PlainReader, state: dict[str, Any], uri: str) -> None:
    found = reader.read_metadata().state_dict_metadata
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            entry = found.get(f"{group}.{name}")
            if not isinstance(entry, TensorStorageMetadata):
                raise InvalidInput(f"{uri} has no {group}.{name}: it was saved from another model", field="uri")
            if tuple(entry.size) != tuple(tensor.shape):
                raise InvalidInput(
                    f"{uri} has {name} with shape {list(entry.size)}, but the model needs {list(tensor.shape)}",
                    field="uri",
                )


def _state_json(state: ModelState) -> bytes:
    return json.dumps({"format": FORMAT, "kind": state.kind, "step": state.step}).encode()


def _saved_step(folder: Folder, kind: str) -> int | None:
    """Returns the step count of a saved state.

    Returns None for an adapter without a `state.json`.
    """
    if kind == "adapter" and not folder.exists(STATE) and folder.exists(ADAPTER_CONFIG):
        return None
    state = _parse_json(folder.read(STATE), f"{folder.path}/{STATE}")
    if state.get("format") != FORMAT:
        raise InvalidInput(
            f"{folder.path} has format {state.get('format')}; this version reads format {FORMAT}", field="uri"
        )
    if (found := state.get("kind")) != kind:
        raise InvalidInput(f"{folder.path} holds {found} parameters, but the model is of kind {kind}", field="uri")
    if not isinstance(step := state.get("step"), int):
        raise InvalidInput(f"{folder.path}/{STATE} is damaged: step is {step!r}", field="uri")
    return step


def _parse_json(content: bytes, path: str) -> dict[str, Any]:
    """Parses a JSON file of a saved model.

    Raises:
        InvalidInput: The file is damaged.
    """
    try:
        found = json.loads(content)
    except ValueError as error:
        raise InvalidInput(f"{path} is damaged: {error}", field="uri") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} is damaged: it is not a JSON object", field="uri")
    return found


def _checkpoint_failure(error: CheckpointException, uri: str) -> FoveaError:
    logger.error("checkpoint at %s failed", uri, exc_info=error)
    for failure, _ in error.failures.values():
        if isinstance(failure, FoveaError):
            return failure
    return Internal(f"the checkpoint at {uri} could not be written or read; see the trainer's log for the reason")
