"""Triton kernels around the matrix products of a mixture of experts.

Each kernel makes one pass over memory, where torch's operators make many. The kernels round intermediate values to the
model's dtype where torch's operators do. They sum in float32 in a fixed order, without atomic additions, so results are
reproducible. Importing this module needs Triton; `kernels_compute` in `expert_routing.py` decides when it is used.

Shapes: T tokens, K experts per token, S = T K copies of tokens sorted by expert, I intermediate size of an expert, G =
2 I, R LoRA rank.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape; Triton's constants are in capitals

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fovea_trainer.model.gate_kernels import gate_gradient_kernel, gate_kernel

MAX_RANK = 64
"""The highest LoRA rank of the kernels. Adapters of a higher rank do not fit into a program's registers."""


@dataclass(frozen=True)
class Blocks:
    """Tiling of a gate kernel.

    Args:
        copies: Rows (token copies) per program. A program multiplies once per expert.
        columns: Columns of the intermediate size that a program processes per iteration.
        warps: Warps per program.
        registers: Maximum registers per thread; None lets the compiler decide.
    """

    copies: int
    columns: int
    warps: int
    registers: int | None = None

    def constants(self, rank: int, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the compile-time constants of a kernel.

        Args:
            rank: LoRA rank; 0 without an adapter.
            dtype: Dtype of the operands of matrix products: the tensors' dtype on a GPU, but float32 for Triton's
                interpreter, which multiplies bfloat16 bit patterns as integers.
        """
        return {
            "RANK": rank,
            "BLOCK_S": self.copies,
            "BLOCK_I": self.columns,
            "BLOCK_R": max(16, triton.next_power_of_2(rank)),
            "FACTOR": {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype],
        }


FORWARD, BACKWARD = Blocks(64, 64, 8, 128), Blocks(64, 64, 8, 128)


@dataclass(frozen=True)
class GateAdapter:
    """The parts of an adapter that are fused into the gate kernels.

    The kernel adds scale * low B' to gate and up, and computes x A' of the down projection from the result.

    Args:
        scale: alpha / rank.
        token_S: int64, the token of each copy.
        expert_S: int64, the expert of each copy, ascending.
        gate_low_TR: x A' of the gate, per token.
        up_low_TR: x A' of up, per token.
        gate_b_EIR: B of the gate.
        up_b_EIR: B of up.
        down_a_ERI: A of the down projection.
    """

    scale: float
    token_S: Tensor
    expert_S: Tensor
    gate_low_TR: Tensor
    up_low_TR: Tensor
    gate_b_EIR: Tensor
    up_b_EIR: Tensor
    down_a_ERI: Tensor

    @property
    def rank(self) -> int:
        """The LoRA rank R."""
        return self.down_a_ERI.shape[1]

    def tensors(self) -> list[Tensor]:
        """Returns the tensors in the order of the kernels' parameters."""
        low = [self.gate_low_TR, self.up_low_TR, self.gate_b_EIR, self.up_b_EIR, self.down_a_ERI]
        return [one.contiguous() for one in (self.expert_S, self.token_S, *low)]


def copies(rows_TN: Tensor, slot_S: Tensor) -> Tensor:
    """Returns the row of each token at its K slots, [S, N]. Each row is read once.

    Args:
        rows_TN: The rows.
        slot_S: int64, the slot of each entry of [T, K] among the sorted copies.
    """
    found = rows_TN.new_empty(len(slot_S), rows_TN.shape[1])
    _for_rows(_copy_kernel, rows_TN.contiguous(), slot_S, found, len(rows_TN))
    return found


def sums(rows_SN: Tensor, slot_S: Tensor, top_k: int) -> Tensor:
    """Returns the sum of the copies of each token, [T, N]. Sums are computed in float32 and rounded once."""
    found = rows_SN.new_empty(len(slot_S) // top_k, rows_SN.shape[1])
    _for_rows(_sum_kernel, rows_SN.contiguous(), slot_S, found, len(found))
    return found


def gated(
    inner_SG: Tensor, weight_S1: Tensor, adapter: GateAdapter | None, blocks: Blocks = FORWARD
) -> tuple[Tensor, Tensor | None]:
    """Returns silu(gate) * up * weight, [S, I], and x A' of the down projection, [S, R].

    Args:
        inner_SG: Gate and up side by side, without the adapter's contribution.
        weight_S1: Router weight of each copy.
        adapter: The adapter's tensors, or None.
        blocks: Tiling.

    Returns:
        Both in the dtype of `inner_SG`; the second is None without an adapter.
    """
    found_SI = inner_SG.new_empty(len(inner_SG), inner_SG.shape[1] // 2)
    low_SR = None if adapter is None else inner_SG.new_empty(len(inner_SG), adapter.rank)
    _for_blocks(gate_kernel, [inner_SG, weight_S1], adapter, [found_SI, low_SR], blocks)
    return found_SI, low_SR


def gated_gradients(
    d_gated_SI: Tensor,
    d_low_SR: Tensor | None,
    inner_SG: Tensor,
    weight_S1: Tensor,
    adapter: GateAdapter | None,
    blocks: Blocks = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of the inputs of `gated`.

    Args:
        d_gated_SI: Gradient of the first output.
        d_low_SR: Gradient of the second output; None without an adapter.
        inner_SG: As for `gated`.
        weight_S1: As for `gated`.
        adapter: As for `gated`.
        blocks: Tiling.

    Returns:
        The gradients of inner_SG and weight_S1, and those of x A' of gate and of up for each copy, [S, R] or None.
    """
    d_inner_SG, d_weight_S1 = torch.empty_like(inner_SG), torch.empty_like(weight_S1)
    lows: list[Tensor | None] = [None, None] if d_low_SR is None else [torch.empty_like(d_low_SR) for _ in range(2)]
    given: list[Tensor | None] = [
        inner_SG,
        weight_S1,
        d_gated_SI.contiguous(),
        None if d_low_SR is None else d_low_SR.contiguous(),
    ]
    _for_blocks(gate_gradient_kernel, given, adapter, [d_inner_SG, d_weight_S1, *lows], blocks)
    return d_inner_SG, d_weight_S1, lows[0], lows[1]


def _for_rows(kernel: Any, rows: Tensor, slot_S: Tensor, found: Tensor, token_count: int) -> None:
    """Launches a kernel with one program per token and block of columns."""
    size = rows.shape[1]
    if not found.numel():
        return
    block = min(2048, triton.next_power_of_2(size))
    grid = (token_count, triton.cdiv(size, block))
    with _device(rows):
        kernel[grid](rows, slot_S, found, size, TOP_K=len(slot_S) // token_count, BLOCK=block)


def _for_blocks(
    kernel: Any, given: list[Tensor | None], adapter: GateAdapter | None, found: list[Tensor | None], blocks: Blocks
) -> None:
    """Launches a kernel with one program per block of copies.

    Absent tensors are replaced by one that the kernel ignores.
    """
    inner_SG = given[0]
    assert inner_SG is not None
    if not len(inner_SG):
        return
    needed = [inner_SG] * 7 if adapter is None else adapter.tensors()
    rank = 0 if adapter is None else adapter.rank
    tensors = [inner_SG if one is None else one for one in (*given, *needed, *found)]
    with _device(inner_SG):
        kernel[(triton.cdiv(len(inner_SG), blocks.copies),)](
            *tensors,
            0.0 if adapter is None else adapter.scale,
            len(inner_SG),
            inner_SG.shape[1] // 2,
            **blocks.constants(rank, inner_SG.dtype if inner_SG.is_cuda else torch.float32),
            num_warps=blocks.warps,
            maxnreg=blocks.registers,
            num_stages=1,  # most loops over experts run once, so prefetching would only cost registers
        )


def _device(rows: Tensor) -> torch.cuda.device:
    """Returns a context in which the tensors' device is current: Triton launches on the current device."""
    return torch.cuda.device(rows.device if rows.is_cuda else -1)


def _copy(
    rows: tl.tensor, slot_of: tl.tensor, found: tl.tensor, size: tl.tensor, TOP_K: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    # One program per token and block of columns. The row is loaded once and stored to all K slots of the token.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + token * size + column, mask=column < size)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slot_of + token * TOP_K + choice)
        tl.store(found + slot * size + column, row, mask=column < size)


def _sum(
    rows: tl.tensor, slot_of: tl.tensor, found: tl.tensor, size: tl.tensor, TOP_K: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    # One program per token and block of columns. The K copies are added in the order of the token's experts, in
    # float32.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slot_of + token * TOP_K + choice)
        total += tl.load(rows + slot * size + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(found + token * size + column, total.to(found.dtype.element_ty), mask=column < size)


_copy_kernel, _sum_kernel = triton.jit(_copy), triton.jit(_sum)
