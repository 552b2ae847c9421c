"""Kernels of Triton's around the products of a mixture of experts: what torch does in many passes over memory, in one.

They round where torch's operators round and sum in float32, in an order that is always the same: nothing is added
atomically. Importing this needs Triton; `kernels_compute` of `experts.py` decides where they are used.

Shapes: T tokens, K experts of a token, S = T K copies of tokens sorted by expert, I size of an expert, G = 2 I, R rank.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape; Triton's constants are in capitals

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_RANK = 64
"""Adapters of a higher one do not fit into a program's registers."""


@dataclass(frozen=True)
class Blocks:
    """How a kernel around the gate divides its work.

    Args:
        copies: Of a program. Those of several experts cost a product for each.
        columns: That it takes at a time.
        warps: Of a program.
        registers: The most of a thread; None leaves it to the compiler.
    """

    copies: int
    columns: int
    warps: int
    registers: int | None = None

    def constants(self, rank: int, dtype: torch.dtype) -> dict[str, Any]:
        """What the kernel is compiled for.

        Args:
            dtype: Of the factors of products: that of the tensors, but for Triton's interpreter, which multiplies
                bfloat16 as if it were an integer.
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
    """What an adapter has around the gate: it adds to gate and up, and takes x A' of what comes out.

    Args:
        scale: What is added is scale * low B'.
        token_S: The token of each copy.
        expert_S: The expert of each copy, in order.
        gate_low_TR: x A' of the gate, of each token.
        up_low_TR: Likewise.
        gate_b_EIR: B of the gate.
        up_b_EIR: Likewise.
        down_a_ERI: A of the product that comes next.
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
        """R."""
        return self.down_a_ERI.shape[1]

    def tensors(self) -> list[Tensor]:
        """In the order in which kernels take them."""
        low = [self.gate_low_TR, self.up_low_TR, self.gate_b_EIR, self.up_b_EIR, self.down_a_ERI]
        return [one.contiguous() for one in (self.expert_S, self.token_S, *low)]


def copies(rows_TN: Tensor, place_S: Tensor) -> Tensor:
    """A row of each token to each of its places, [S, N]: each row is read once.

    Args:
        place_S: Where each of [T, K] is among the copies.
    """
    found = rows_TN.new_empty(len(place_S), rows_TN.shape[1])
    _for_rows(_copy_kernel, rows_TN.contiguous(), place_S, found, len(rows_TN))
    return found


