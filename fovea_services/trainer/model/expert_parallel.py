"""Expert parallelism: tokens are sent to the rank that holds their expert, and the results are sent back.

Ranks form a two-dimensional mesh. Along EXPERTS each rank holds different experts. Along DATA the ranks hold the same
experts, sharded by FSDP; all other parameters are sharded over all ranks. A parameter's type shows which case applies:
after FSDP has gathered it, an expert parameter is a DTensor over EXPERTS.

Shapes: T tokens, K experts per token, S = T K copies of tokens sorted by expert, C copies that this rank receives, N
ranks over which experts are distributed, E experts in total, L = E / N of them on this rank, D hidden size.
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
    """Returns the mesh [DATA, EXPERTS] of all ranks, or None if experts are not distributed. Collective.

    Neighbouring ranks hold different experts.

    Args:
        device_type: `cuda` or `cpu`.
        world_size: Number of ranks.
        spread: Number of ranks over which experts are distributed.
        expert_count: Experts per layer; 0 for a model without experts.

    Raises:
        ValueError: The experts cannot be distributed this way.
    """
    if spread == 1:
        return None
    if not expert_count:
        raise ValueError(f"--expert-parallel is {spread}, but the model has no experts; set it to 1")
    if expert_count % spread:
        raise ValueError(f"--expert-parallel is {spread}, which does not divide the model's {expert_count} experts")
    if expert_count % world_size:
        raise ValueError(
            f"--expert-parallel is {spread}: {expert_count // spread} experts of each rank cannot be sharded evenly "
            f"over the {world_size // spread} ranks that hold them; use a number of ranks that divides {expert_count}"
        )
    return init_device_mesh(device_type, (world_size // spread, spread), mesh_dim_names=(DATA, EXPERTS))


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


def own_part(parameter: Tensor) -> Tensor:
    """Returns this rank's experts of a gathered parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def laid_out_as(parameter: Tensor, own: Tensor) -> Tensor:
    """Wraps a gradient of `own_part` in the layout of the parameter."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False)


@dataclass(frozen=True)
class Exchange:
    """The number of token copies that each rank sends to each other rank.

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
        """Exchanges the counts for copies that are sorted by expert. Waits for the device. Collective.

        Args:
            ends_E: int32, end of each expert's copies.
            mesh: One dimension, EXPERTS.
        """
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).long()
        counts_NL = _to_all(counts_E, None, None, mesh).view(mesh.size(), -1)
        # all_to_all needs the sizes as Python numbers: one transfer to the host for both lists.
        sent, received = torch.stack([counts_E.view(mesh.size(), -1).sum(1), counts_NL.sum(1)]).tolist()
        own_L = torch.arange(counts_NL.shape[1], device=ends_E.device)
        index_C = own_L.repeat(mesh.size()).repeat_interleave(counts_NL.flatten(), output_size=sum(received))
        return cls(mesh, sent, received, index_C.unsqueeze(1))

    def send(self, rows_SD: Tensor) -> Tensor:
        """Sends rows to the ranks of their experts; returns the received rows [C, D]. Collective, also in the backward
        pass.
        """
        return _to_all(rows_SD, self.received, self.sent, self.mesh)

    def send_back(self, rows_CD: Tensor) -> Tensor:
        """Sends processed rows back, [S, D]: the inverse of `send`. Collective, also in the backward pass."""
        return _to_all(rows_CD, self.sent, self.received, self.mesh)


def _to_all(rows: Tensor, received: list[int] | None, sent: list[int] | None, mesh: DeviceMesh) -> Tensor:
    found = collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, mesh)
    waited: Tensor = collectives.wait_tensor(found)  # type: ignore[no-untyped-call]
    return waited


def parts_of_all(own: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Returns the tensors of the ranks that hold different experts, in rank order. Collective."""
    found = [torch.empty_like(own) for _ in range(mesh[EXPERTS].size())]
    dist.all_gather(found, own, group=mesh.get_group(EXPERTS))
    return found
