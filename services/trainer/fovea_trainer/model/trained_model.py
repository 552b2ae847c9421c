"""Trained models: an adapter, or all parameters. Each has gradients, an optimizer and a step count.

Methods are collective where they say so. All ranks have the same state, except for gradients before `reduce_gradients`,
shards of full parameters, and factors of distributed experts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fovea.wire.errors import FailedPrecondition, FoveaError, NotFound
from fovea_trainer.model.lora import LoraInjector, LoraSettings, LoraWeights
from fovea_trainer.model.lora_linear import LoraPair, unembedding_of
from fovea_trainer.model.model_family import LoraTarget
from fovea_trainer.model.optimizer import MOMENTS, Adam, AdamW, clip_factor
from fovea_trainer.model.sharding import ShardedModel, local_of
from fovea_trainer.ranks.control_group import ControlGroup


class TrainedModel(ABC):
    """One model that a client trains."""

    optimizer: AdamW
    trains_vision: bool
    unembedding: LoraPair | Tensor | None
    """Trained tensor of the unembedding, as for `target_logprobs`."""
    trainable_parameter_count: int

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.step = 0
        self.has_gradients = False
        """True if calls since the last step have added to the gradients."""
        self._saved: Tensor | None = None

    @property
    def state_bytes(self) -> int:
        """Size of a saved state: weights and moments in float32."""
        return self.trainable_parameter_count * (1 + len(MOMENTS)) * torch.float32.itemsize

    @abstractmethod
    def activate(self) -> None:
        """Makes the next forward passes use this model's weights."""

    @abstractmethod
    def collect_gradients(self) -> None:
        """Adds the gradients of one backward pass to the accumulated gradients. Call it after each pass."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Returns this rank's accumulated gradients, zeros where there are none."""

    @abstractmethod
    def reduce_gradients(self) -> Tensor:
        """Sums gradients over all ranks. Returns the squared global norm, a float32 scalar. Collective."""

    @abstractmethod
    def save_gradients(self, device_for: Callable[[int], torch.device]) -> None:
        """Copies the gradients so that `restore_gradients` can bring them back.

        Args:
            device_for: Returns the device for a copy of a given size in bytes.
        """

    @abstractmethod
    def restore_gradients(self) -> bool:
        """Drops gradients added since `save_gradients`. Returns True if the earlier gradients are restored."""

    def drop_saved_gradients(self) -> None:
        """Drops the copy that `save_gradients` made."""
        self._saved = None

    def gradients_added(self) -> None:
        """Marks that a call has added to the gradients."""
        self.has_gradients = True

    def resume_at(self, step: int) -> None:
        """Sets the step count after weights and moments were loaded. Drops gradients."""
        self.zero_gradients()
        self.weights_changed()
        self.step = step

    @property
    @abstractmethod
    def pending_bytes(self) -> int:
        """Bytes that a backward pass will allocate for gradients on this rank."""

    def zero_gradients(self) -> None:
        """Drops all gradients accumulated since the last step."""
        self.has_gradients = False
        self._clear_gradients()

    @abstractmethod
    def _clear_gradients(self) -> None: ...

    @abstractmethod
    def weights_changed(self) -> None:
        """Updates tensors that derive from the optimized weights, after these were written."""

    def prepare_step(self, adam: Adam, norm: float) -> None:
        """Clips the gradients, and makes all checks that can fail on this rank alone. Used by `optim_steps`."""
        factor = clip_factor(norm, adam.grad_clip_norm)
        if not math.isfinite(norm):
            raise self._refusal(f"the accumulated gradient has norm {norm}; check the inputs")
        if factor != 1.0:
            torch._foreach_mul_(self.gradients(), factor)
        if not (self.optimizer.is_surely_in_bounds(adam, norm * factor) or self.optimizer.stays_in_bounds(adam)):
            raise self._refusal(
                f"a weight would become larger than {self.optimizer.largest:g} or not finite. The gradient has norm "
                f"{norm:.3g}, and the settings are {adam}; lower the learning rate, or set grad_clip_norm"
            )
        self.optimizer.rehearse()

    def _refusal(self, reason: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"step {self.step + 1} of model {self.model_id!r} failed: {reason}. Its gradients were dropped; "
            f"weights and optimizer are still those of step {self.step}"
        )


