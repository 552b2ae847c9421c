"""Execution of commands on one rank. All ranks hold the same models and execute the same commands in the same order."""

import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fovea.api.v1 import model_input_pb2, weights_pb2
from fovea.runtime.model_files import context_length, fingerprints
from fovea.wire.errors import AlreadyExists, FailedPrecondition, FoveaError, InvalidInput, NotFound, ResourceExhausted
from fovea_trainer import command_queue
from fovea_trainer.batches.datum_decoding import DatumLimits
from fovea_trainer.batches.micro_batch import BatchLayout
from fovea_trainer.batches.vision_cache import TensorFetcher, VisionOutputCache
from fovea_trainer.forward_backward import LossComputer
from fovea_trainer.losses import Sandbox
from fovea_trainer.model.expert_routing import expert_shape
from fovea_trainer.model.lora import LoraInjector, LoraSettings
from fovea_trainer.model.memory_budget import DeviceMemory, MemoryBudget
from fovea_trainer.model.packed_attention import kernel_of
from fovea_trainer.model.packed_model import build_model
from fovea_trainer.model.sharding import sharded_model
from fovea_trainer.model.trained_model import AdapterModel, FullModel, TrainedModel, optim_steps, unknown_model
from fovea_trainer.model.weight_reading import read_weights
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.recovery.recovery_folder import RecoveryFolder, numerics_of
from fovea_trainer.recovery.recovery_writer import PendingState, RecoveryWriter, RestoredModel
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.shared_calls import SharedCalls
from fovea_trainer.weights.checkpoint_folder import CheckpointRoots
from fovea_trainer.weights.host_memory import ModelResidence, SaveThread
from fovea_trainer.weights.snapshot_store import SnapshotStore
from fovea_trainer.weights.snapshot_taker import SnapshotTaker, adapter_specs
from fovea_trainer.weights.training_state import StateStore
from fovea_trainer.weights.transfer_groups import FullSender, TransferGroups
from fovea_weights.shared_memory import MappedBase

logger = logging.getLogger(__name__)

MIB = 2**20


