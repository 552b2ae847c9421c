"""Routing of tokens to experts, on one rank and between ranks.

Within a rank, copies of tokens are sorted by expert. Router replay makes the layers use the experts that a sampler
chose.

Between ranks, each copy is sent to the rank that holds its expert, and the result is sent back. The ranks form a
two-dimensional mesh. Along EXPERTS each rank holds different experts. Along DATA the ranks hold the same experts,
sharded by FSDP. All other parameters are sharded over all ranks. If experts are distributed, a parameter of experts is
still a DTensor, over EXPERTS, after FSDP has gathered it.

Shapes: T packed tokens, K experts per token, S = T K copies of tokens sorted by expert, C copies that this rank
receives, W ranks over which experts are distributed, E experts in total, F = E / W of them on this rank, L layers with
experts, D hidden size, N columns of a row.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from fovea.runtime.model_files import MixtureSizes, mixture_sizes
from fovea_trainer.batches.datum_decoding import ExpertShape

REPLICAS = "replicas"
DATA = "data"
EXPERTS = "experts"
_ROUTING_SIZE = 32
"""The routing indices of a token, expressed as a number of 16-bit values."""


def expert_mesh(
    device_type: str, world_size: int, spread: int, expert_count: int, replicas: int = 1
) -> DeviceMesh | None:
    """Returns the mesh [REPLICAS, DATA, EXPERTS] of all ranks, or None if experts are not distributed. Collective.

    Neighbouring ranks hold different experts. With one replica the mesh is [DATA, EXPERTS].

    Args:
        device_type: `cuda` or `cpu`.
        world_size: Number of ranks.
        spread: Number of ranks over which experts are distributed.
        expert_count: Experts per layer; 0 for a model without experts.
        replicas: Number of copies of the base; divides the ranks.

    Raises:
        ValueError: The experts cannot be distributed this way.
    """
    if spread == 1:
        return None
    if not expert_count:
        raise ValueError(f"--expert-parallel is {spread}, but the model has no experts; set it to 1")
    if expert_count % spread:
        raise ValueError(f"--expert-parallel is {spread}, which does not divide the model's {expert_count} experts")
    shards = world_size // replicas
    if shards % spread:
        raise ValueError(
            f"--expert-parallel is {spread}, which does not divide the {shards} ranks of each of --replicas {replicas}"
        )
    if expert_count % shards:
        raise ValueError(
            f"--expert-parallel is {spread}: {expert_count // spread} experts of each rank cannot be sharded evenly "
            f"over the {shards // spread} ranks that hold them; use a number of ranks that divides {expert_count}"
        )
    sizes, names = (shards // spread, spread), (DATA, EXPERTS)
    if replicas > 1:
        return init_device_mesh(device_type, (replicas, *sizes), mesh_dim_names=(REPLICAS, *names))
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def spread_parameters(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces each parameter by one that holds only this rank's experts.

    Args:
        experts: Module on the meta device.
        mesh: One dimension, EXPERTS.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        count, *rest = parameter.shape
        local = torch.empty(count // mesh.size(), *rest, dtype=parameter.dtype, device="meta")
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(whole, parameter.requires_grad))


def local_experts(parameter: Tensor) -> Tensor:
    """Returns this rank's experts of a gathered parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def laid_out_as(parameter: Tensor, own: Tensor) -> Tensor:
    """Wraps a gradient of `local_experts` in the layout of the parameter."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False)


@dataclass(frozen=True)
class Exchange:
    """The numbers of token copies that this rank sends to each rank and receives from it.

    Args:
        mesh: One dimension, EXPERTS.
        sent: Number of copies that this rank sends to each rank.
        received: Number of copies that this rank receives from each rank.
        index_C1: int64, the local expert of each received copy.
    """

    mesh: DeviceMesh
    sent: list[int]
    received: list[int]
    index_C1: Tensor

    @classmethod
    def of(cls, ends_E: Tensor, mesh: DeviceMesh) -> Self:
        """Exchanges the counts of copies, which must be sorted by expert. Waits for the device. Collective.

        Args:
            ends_E: int32, end of each expert's copies.
            mesh: One dimension, EXPERTS.
        """
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).long()
        counts_WF = _to_all(counts_E, None, None, mesh).view(mesh.size(), -1)
        # all_to_all needs the sizes as Python numbers. One transfer to the host brings both lists.
        sent, received = torch.stack([counts_E.view(mesh.size(), -1).sum(1), counts_WF.sum(1)]).tolist()
        own_F = torch.arange(counts_WF.shape[1], device=ends_E.device)
        index_C = own_F.repeat(mesh.size()).repeat_interleave(counts_WF.flatten(), output_size=sum(received))
        return cls(mesh, sent, received, index_C.unsqueeze(1))

    def send(self, rows_SD: Tensor) -> Tensor:
        """Sends rows to the ranks of their experts; returns the received rows [C, D].

        Collective, also in the backward pass.
        """
        return _to_all(rows_SD, self.received, self.sent, self.mesh)

    def send_back(self, rows_CD: Tensor) -> Tensor:
        """Sends processed rows back; returns [S, D]. The inverse of `send`. Collective, also in the backward pass."""
        return _to_all(rows_CD, self.sent, self.received, self.mesh)


def _to_all(rows: Tensor, received: list[int] | None, sent: list[int] | None, mesh: DeviceMesh) -> Tensor:
    found = collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, mesh)
    waited: Tensor = collectives.wait_tensor(found)  # type: ignore[no-untyped-call]
    return waited


def gather_from_experts(own: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Returns the tensors of the ranks that hold different experts, in rank order. Collective."""
    found = [torch.empty_like(own) for _ in range(mesh[EXPERTS].size())]
    dist.all_gather(found, own, group=mesh.get_group(EXPERTS))
    return found