def sums(rows_SN: Tensor, place_S: Tensor, top_k: int) -> Tensor:
    """The sum of the rows of each token's copies, [T, N], in float32, rounded once."""
    found = rows_SN.new_empty(len(place_S) // top_k, rows_SN.shape[1])
    _for_rows(_sum_kernel, rows_SN.contiguous(), place_S, found, len(found))
    return found


def gated(
    inner_SG: Tensor, weight_S1: Tensor, adapter: GateAdapter | None, blocks: Blocks = FORWARD
) -> tuple[Tensor, Tensor | None]:
    """silu(gate) * up * weight, [S, I], with what an adapter adds to gate and up; and x A' of it, [S, R]."""
    found_SI = inner_SG.new_empty(len(inner_SG), inner_SG.shape[1] // 2)
    low_SR = None if adapter is None else inner_SG.new_empty(len(inner_SG), adapter.rank)
    _for_blocks(_gate_kernel, [inner_SG, weight_S1], adapter, [found_SI, low_SR], blocks)
    return found_SI, low_SR


def gated_gradients(
    d_gated_SI: Tensor,
    d_low_SR: Tensor | None,
    inner_SG: Tensor,
    weight_S1: Tensor,
    adapter: GateAdapter | None,
    blocks: Blocks = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of inner_SG and weight_S1, and those of x A' of gate and up for each copy, [S, R]."""
    d_inner_SG, d_weight_S1 = torch.empty_like(inner_SG), torch.empty_like(weight_S1)
    lows: list[Tensor | None] = [None, None] if d_low_SR is None else [torch.empty_like(d_low_SR) for _ in range(2)]
    given: list[Tensor | None] = [
        inner_SG,
        weight_S1,
        d_gated_SI.contiguous(),
        None if d_low_SR is None else d_low_SR.contiguous(),
    ]
    _for_blocks(_gate_gradient_kernel, given, adapter, [d_inner_SG, d_weight_S1, *lows], blocks)
    return d_inner_SG, d_weight_S1, lows[0], lows[1]


def _for_rows(kernel: Any, rows: Tensor, place_S: Tensor, found: Tensor, token_count: int) -> None:
    """Runs a kernel for each token and each block of a row."""
    size = rows.shape[1]
    if not found.numel():
        return
    block = min(2048, triton.next_power_of_2(size))
    grid = (token_count, triton.cdiv(size, block))
    with _device(rows):
        kernel[grid](rows, place_S, found, size, TOP_K=len(place_S) // token_count, BLOCK=block)


def _for_blocks(
    kernel: Any, given: list[Tensor | None], adapter: GateAdapter | None, found: list[Tensor | None], blocks: Blocks
) -> None:
    """Runs a kernel for each block of copies; without an adapter it looks at no tensor that is not there."""
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
            num_stages=1,  # loops over experts mostly run once: to load ahead for them takes registers in vain
        )


def _device(rows: Tensor) -> torch.cuda.device:
    """Triton launches on the current device."""
    return torch.cuda.device(rows.device if rows.is_cuda else -1)


def _copy(
    rows: tl.tensor, place_of: tl.tensor, found: tl.tensor, size: tl.tensor, TOP_K: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + token * size + column, mask=column < size)
    for choice in tl.static_range(TOP_K):
        place = tl.load(place_of + token * TOP_K + choice)
        tl.store(found + place * size + column, row, mask=column < size)


def _sum(
    rows: tl.tensor, place_of: tl.tensor, found: tl.tensor, size: tl.tensor, TOP_K: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(place_of + token * TOP_K + choice)
        total += tl.load(rows + place * size + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(found + token * size + column, total.to(found.dtype.element_ty), mask=column < size)


def _gate(
    inner: tl.tensor,
    weight: tl.tensor,
    expert_of: tl.tensor,
    token_of: tl.tensor,
    gate_low: tl.tensor,
    up_low: tl.tensor,
    gate_b: tl.tensor,
    up_b: tl.tensor,
    down_a: tl.tensor,
    found: tl.tensor,
    low: tl.tensor,
    scale: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FACTOR: tl.constexpr,
) -> None:
    """A block of copies, sorted by expert, so that it has few: each multiplies all rows, those of others as zeros."""
    TYPE: tl.constexpr = inner.dtype.element_ty
    # Of 64 bits are only where the block begins: places in it are of 32, which take half the registers.
    start_row = tl.program_id(0).to(tl.int64) * BLOCK_S
    inner += start_row * (2 * size)
    weight += start_row
    found += start_row * size
    low += start_row * RANK
    expert_of += start_row
    token_of += start_row
    row = tl.arange(0, BLOCK_S)
    row_inside = row < count - tl.program_id(0) * BLOCK_S
    share = tl.load(weight + row, mask=row_inside, other=0.0).to(tl.float32)[:, None]
    if RANK > 0:
        expert = tl.load(expert_of + row, mask=row_inside, other=-1).to(tl.int32)
        last = tl.max(expert, 0)
        first = tl.min(tl.where(row_inside, expert, last), 0)
        rank = tl.arange(0, BLOCK_R)
        low_inside = row_inside[:, None] & (rank < RANK)[None, :]
        token = tl.load(token_of + row, mask=row_inside, other=0)
        low_place = token[:, None] * RANK + rank[None, :]
        gate_x = tl.load(gate_low + low_place, mask=low_inside, other=0.0).to(FACTOR)
        up_x = tl.load(up_low + low_place, mask=low_inside, other=0.0).to(FACTOR)
        low_sum = tl.zeros([BLOCK_S, BLOCK_R], dtype=tl.float32)
    for start in range(0, size, BLOCK_I):
        column = start + tl.arange(0, BLOCK_I)
        inside = row_inside[:, None] & (column < size)[None, :]
        place = row[:, None] * (2 * size) + column[None, :]
        gate = tl.load(inner + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + place + size, mask=inside, other=0.0).to(tl.float32)
        if RANK > 0:
            b_inside = (rank < RANK)[:, None] & (column < size)[None, :]
            gate_more = tl.zeros([BLOCK_S, BLOCK_I], dtype=tl.float32)
            up_more = tl.zeros([BLOCK_S, BLOCK_I], dtype=tl.float32)
            for one in range(first, last + 1):
                own = (expert == one)[:, None]
                b_place = one * size * RANK + column[None, :] * RANK + rank[:, None]
                factor = tl.load(gate_b + b_place, mask=b_inside, other=0.0).to(FACTOR)
                gate_more += tl.dot(tl.where(own, gate_x, 0.0).to(FACTOR), factor, input_precision="ieee")
                factor = tl.load(up_b + b_place, mask=b_inside, other=0.0).to(FACTOR)
                up_more += tl.dot(tl.where(own, up_x, 0.0).to(FACTOR), factor, input_precision="ieee")
            gate = (gate + scale * gate_more.to(TYPE).to(tl.float32)).to(TYPE).to(tl.float32)
            up = (up + scale * up_more.to(TYPE).to(tl.float32)).to(TYPE).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(TYPE).to(tl.float32)
        product = (silu * up).to(TYPE).to(tl.float32)
        out = (product * share).to(TYPE)
        tl.store(found + row[:, None] * size + column[None, :], out, mask=inside)
        if RANK > 0:
            a_inside = (column < size)[:, None] & (rank < RANK)[None, :]
            rows = out.to(FACTOR)
            for one in range(first, last + 1):
                own = (expert == one)[:, None]
                a_place = one * size * RANK + rank[None, :] * size + column[:, None]
                factor = tl.load(down_a + a_place, mask=a_inside, other=0.0).to(FACTOR)
                low_sum += tl.dot(tl.where(own, rows, 0.0).to(FACTOR), factor, input_precision="ieee")
    if RANK > 0:
        tl.store(low + row[:, None] * RANK + rank[None, :], low_sum.to(TYPE), mask=low_inside)


def _gate_gradient(
    inner: tl.tensor,
    weight: tl.tensor,
    d_found: tl.tensor,
    d_low: tl.tensor,
    expert_of: tl.tensor,
    token_of: tl.tensor,
    gate_low: tl.tensor,
    up_low: tl.tensor,
    gate_b: tl.tensor,
    up_b: tl.tensor,
    down_a: tl.tensor,
    d_inner: tl.tensor,
    d_weight: tl.tensor,
    d_gate_low: tl.tensor,
    d_up_low: tl.tensor,
    scale: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FACTOR: tl.constexpr,
) -> None:
    """As `_gate` for all that it computes, which is computed again: to read it would take as long."""
    TYPE: tl.constexpr = inner.dtype.element_ty
    # Of 64 bits are only where the block begins: places in it are of 32, which take half the registers.
    start_row = tl.program_id(0).to(tl.int64) * BLOCK_S
    inner += start_row * (2 * size)
    weight += start_row
    d_found += start_row * size
    d_low += start_row * RANK
    d_inner += start_row * (2 * size)
    d_weight += start_row
    d_gate_low += start_row * RANK
    d_up_low += start_row * RANK
    expert_of += start_row
    token_of += start_row
    row = tl.arange(0, BLOCK_S)
    row_inside = row < count - tl.program_id(0) * BLOCK_S
    share = tl.load(weight + row, mask=row_inside, other=0.0).to(tl.float32)[:, None]
    share_sum = tl.zeros([BLOCK_S], dtype=tl.float32)
    if RANK > 0:
        expert = tl.load(expert_of + row, mask=row_inside, other=-1).to(tl.int32)
        last = tl.max(expert, 0)
        first = tl.min(tl.where(row_inside, expert, last), 0)
        rank = tl.arange(0, BLOCK_R)
        low_inside = row_inside[:, None] & (rank < RANK)[None, :]
        token = tl.load(token_of + row, mask=row_inside, other=0)
        low_place = token[:, None] * RANK + rank[None, :]
        gate_x = tl.load(gate_low + low_place, mask=low_inside, other=0.0).to(FACTOR)
        up_x = tl.load(up_low + low_place, mask=low_inside, other=0.0).to(FACTOR)
        own_place = row[:, None] * RANK + rank[None, :]
        d_x = tl.load(d_low + own_place, mask=low_inside, other=0.0).to(FACTOR)
        gate_sum = tl.zeros([BLOCK_S, BLOCK_R], dtype=tl.float32)
        up_sum = tl.zeros([BLOCK_S, BLOCK_R], dtype=tl.float32)
    for start in range(0, size, BLOCK_I):
        column = start + tl.arange(0, BLOCK_I)
        inside = row_inside[:, None] & (column < size)[None, :]
        place = row[:, None] * (2 * size) + column[None, :]
        gate = tl.load(inner + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + place + size, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(d_found + row[:, None] * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if RANK > 0:
            b_inside = (rank < RANK)[:, None] & (column < size)[None, :]
            gate_more = tl.zeros([BLOCK_S, BLOCK_I], dtype=tl.float32)
            up_more = tl.zeros([BLOCK_S, BLOCK_I], dtype=tl.float32)
            grad_more = tl.zeros([BLOCK_S, BLOCK_I], dtype=tl.float32)
            for one in range(first, last + 1):
                own = (expert == one)[:, None]
                b_place = one * size * RANK + column[None, :] * RANK + rank[:, None]
                factor = tl.load(gate_b + b_place, mask=b_inside, other=0.0).to(FACTOR)
                gate_more += tl.dot(tl.where(own, gate_x, 0.0).to(FACTOR), factor, input_precision="ieee")
                factor = tl.load(up_b + b_place, mask=b_inside, other=0.0).to(FACTOR)
                up_more += tl.dot(tl.where(own, up_x, 0.0).to(FACTOR), factor, input_precision="ieee")
                a_place = one * size * RANK + rank[:, None] * size + column[None, :]
                factor = tl.load(down_a + a_place, mask=b_inside, other=0.0).to(FACTOR)
                grad_more += tl.dot(tl.where(own, d_x, 0.0).to(FACTOR), factor, input_precision="ieee")
            gate = (gate + scale * gate_more.to(TYPE).to(tl.float32)).to(TYPE).to(tl.float32)
            up = (up + scale * up_more.to(TYPE).to(tl.float32)).to(TYPE).to(tl.float32)
            grad = (grad + grad_more.to(TYPE).to(tl.float32)).to(TYPE).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = (gate * sigmoid).to(TYPE).to(tl.float32)
        product = (silu * up).to(TYPE).to(tl.float32)
        share_sum += tl.sum((grad * product).to(TYPE).to(tl.float32), 1)
        grad = (grad * share).to(TYPE).to(tl.float32)
        d_up = (grad * silu).to(TYPE)
        d_silu = (grad * up).to(TYPE).to(tl.float32)
        d_gate = (d_silu * sigmoid * (1 + gate * (1 - sigmoid))).to(TYPE)
        tl.store(d_inner + place, d_gate, mask=inside)
        tl.store(d_inner + place + size, d_up, mask=inside)
        if RANK > 0:
            a_inside = (column < size)[:, None] & (rank < RANK)[None, :]
            gate_rows = d_gate.to(FACTOR)
            up_rows = d_up.to(FACTOR)
            for one in range(first, last + 1):
                own = (expert == one)[:, None]
                b_place = one * size * RANK + column[:, None] * RANK + rank[None, :]
                factor = tl.load(gate_b + b_place, mask=a_inside, other=0.0).to(FACTOR)
                gate_sum += tl.dot(tl.where(own, gate_rows, 0.0).to(FACTOR), factor, input_precision="ieee")
                factor = tl.load(up_b + b_place, mask=a_inside, other=0.0).to(FACTOR)
                up_sum += tl.dot(tl.where(own, up_rows, 0.0).to(FACTOR), factor, input_precision="ieee")
    tl.store(d_weight + row, share_sum.to(TYPE), mask=row_inside)
    if RANK > 0:
        d_gate_x = (scale * gate_sum.to(TYPE).to(tl.float32)).to(TYPE)
        tl.store(d_gate_low + own_place, d_gate_x, mask=low_inside)
        d_up_x = (scale * up_sum.to(TYPE).to(tl.float32)).to(TYPE)
        tl.store(d_up_low + own_place, d_up_x, mask=low_inside)


_copy_kernel, _sum_kernel = triton.jit(_copy), triton.jit(_sum)
_gate_kernel = triton.jit(_gate, do_not_specialize=["count"])
_gate_gradient_kernel = triton.jit(_gate_gradient, do_not_specialize=["count"])