def unknown_model(model_id: str) -> NotFound:
    """Returns the error for a model that this trainer does not have."""
    return NotFound(f"model_id {model_id!r} is unknown to this trainer", field="model_id")


def optim_steps(
    steps: Sequence[tuple[TrainedModel, Adam]], control: ControlGroup
) -> list[dict[str, float] | FoveaError]:
    """Takes an optimizer step of each model and clears its gradients. Collective.

    Models wait once for the device and once for other ranks, not each of them. If a step is refused, its model's
    gradients are dropped, and its weights and moments are unchanged.

    Returns:
        For each model the metrics, or the error, equal on all ranks: FailedPrecondition if the gradients are not finite
        or weights would become too large or not finite, ResourceExhausted if memory ran out.
    """
    squares = [model.reduce_gradients() for model, _ in steps]
    norms = [math.sqrt(square) for square in torch.stack(squares).tolist()]
    errors = control.agree_each(
        [partial(model.prepare_step, adam, norm) for (model, adam), norm in zip(steps, norms, strict=True)]
    )
    for (model, adam), error in zip(steps, errors, strict=True):
        if error is None:
            model.optimizer.step(adam)
        model.zero_gradients()
        if error is None:
            model.weights_changed()
            model.step += 1
    return [error or adam.metrics(norm) for (_, adam), norm, error in zip(steps, norms, errors, strict=True)]


class AdapterModel(TrainedModel):
    """A LoRA adapter. Until the step, gradients stay on the rank that computed them.

    Args:
        model_id: Id of the model.
        settings: The adapter's settings.
        targets: All modules that can be adapted.
        injector: Injects the adapter into the base.
        device: Device of this rank.
        dtype: Dtype of the base.
        experts: Mesh over which experts are distributed, as made by `expert_mesh`.
    """

    def __init__(
        self,
        model_id: str,
        settings: LoraSettings,
        targets: Sequence[LoraTarget],
        injector: LoraInjector,
        device: torch.device,
        dtype: torch.dtype,
        experts: DeviceMesh | None,
    ) -> None:
        super().__init__(model_id)
        self.settings = settings
        self.weights = LoraWeights(settings, targets, device, dtype, experts)
        self.optimizer = AdamW([self.weights.flat], settings.largest)
        self.trains_vision = settings.train_vision
        self.unembedding = unembedding_of(self.weights.pairs)
        self.trainable_parameter_count = self.weights.whole_size
        self._injector = injector

    @staticmethod
    def size_bytes(settings: LoraSettings, targets: Sequence[LoraTarget], dtype: torch.dtype, spread: int) -> int:
        """Returns the bytes of an adapter on each rank, with gradients and moments: 18 per parameter in bfloat16.

        Args:
            settings: The adapter's settings.
            targets: All modules that can be adapted.
            dtype: Dtype of the base.
            spread: Number of ranks over which experts are distributed.
        """
        count = sum(math.prod(shape) for shape in settings.shapes(targets, spread).values())
        cast = 0 if dtype == torch.float32 else dtype.itemsize
        return count * ((2 + len(MOMENTS)) * torch.float32.itemsize + cast)

    @property
    def snapshot_bytes(self) -> int:
        """Size of a snapshot: the trained weights in the dtype of the base."""
        return self.weights.whole_size * self.weights.cast_weights.element_size()

    def activate(self) -> None:
        self._injector.activate(self.weights)

    def collect_gradients(self) -> None:
        """Does nothing, because backward passes add to the gradient buffer directly."""

    def gradients(self) -> list[Tensor]:
        return [self.weights.flat_grad]

    def reduce_gradients(self) -> Tensor:
        self.weights.flat.grad = self.weights.flat_grad
        return self.weights.sum_over_ranks(self.weights.flat_grad)

    def save_gradients(self, device_for: Callable[[int], torch.device]) -> None:
        gradients = self.weights.flat_grad
        size_bytes = gradients.numel() * gradients.element_size()
        self._saved = gradients.to(device_for(size_bytes), copy=True) if self.has_gradients else None

    def restore_gradients(self) -> bool:
        if self._saved is None:
            self.zero_gradients()
        else:
            self.weights.flat_grad.copy_(self._saved)
        return True

    @property
    def pending_bytes(self) -> int:
        return 0

    def _clear_gradients(self) -> None:
        self.weights.flat_grad.zero_()

    def weights_changed(self) -> None:
        """Does nothing: the injector updates the copy in the model's dtype before each use."""