class TrainingEngine:
    """The base model and all models trained on it, on this rank.

    Args:
        settings: Settings of the trainer.
        model_dir: Folder of the checkpoint.
        control: The ranks' control group.
        device: Device of this rank.
        groups: Transfer groups, on ranks that send weights.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        model_dir: Path,
        control: ControlGroup,
        device: torch.device,
        groups: TransferGroups | None,
    ) -> None:
        self._settings = settings
        self._control = control
        self._device = device
        self.world_size = control.world_size
        self.models: dict[str, TrainedModel] = {}
        self.adapters, self.full = (SnapshotStore(settings.snapshot_memory_mib * MIB) for _ in range(2))
        self._load(model_dir)
        self.model_files = fingerprints(model_dir)
        self.numerics = numerics_of(settings, self.dtype, device, self.world_size)
        """Facts that affect the rounding of results, keyed by setting."""
        self.roots = CheckpointRoots(settings.checkpoints)
        self._states = StateStore(control, settings.model)
        self._saves = SaveThread(device)
        self.recovery: RecoveryWriter | None = None
        """Writes and finds durable points; None if recovery is disabled."""
        if place := control.broadcast(settings.recovery):  # rank 0 decides, because recovery involves all ranks
            folder = control.agree(lambda: RecoveryFolder(place))
            self.recovery = RecoveryWriter(
                folder, control, device, settings.model, self.model_files, self.numerics, self.adapters
            )
        self._snapshots = SnapshotTaker(
            control, self._sharded, self.adapters, self.full, self._memory_budget, model_dir, settings.model,
            self._saves,
        )  # fmt: skip
        self._full_sender = FullSender(settings, control, self._sharded, self._snapshots, groups)

    def _load(self, model_dir: Path) -> None:
        settings = self._settings
        self.family, self.dtype, module = build_model(settings, model_dir, self._device)
        config = module.hf.config
        self.targets = list(self.family.lora_targets(module.hf))
        self._injector = LoraInjector(self.targets)
        self.base = MappedBase(settings.shared_base, self._device) if settings.shared_base else None
        shared_bytes = self.base.resident_bytes if self.base and settings.memory_limit_mib else 0
        memory = DeviceMemory(self._device, settings.memory_limit_mib * MIB + shared_bytes)
        self._sharded = sharded_model(module, settings, self._device.type, self.world_size, memory.total_bytes)
        read_weights(module.hf, model_dir, self._device, self.base)
        module.requires_grad_(False)  # again, because transformers has replaced a single rank's parameters
        text = config.get_text_config()
        context = context_length(config.to_dict()) or text.max_position_embeddings
        self.limits = DatumLimits(
            text.vocab_size,
            min(settings.max_context_length or context, context),
            module.vision,
            expert_shape(module.hf),
        )
        layout = BatchLayout(module.vision, self._device)
        features = TensorFetcher(
            settings.feature_cache_mib * MIB, module.vision, settings.fetch_timeout_s, settings.renderer
        )
        self._residence = ModelResidence(self._device, settings.model_memory_mib * MIB, memory.free_bytes)
        self._memory_budget = MemoryBudget(settings, config, self.dtype, memory, self._control, self._spill)
        vision = VisionOutputCache(settings.vision_memory_mib * MIB)
        self._losses = LossComputer(
            self._sharded, self._control, features, layout, vision, self.limits, self._memory_budget,
            Sandbox(settings.custom_loss_timeout_s, settings.custom_loss_memory_mib), self._injector, settings,
        )  # fmt: skip
        self.shared = SharedCalls(self._losses, self._sharded, self._control, layout, vision, self._memory_budget)
        logger.info(
            "%s with %.1f M parameters in %s on %s, %s between micro-batches; %s, because %s",
            self.family.model_type,
            sum(p.numel() for p in module.parameters()) / 1e6,
            self.dtype,
            self._device,
            "whole" if self._sharded.mesh.size() == 1 else "gathered" if self._sharded.keeps_gathered else "sharded",
            *kernel_of(self._device, self.dtype),
        )

    def _spill(self, missing_bytes: int) -> bool:
        """Moves snapshots and idle models from a GPU to the host; on a CPU drops older snapshots. True if it did."""
        is_cpu, kinds = self._device.type == "cpu", (self.adapters, self.full)
        moved_bytes = [held.drop_older() if is_cpu else held.spill() for held in kinds]
        moved = not is_cpu and self._residence.leave(missing_bytes - sum(moved_bytes))
        return moved or any(moved_bytes)

    def warm_up(self) -> None:
        """Runs passes of a temporary adapter, vision included. Collective."""
        settings = LoraSettings(1, 1.0, 0, True, True, True, self.limits.vision is not None)
        scratch = self._adapter("", settings)
        self._losses.warm_up(scratch)
        scratch.reduce_gradients()
        self._injector.activate(None)
        self._control.barrier()

    def execute(self, command: command_queue.Command) -> Any:
        """Executes a command. A FoveaError is raised on all ranks; any other exception ends the trainer."""
        if uri := getattr(command, "uri", ""):
            self._control.agree(lambda: self.roots.check(uri))
        models = self._models_of(command)
        try:
            self._control.agree(lambda: self._residence.use(models))
        except ResourceExhausted:
            if not isinstance(command, command_queue.SharedPass | command_queue.SharedSteps):
                raise
            return [self._alone(call) for call in command.calls]
        match command:
            case command_queue.CreateModel():
                return self._create(command)
            case command_queue.RestoreModel():
                return self._restore(command)
            case command_queue.KeepState():
                return self._keep_state(command)
            case command_queue.DeleteModel():
                return self._delete(command)
            case command_queue.PrepareLosses():
                return self._losses.prepare()
            case command_queue.ForwardBackward(place=None):
                return self._losses.run(command, self.model(command.model_id))
            case command_queue.ForwardBackward():
                return self.shared.run([command], self.models)[0]
            case command_queue.SharedPass():
                return self.shared.run(command.calls, self.models)
            case command_queue.ClearGradients():
                return self.model(command.model_id).zero_gradients()
            case command_queue.OptimStep():
                return self._optim_steps([command])[0]
            case command_queue.SharedSteps():
                return self._optim_steps(command.calls)
            case command_queue.SaveState():
                return self._states.save(self.model(command.model_id), command.uri, self._saves)
            case command_queue.LoadState():
                return self._load_state(command)
            case command_queue.TakeSnapshot():
                return self._snapshots.take(command, self.model(command.model_id))
            case command_queue.RestoreSnapshot():
                return self._restore_snapshot(command)
            case command_queue.ForgetSnapshot():
                self.adapters.drop(command.snapshot_id)
                return self.full.drop(command.snapshot_id)
            case command_queue.DescribeFull():
                found = self._snapshots.describe_full(command.snapshot_id, self._live_full())
                self.full.pin(command.snapshot_id)
                return found
            case command_queue.UnpinFull():
                return self.full.unpin(command.snapshot_id)
            case command_queue.OpenGroup():
                return self._full_sender.open_group(command)
            case command_queue.BroadcastFull():
                return self._full_sender.broadcast(command, self._live_full())
            case command_queue.Heartbeat():
                return self._control.barrier()
        raise TypeError(f"unknown command: {command!r}")

    def fetch_ahead(self, model_id: str, features: Iterable[model_input_pb2.VisionFeature]) -> None:
        """Starts fetching image tensors for a later call of a model. Callable from any thread.

        With several ranks this does nothing: the plan of that call, which assigns each image to a rank, does not exist
        yet.
        """
        model = self.models.get(model_id)
        if model is not None and self.world_size == 1:
            self._losses.fetch_ahead(features, model.trains_vision)

    def expect(self, commands: Iterable[command_queue.Command]) -> None:
        """Starts to bring the models of waiting commands back to the device."""
        self._residence.expect(model for command in commands for model in self._models_of(command))

    def fit_together(self, model_ids: Iterable[str]) -> bool:
        """Returns True if models fit on the device at the same time."""
        return self._residence.fit(self.models[model_id] for model_id in model_ids if model_id in self.models)

    def _alone(self, call: command_queue.Command) -> Any:
        try:
            return self.execute(call)
        except FoveaError as error:
            return error

    def _models_of(self, command: command_queue.Command) -> list[TrainedModel]:
        """Returns the models that must be on the device for a command, which deleting one does not need."""
        calls = [] if isinstance(command, command_queue.DeleteModel) else getattr(command, "calls", [command])
        ids = [getattr(call, "model_id", "") for call in calls]
        return [self.models[model_id] for model_id in ids if model_id in self.models]

    def model(self, model_id: str) -> TrainedModel:
        """Returns a model. Raises NotFound if the id is unknown."""
        if model_id not in self.models:
            raise unknown_model(model_id)
        return self.models[model_id]

    def _create(self, command: command_queue.CreateModel) -> tuple[int, list[weights_pb2.TensorSpec]]:
        """Creates a model unless it exists. Returns its number of trained parameters, and the specs of an adapter."""
        self._settings.check_kind(is_full=command.lora is None)
        existing = self.models.get(command.model_id)
        if existing is not None:
            if getattr(existing, "settings", None) != command.lora:
                raise AlreadyExists(f"model_id {command.model_id!r} exists with other settings", field="model_id")
            return existing.trainable_parameter_count, self._specs_of(existing)
        if self._live_full() is not None:
            raise FailedPrecondition(
                f"a full-parameter model occupies this trainer: {', '.join(self.models)}. Delete it first.",
                field="model_id",
            )
        if command.lora is None and self.models:
            raise FailedPrecondition(
                f"full-parameter training needs a trainer without other models, but {len(self.models)} exist: "
                f"{', '.join(sorted(self.models)[:5])}. Delete them first.",
                field="full",
            )
        if len(self.models) >= self._settings.max_models:
            raise ResourceExhausted(
                f"{len(self.models)} models exist, which is the limit: delete one", field="model_id"
            )
        model_id, lora = command.model_id, command.lora
        model = self._new_full(model_id) if lora is None else self._new_adapter(model_id, lora)
        self.models[model_id] = model
        self._residence.use([model])
        return model.trainable_parameter_count, self._specs_of(model)

    def _new_adapter(self, model_id: str, settings: LoraSettings) -> AdapterModel:
        size_bytes = AdapterModel.size_bytes(settings, self.targets, self.dtype, self._settings.expert_parallel)
        self._memory_budget.admit(size_bytes, settings.train_vision, f"an adapter of rank {settings.rank}")
        return self._control.agree(lambda: self._adapter(model_id, settings))

    def _adapter(self, model_id: str, settings: LoraSettings) -> AdapterModel:
        device, experts = self._device, self._sharded.experts
        return AdapterModel(model_id, settings, self.targets, self._injector, device, self.dtype, experts)

    def _new_full(self, model_id: str) -> FullModel:
        self._memory_budget.admit(FullModel.size_bytes(self._sharded), True, "training all parameters")
        model = self._control.agree(lambda: FullModel(model_id, self._sharded, self._injector))
        model.make_trainable()
        if not self._sharded.computes_alone(True):
            self._losses.warm_up(model)
            return model
        try:
            self._control.agree(lambda: self._losses.warm_up(model))
        except ResourceExhausted:
            self._sharded.abandon_pass()
            model.restore_base()
            raise
        return model

    def _restore(self, command: command_queue.RestoreModel) -> RestoredModel | None:
        """Restores a model from its newest durable point. Returns None if the model exists.

        Raises NotFound without a readable point or recovery, InvalidInput if the model was created with other settings,
        and ResourceExhausted if there is no room for it now.
        """
        model_id = command.model_id
        if model_id in self.models:
            return None
        if self.recovery is None:
            raise NotFound(
                f"model {model_id!r} is not loaded, and recovery is disabled on this trainer: set --recovery",
                field="model_id",
            )
        url, point = self.recovery.find(model_id)
        if point.lora != (asdict(command.lora) if command.lora else None):
            raise InvalidInput(f"model {model_id!r} was created with {point.lora}", field="kind")
        try:
            self._create(command_queue.CreateModel(model_id, command.lora))
        except FailedPrecondition as error:  # other models block it; a restored model can wait for them
            raise ResourceExhausted(error.message, field=error.field) from None
        try:
            self._states.load(self.models[model_id], url, optimizer=True)
        except FoveaError as error:
            self._free(model_id)
            if isinstance(error, ResourceExhausted):
                raise
            raise NotFound(f"the durable point {url} cannot be read: {error.message}", field="model_id") from None
        self.recovery.restored(model_id, point)
        return RestoredModel(point.seq_id, point.step, point.answer)

    def _keep_state(self, command: command_queue.KeepState) -> PendingState | None:
        assert self.recovery is not None
        return self.recovery.write_state(self.model(command.model_id), command.change_count)

    def _before_change(self, model_id: str) -> None:
        """Waits until copies of a model are made, before its weights or moments are written to or freed."""
        self._saves.copies.before_writing(model_id)
        if self.recovery is not None:
            self.recovery.before_change(model_id)

    def _delete(self, command: command_queue.DeleteModel) -> None:
        self._before_change(command.model_id)
        if self.recovery is not None:
            self.recovery.forget(command.model_id)
        self._free(command.model_id)

    def _free(self, model_id: str) -> None:
        self._residence.forget(model_id)
        model = self.models.pop(model_id, None)
        if isinstance(model, FullModel):
            model.restore_base()
        self._injector.activate(None)
        self._losses.forget(model_id)
        self.adapters.release_model(model_id)
        self.full.release_model(model_id)

    def _optim_steps(self, commands: list[command_queue.OptimStep]) -> list[tuple[dict[str, float], int] | FoveaError]:
        """Takes steps of different models. Returns for each its metrics and step count, or its error."""
        for command in commands:
            self._before_change(command.model_id)
        steps = [(self.models[one.model_id], one.adam) for one in commands if one.model_id in self.models]
        found = iter(optim_steps(steps, self._control) if steps else [])
        return [self._answer(one, next(found)) if one.model_id in self.models else unknown_model(one.model_id)
                for one in commands]  # fmt: skip

    def _answer(
        self, command: command_queue.OptimStep, outcome: dict[str, float] | FoveaError
    ) -> tuple[dict[str, float], int] | FoveaError:
        if isinstance(outcome, FoveaError):
            return outcome
        answer = outcome, self.models[command.model_id].step
        if self.recovery is not None:
            self.recovery.changed(command.model_id, command.seq_id, answer)
        return answer

    def _load_state(self, command: command_queue.LoadState) -> int:
        self._before_change(command.model_id)
        step = self._states.load(self.model(command.model_id), command.uri, command.optimizer)
        if self.recovery is not None:
            self.recovery.changed(command.model_id, command.seq_id, step)
        return step

    def _restore_snapshot(self, command: command_queue.RestoreSnapshot) -> weights_pb2.Snapshot:
        kept = self.recovery is not None and not command.uri and self.recovery.find_snapshot(command.snapshot_id)
        if not (uri := command.uri or kept):
            raise NotFound(
                f"snapshot {command.snapshot_id!r} is neither in memory nor in the recovery store, and no uri was "
                "given to read it from",
                field="snapshot_id",
            )
        return self._snapshots.restore(command.snapshot_id, uri).identity

    def close(self) -> None:
        """Finishes background work."""
        self._saves.close()
        if self.recovery is not None:
            self.recovery.close()

    def _specs_of(self, model: TrainedModel) -> list[weights_pb2.TensorSpec]:
        return adapter_specs(model.weights, self.dtype) if isinstance(model, AdapterModel) else []

    def _live_full(self) -> FullModel | None:
        return next((model for model in self.models.values() if isinstance(model, FullModel)), None)
