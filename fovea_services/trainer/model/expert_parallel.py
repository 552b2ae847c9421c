"""Experts spread over ranks: tokens go to the rank that holds their expert, and what it makes of them comes back.

Ranks form a mesh of two dimensions: along EXPERTS each rank holds other experts, along DATA those of one place are
sharded by FSDP as everything else is by all ranks. Parameters say so themselves: gathered, those of experts are
DTensors over EXPERTS.

Shapes: T tokens, K experts of a token, S = T K copies of tokens sorted by expert, C copies that this rank receives, N
ranks over which experts are spread, E experts in all, L = E / N of them here, D hidden size.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

DATA = "data"
EXPERTS = "experts"


def expert_mesh(device_type: str, world_size: int, spread: int, expert_count: int) -> DeviceMesh | None:
    """[DATA, EXPERTS] of ranks, neighbours holding different experts; None where experts are not spread. Collective.

    Args:
        spread: Ranks over which experts are spread.
        expert_count: Of the model's layers; 0 without experts.

    Raises ValueError for a model whose experts cannot be spread so.
    """
    if spread == 1:
        return None
    if not expert_count:
        raise ValueError(f"--expert-parallel is {spread}, but the model has no experts; take 1")
    if expert_count % spread:
        raise ValueError(f"--expert-parallel is {spread}, which does not divide the model's {expert_count} experts")
    if expert_count % world_size:
        raise ValueError(
            f"--expert-parallel is {spread}: {expert_count // spread} experts of each rank cannot be sharded evenly "
            f"over the {world_size // spread} that hold the same; take a number of ranks that divides {expert_count}"
        )
    return init_device_mesh(device_type, (world_size // spread, spread), mesh_dim_names=(DATA, EXPERTS))


def spread_parameters(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves a rank its experts alone, of a module on the meta device.

    Args:
        mesh: One dimension, EXPERTS.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        count, *rest = parameter.shape
        local = torch.empty(count // mesh.size(), *rest, dtype=parameter.dtype, device="meta")
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(whole, parameter.requires_grad))


def own_part(parameter: Tensor) -> Tensor:
    """The experts that this rank computes, of a gathered parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def laid_out_as(parameter: Tensor, own: Tensor) -> Tensor:
    """A gradient of `own_part` as one of the parameter."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False)


@dataclass(frozen=True)
class Exchange:
    """How many copies of tokens go from each rank to each other one.

    Args:
        mesh: One dimension, EXPERTS.
        sent: How many this rank sends to each.
        received: How many it gets from each.
        index_C1: Which of its own experts each is for that it gets.
    """

    mesh: DeviceMesh
    sent: list[int]
    received: list[int]
    index_C1: Tensor

    @classmethod
    def of(cls, ends_E: Tensor, mesh: DeviceMesh) -> Self:
        """For copies that are sorted by expert; waits for the device. Collective.

        Args:
            ends_E: Where each expert's copies end.
        """
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).long()
        counts_NL = _to_all(counts_E, None, None, mesh).view(mesh.size(), -1)
        sent, received = torch.stack([counts_E.view(mesh.size(), -1).sum(1), counts_NL.sum(1)]).tolist()
        own_L = torch.arange(counts_NL.shape[1], device=ends_E.device)
        index_C = own_L.repeat(mesh.size()).repeat_interleave(counts_NL.flatten(), output_size=sum(received))
        return cls(mesh, sent, received, index_C.unsqueeze(1))

    def send(self, rows_SD: Tensor) -> Tensor:
        """What this rank gets of all ranks' rows, [C, D]. Collective, its backward pass too."""
        return _to_all(rows_SD, self.received, self.sent, self.mesh)

    def send_back(self, rows_CD: Tensor) -> Tensor:
        """The way back: [S, D]. Likewise."""
        return _to_all(rows_CD, self.sent, self.received, self.mesh)


def _to_all(rows: Tensor, received: list[int] | None, sent: list[int] | None, mesh: DeviceMesh) -> Tensor:
    found = collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, mesh)
    waited: Tensor = collectives.wait_tensor(found)  # type: ignore[no-untyped-call]
    return waited


def parts_of_all(own: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """The tensors of the ranks that hold different experts, in order. Collective."""
    found = [torch.empty_like(own) for _ in range(mesh[EXPERTS].size())]
    dist.all_gather(found, own, group=mesh.get_group(EXPERTS))
    return found