class FullModel(TrainedModel):
    """All parameters of the base.

    Each rank optimizes its shards, and ranks of different replicas take equal steps. Each rank keeps a copy of its
    shards of the base, to restore the base later.

    The optimized tensors are `masters`, float32. The shards that compute are updated from them, in the model's dtype. A
    float32 model has one set of tensors for both. Constants have no masters and never change. With one rank per
    replica, linear modules add their gradients directly to those of the masters. All other gradients go through FSDP,
    which copies them three times. In both cases gradients are float32 from the first product on.
    """

    trains_vision = True

    def __init__(self, model_id: str, sharded: ShardedModel, injector: LoraInjector) -> None:
        super().__init__(model_id)
        self._had_gradients = False
        self._sharded = sharded
        self._injector = injector
        self.shards = dict(sharded.named_shards())
        self.locals = {name: local_of(shard) for name, shard in self.shards.items()}
        trained = [name for name, shard in self.shards.items() if isinstance(shard, nn.Parameter)]
        self.masters = {name: self.locals[name].to(torch.float32) for name in trained}
        self._summed: dict[str, Tensor] = {}
        self.unembedding = None
        if sharded.mesh.size() == 1:
            names = sharded.module.file_names
            self._summed = {name: self.masters[names[name]] for name in injector.parameters}
            output = sharded.module.hf.get_output_embeddings().weight
            self.unembedding = next(self.masters[name] for name, shard in self.shards.items() if shard is output)
        self.base = {name: local.to("cpu", copy=True) for name, local in self.locals.items()}
        self.optimizer = AdamW(list(self.masters.values()))
        self.trainable_parameter_count = sum(self.shards[name].numel() for name in trained)

    @staticmethod
    def size_bytes(sharded: ShardedModel) -> int:
        """Returns the bytes on a rank's device beside the base: masters, moments, gradients of masters and shards."""
        locals_ = [local_of(shard) for _, shard in sharded.named_shards()]
        count = sum(local.numel() for local in locals_)
        masters = sum(local.numel() for local in locals_ if local.dtype != torch.float32)
        # Without FSDP, most gradients are added directly to the gradients of the masters.
        passing = count if sharded.mesh.size() > 1 else max(local.numel() for local in locals_)
        return torch.float32.itemsize * (masters + (len(MOMENTS) + 1) * count + passing)

    def make_trainable(self) -> None:
        """Makes all parameters trainable. Collective."""
        self._sharded.set_trainable(True)

    @property
    def pending_bytes(self) -> int:
        summed = {id(master) for master in self._summed.values()}
        passing = [self.locals[name] for name, master in self.masters.items() if id(master) not in summed]
        missing = [master for master in self.masters.values() if master.grad is None]
        return sum(tensor.numel() * torch.float32.itemsize for tensor in (*missing, *passing))

    def save_gradients(self, device_for: Callable[[int], torch.device]) -> None:
        """Copies nothing, because the gradients of a whole model are too large to hold twice."""
        self._had_gradients = self.has_gradients

    def restore_gradients(self) -> bool:
        self.zero_gradients()
        return not self._had_gradients

    def activate(self) -> None:
        self._injector.activate_full(self._summed)

    def collect_gradients(self) -> None:
        for name, shard in self.shards.items():
            if shard.grad is None:
                continue
            found = local_of(shard.grad)
            master = self.masters[name]
            if master.grad is None:
                master.grad = found
            else:
                master.grad += found
            shard.grad = None

    def gradients(self) -> list[Tensor]:
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def reduce_gradients(self) -> Tensor:
        gradients = self.gradients()
        self._sharded.sum_over_replicas(gradients)
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(squares)  # over all ranks, so that the norm has the same bits on all
        return squares / self._sharded.replicas

    def _clear_gradients(self) -> None:
        for name, master in self.masters.items():
            self.shards[name].grad = master.grad = None

    def weights_changed(self) -> None:
        torch._foreach_copy_([self.locals[name] for name in self.masters], list(self.masters.values()))
        self._sharded.release()

    def restore_base(self) -> None:
        """Restores the base's weights and freezes them. Collective."""
        self.zero_gradients()
        for name, local in self.locals.items():
            local.copy_(self.base[name])
        self._sharded.set_trainable(False)