ROUTED_EXPERTS = "routed_experts"
"""Keyword argument of a decoder, which it passes on to its layers: int16 [T, L, K], -1 where the model's own router
decides.
"""


_KERNEL_TYPES = (torch.bfloat16, torch.float32)
_forced: list[bool] = []
"""Overrides by `computed_with_kernels`; the last entry applies."""


def kernels_compute(rows: Tensor) -> bool:
    """Returns True if `expert_kernels.py` computes the steps between matrix products, False if torch's operators do.

    The kernels are used on a GPU, where they are faster (`tools/benchmarks/experts.py`).
    """
    if _forced:
        return _forced[-1]
    return rows.is_cuda and rows.dtype in _KERNEL_TYPES and _triton_is_here()


@contextmanager
def computed_with_kernels(wanted: bool) -> Iterator[None]:
    """Forces the kernels on or off for all threads within a block, to measure or compare them."""
    _forced.append(wanted)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None


def kernels() -> ModuleType:
    from fovea_trainer.model import expert_kernels  # imported late, because it imports Triton

    return expert_kernels


@dataclass(frozen=True)
class Routing:
    """Positions of token copies after sorting by expert.

    Args:
        token_S: int64, the token of each copy.
        expert_S: int64, the expert of each copy, ascending.
        order_S: int64, the position of each copy in the flattened [T, K].
        slot_S: int64, the inverse: the slot of each entry of [T, K] among the copies.
        ends_E: int32, the end of each expert's copies.
        top_k: K.
    """

    token_S: Tensor
    expert_S: Tensor
    order_S: Tensor
    slot_S: Tensor
    ends_E: Tensor
    top_k: int

    @classmethod
    def of(cls, index_TK: Tensor, expert_count: int) -> Self:
        """Sorts the copies for the chosen experts, int64 [T, K]."""
        top_k = index_TK.shape[-1]
        sorted_S, order_S = torch.sort(index_TK.flatten(), stable=True)
        slots_S = torch.arange(len(order_S), device=order_S.device)
        experts_E = torch.arange(expert_count, device=order_S.device)
        ends_E = torch.searchsorted(sorted_S, experts_E, right=True, out_int32=True)
        slot_S = torch.empty_like(order_S).scatter_(0, order_S, slots_S)
        return cls(order_S // top_k, sorted_S, order_S, slot_S, ends_E, top_k)

    def copies(self, rows_TN: Tensor) -> Tensor:
        """Returns the row of each copy's token, [S, N]."""
        apply: Any = _Copies.apply
        found: Tensor = apply(rows_TN, self)
        return found

    def sums(self, rows_SN: Tensor) -> Tensor:
        """Returns the sum of the copies of each token, [T, N]. Uses no atomic additions, so it is reproducible."""
        apply: Any = _Sums.apply
        found: Tensor = apply(rows_SN, self)
        return found


def is_experts(module: nn.Module) -> bool:
    """Returns True if a module is a layer's experts in transformers' common form."""
    return hasattr(module, "_is_expert_parallel")


class ExpertLoads:
    """Number of tokens per expert in the latest forward pass.

    Attributes:
        layers: Numbers of the layers with experts.
    """

    def __init__(self, decoder: Any) -> None:
        self.layers: list[int] = []
        self._counts: dict[int, Tensor] = {}
        for number, layer in enumerate(decoder.layers):
            for module in filter(is_experts, layer.modules()):
                self.layers.append(number)
                module.register_forward_pre_hook(partial(self._note, number))

    def counts(self) -> Tensor | None:
        """Returns int64 [layers, E] on the device, without waiting for it; None for a model without experts."""
        return torch.stack([self._counts[number] for number in self.layers]) if self.layers else None

    def _note(self, number: int, experts: Any, given: tuple[Tensor, ...]) -> None:
        index_S = given[1].flatten()
        # bincount would make the host wait for the device.
        counts_E = torch.zeros(experts.num_experts, dtype=torch.int64, device=index_S.device)
        self._counts[number] = counts_E.scatter_add_(0, index_S, torch.ones_like(index_S))


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TN: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        if kernels_compute(rows_TN):
            found: Tensor = kernels().copies(rows_TN, routing.slot_S)
            return found
        return rows_TN.index_select(0, routing.token_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.routing.sums(grads[0]), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SN: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        if kernels_compute(rows_SN):
            found: Tensor = kernels().sums(rows_SN, routing.slot_S, routing.top_k)
            return found
        return rows_SN.index_select(0, routing.slot_S).view(-1, routing.top_k, rows_SN.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.routing.copies(grads[0]), None


def expert_shape(model: Any) -> ExpertShape | None:
    """Returns the shape of a model's experts, or None for a model without experts."""
    layers = sum(1 for _ in _routed_layers(model.get_decoder()))
    sizes = mixture_sizes(model.config.get_text_config().to_dict())
    return ExpertShape(layers, sizes.per_token, sizes.number) if layers and sizes else None


def has_experts(text: PretrainedConfig, index: int) -> bool:
    """Returns True if a layer of a language model with experts has them in place of a dense MLP."""
    if (routed := getattr(text, "moe_layers", None)) is not None:
        return index in routed
    is_dense = index in (getattr(text, "mlp_only_layers", None) or ())
    every = getattr(text, "decoder_sparse_step", None) or 1
    first = getattr(text, "first_k_dense_replace", None) or 0
    return not is_dense and index >= first and (index + 1) % every == 0


def routed_size(experts: MixtureSizes) -> int:
    """Returns the width of a dense MLP that would retain as much as routed experts, shared expert and router."""
    # A dense MLP retains 3 values per unit. Experts retain 4, because they have the weighted product too. The router's
    # probabilities are float32, which is 2 16-bit values.
    routed = 4 * experts.per_token * experts.inner
    return (routed + 3 * experts.shared + 2 * experts.number) // 3 + _ROUTING_SIZE


def copies_bytes(text: PretrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's copies for the experts: inputs, outputs and the gradients of both."""
    experts = mixture_sizes(text.to_dict())
    return int(4 * (experts.per_token if experts else 0) * text.hidden_size * dtype.itemsize)


def replay_routing(decoder: Any) -> None:
    """Makes a decoder's layers with experts follow `ROUTED_EXPERTS`. Call it once, after all other changes to layers.

    The experts are an argument of each layer. A layer that recomputes its activations in the backward pass therefore
    uses the same experts again. Dense layers among them drop the argument.
    """
    routed = list(_routed_layers(decoder))
    for layer in set(decoder.layers) - {layer for layer, _ in routed} if routed else ():
        layer.forward = partial(_unrouted, layer.forward)
    for index, (layer, experts) in enumerate(routed):
        layer.forward = partial(_replayed, layer.forward, index, experts.num_experts)


def _routed_layers(decoder: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the layers with experts, and their experts."""
    return ((layer, module) for layer in decoder.layers for module in layer.modules() if is_experts(module))


def _replayed(
    forward: Callable[..., Any],
    index: int,
    expert_count: int,
    *arguments: Any,
    routed_experts: Tensor | None = None,
    **options: Any,
) -> Any:
    given = nullcontext() if routed_experts is None else _GivenRouting(routed_experts[:, index], expert_count)
    with given:
        return forward(*arguments, **options)


def _unrouted(
    forward: Callable[..., Any], *arguments: Any, routed_experts: Tensor | None = None, **options: Any
) -> Any:
    return forward(*arguments, **options)


class _GivenRouting(TorchFunctionMode):
    """A mode in which `torch.topk`, with which every router chooses experts, returns given indices.

    The router's own code computes the weights of these experts, with softmax before or after the choice, normalized or
    not. Gradients therefore flow as if the router had chosen them. A router that first chooses groups of experts
    (DeepSeek-V3) does so among fewer than all experts; that choice is left alone.
    """

    def __init__(self, chosen_TK: Tensor, expert_count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chosen_TK, self._expert_count = chosen_TK.long(), expert_count

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk or args[0].shape[-1] != self._expert_count:
            return found
        index_TK = torch.where(self._chosen_TK < 0, found.indices, self._chosen_TK)
        return torch.return_types.topk((args[0].gather(-1, index_TK), index_TK))
