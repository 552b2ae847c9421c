"""FSDP2 around the model: the modules that are gathered together, and access to whole parameters.

A rank that has a copy of the base by itself does not use FSDP, which would copy each parameter for computing. These
copies would need the memory of a second model. To copy again for each micro-batch would take a tenth of the time of a
mixture of experts.

With several replicas each shards a copy of the base. FSDP knows only the ranks of one replica, so weights, and the
gradients of a micro-batch, stay within it. Gradients are summed over the replicas once, before the optimizer step.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from fovea_trainer.model.expert_routing import (
    DATA,
    EXPERTS,
    REPLICAS,
    expert_mesh,
    expert_shape,
    is_experts,
    spread_parameters,
)
from fovea_trainer.model.packed_model import HF_PREFIX, PackedModel, constants
from fovea_trainer.settings import TrainerSettings

SHARDS = "shards"


def rank_mesh(device_type: str, world_size: int, replicas: int) -> DeviceMesh:
    """Returns the mesh [REPLICAS, SHARDS] of all ranks; with one replica it has one dimension. Collective.

    Consecutive ranks shard one copy of the base. Ranks along REPLICAS have equal shards.
    """
    if replicas == 1:  # the group of all ranks, so no further communicator takes memory
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(device_type, (replicas, world_size // replicas), mesh_dim_names=(REPLICAS, SHARDS))


class ShardedModel:
    """A PackedModel with parameters sharded over the ranks of each replica. With one rank it stays as it is.

    Methods that gather are collective: all ranks must call them in the same order.

    Args:
        module: The model on the meta device. Each rank then reads its shards with `read_weights`.
        mesh: Mesh of all ranks, as made by `rank_mesh`.
        keep_gathered: True to leave parameters gathered between micro-batches and calls. Frozen parameters then need no
            communication. The whole model must fit into each rank's memory.
        experts: Mesh over which experts are distributed, as made by `expert_mesh`; None if every rank computes all
            experts.

    Attributes:
        mesh: The ranks that shard this rank's copy of the base, one dimension.
        replicas: Number of copies.
        keeps_gathered: The argument `keep_gathered`.
    """

    def __init__(
        self, module: PackedModel, mesh: DeviceMesh, keep_gathered: bool, experts: DeviceMesh | None = None
    ) -> None:
        module.requires_grad_(False)
        self.module = module
        self._copies = mesh[REPLICAS] if mesh.ndim > 1 else None
        self.mesh = mesh[SHARDS] if mesh.ndim > 1 else mesh
        self.replicas = mesh.size() // self.mesh.size()
        self.experts = experts
        self.keeps_gathered = keep_gathered
        self._fsdp_modules: list[FSDPModule] = []
        if self.mesh.size() > 1:
            self._shard()

    def _shard(self) -> None:
        module, mesh, experts, keep_gathered = self.module, self.mesh, self.experts, self.keeps_gathered
        if experts is not None:
            for layer in filter(is_experts, module.modules()):
                spread_parameters(layer, experts[EXPERTS])
                fully_shard(layer, mesh=experts[DATA], reshard_after_forward=not keep_gathered)
        for block in module.family.blocks(module.hf):
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep_gathered)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        self._fsdp_modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for part in self._fsdp_modules:
            # Losses are sums over all datums of all ranks, so gradients are summed, not averaged.
            part.set_gradient_divide_factor(1.0)
            # With a divide factor, FSDP would otherwise reduce by PREMUL_SUM, which gloo does not support.
            part.set_force_sum_reduction_for_comms(True)
        self._root.set_reshard_after_backward(not keep_gathered)

    @property
    def _root(self) -> FSDPModule:
        return cast(FSDPModule, self.module)

    def computes_alone(self, trains_base: bool) -> bool:
        """Returns True if a rank's passes need no other rank after a call of `gather`."""
        return self.mesh.size() == 1 or (self.keeps_gathered and not trains_base and self.experts is None)

    def gather(self) -> None:
        """Gathers all parameters if this model keeps parameters gathered. Collective.

        Parameters must be frozen: `unshard` would forget that the gradients of trained ones are float32.
        """
        if self.keeps_gathered:
            for part in self._fsdp_modules:
                part.unshard()

    def abandon_pass(self) -> None:
        """Prepares for the next pass after an error aborted one. Drops gathered copies."""
        if not self._fsdp_modules:
            return
        reset = getattr(self._root, "reset_iter_state", self._reset_iteration)  # torch 2.11 has no such method
        reset()
        self.release()

    def _reset_iteration(self) -> None:
        state: Any = self._root._get_fsdp_state()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.all_gather_state = None
        state._comm_ctx.post_forward_order.clear()
        for part in state._state_ctx.all_states:
            part._training_state = TrainingState.IDLE
            if group := part._fsdp_param_group:
                group._training_state = TrainingState.IDLE
                group._all_gather_result = None
                group._post_forward_indices.clear()

    def sum_over_replicas(self, gradients: Iterable[Tensor]) -> None:
        """Sums each tensor over the ranks with equal shards, in place. Collective."""
        if self._copies is not None:
            for gradient in gradients:
                if gradient.numel():
                    dist.all_reduce(gradient, group=self._copies.get_group())

    def release(self) -> None:
        """Drops gathered copies, so that the next forward pass uses the current shards."""
        for part in self._fsdp_modules:
            part.reshard()

    def set_trainable(self, trainable: bool) -> None:
        """Enables or disables gradients of all parameters. Gradients are float32 in any model dtype. Collective.

        FSDP's own `reduce_dtype` is not sufficient, because FSDP would still round each rank's gradient before the sum,
        and the sum afterwards.
        """
        # FSDP copies these attributes to the gathered parameter only once, so set them on both forms. `unshard` keeps
        # the gradient dtype only of parameters that are frozen at that time, so the root comes last.
        self.release()
        for part in reversed(self._fsdp_modules):
            part.unshard()
            _train(part, trainable)
            part.reshard()
        _train(self.module, trainable)

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters, then constants, with their names in the checkpoint's files.

        Parameters come in the model's order and are DTensors if they are sharded. Every rank has whole constants.
        """
        self.release()
        for name, tensor in (*self.module.named_parameters(), *constants(self.module)):
            yield self.module.file_names[name.removeprefix(HF_PREFIX)], tensor


def _train(module: Any, trainable: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(trainable)
        parameter.grad_dtype = torch.float32 if trainable else parameter.dtype


def local_of(shard: Tensor) -> Tensor:
    """Returns this rank's part, which shares memory with the parameter; for a constant, all of it."""
    return shard.to_local().detach() if isinstance(shard, DTensor) else shard.detach()


def full_of(local: Tensor, like: Tensor) -> Tensor:
    """Returns the whole tensor, given each rank's part laid out as `like`. Collective."""
    if not isinstance(like, DTensor) or like.device_mesh.size() == 1:
        return local.to(like.device)
    shard = DTensor.from_local(
        local.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return shard.full_tensor()


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype name as in `TensorSpec.dtype`, for example `float32`."""
    return str(dtype).removeprefix("torch.")


def sharded_model(
    module: PackedModel, settings: TrainerSettings, device_type: str, world_size: int, gpu_bytes: int
) -> ShardedModel:
    """Shards a model on the meta device as the settings say. Collective.

    Args:
        module: The model.
        settings: Settings of the trainer.
        device_type: `cuda` or `cpu`.
        world_size: Number of ranks.
        gpu_bytes: Memory of a rank's GPU; 0 on a CPU.

    Raises:
        ValueError: The experts cannot be distributed this way.
    """
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    kept_bytes = gpu_bytes // 6 if gpu_bytes else 2**30
    keep = {"always": True, "never": False, "auto": size_bytes <= kept_bytes}[settings.keep_gathered]
    shape = expert_shape(module.hf)
    experts = expert_mesh(
        device_type, world_size, settings.expert_parallel, shape.count if shape else 0, settings.replicas
    )
    return ShardedModel(module, rank_mesh(device_type, world_size, settings.replicas), keep, experts)
