"""Multiplies by the adapters of a step on a GPU, with work for the adapters and ranks that the step uses.

Replaces: the kernels `lora_shrink` and `lora_expand` of `vllm.lora.ops.triton_ops`, for `ScoringPunicaWrapper`.
Why: vLLM starts 64 thread blocks along the input for each 16 ranks of each slot, also for inputs with 10 blocks of 256
    values, for padded ranks, and for slots that the step does not use. A step of 64 sequences with 31 adapters of the
    4B shape starts 4 million blocks. These kernels start a block for every 512 inputs, end at the adapter's own rank,
    and start none for slots that a step of that many tokens cannot use. They find an adapter by the place of its first
    rank, so that adapters of different ranks share one memory.
Upstream: vllm-project/vllm pull requests 32005 (one CUDA graph for each number of adapters, merged as an option) and
    48887 (skips layers that no adapter changes), open.
Delete when: vLLM's kernels skip unused ranks and slots, and a slot may be smaller than the largest rank.

The memory of the factors A of a module, [ranks, I], holds the adapter of a slot in the rows from `first` to `first +
width`. The memory of its factors B holds it as [O, width] from element `first * O`.
"""

# ruff: noqa: N803, SIM108 -- Triton's constants are in capitals, and its compiler needs whole branches

import functools

import torch
import triton
import triton.language as tl
from vllm.utils.torch_utils import direct_register_custom_op

_FEW_TOKENS = 128
"""Steps of up to this many tokens mostly decode, with one or a few tokens of each adapter."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_STEP_INPUTS = 512
"""Inputs that one thread block of `_shrink` sums in a step of few tokens."""


def _find_rows(
    tokens: tl.tensor, counts: tl.tensor, starts: tl.tensor, place: tl.tensor, block: tl.tensor, BLOCK_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the rows of a block of the tokens of an adapter, and which of them exist."""
    offsets = block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = offsets < tl.load(counts + place)
    rows = tl.load(tokens + tl.load(starts + place) + offsets, mask=exists, other=0)
    return rows.to(tl.int64), exists


_rows_of = triton.jit(_find_rows)


def _shrink_rows(
    x: tl.tensor, a: tl.tensor, out: tl.tensor, token_count: tl.tensor, input_width: tl.tensor, out_width: tl.tensor,
    tokens: tl.tensor, counts: tl.tensor, starts: tl.tensor, slots: tl.tensor, firsts: tl.tensor, ranks: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
) -> None:  # fmt: skip
    """Writes out[split, slice, row, r] = sum over i of x[row, i] * A[first + r, i], in float32.

    Each of SPLIT programs sums every SPLIT-th block of inputs. `_expand` adds their sums, always in the same order.
    """
    pid, part, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split, pid = pid % SPLIT, pid // SPLIT
    rank_blocks = tl.cdiv(out_width, BLOCK_R)
    rank_block, row_block = pid % rank_blocks, pid // rank_blocks
    slot = tl.load(slots + place)
    if slot < 0:
        return
    if row_block * BLOCK_M >= tl.load(counts + place):
        return
    rank = tl.multiple_of(tl.load(ranks + slot), 8)
    if rank_block * BLOCK_R >= rank:
        return
    rows, exists = _rows_of(tokens, counts, starts, place, row_block, BLOCK_M)
    r = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    if SLICES == 1:
        factor = a
    else:
        factor = tl.load(a + part).to(tl.pointer_type(x.dtype.element_ty))
    factor += (tl.load(firsts + slot) + r).to(tl.int64)[None, :] * input_width
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for start in range(split * BLOCK_I, input_width, BLOCK_I * SPLIT):
        i = start + tl.arange(0, BLOCK_I)
        inside = i < input_width
        b_tile = tl.load(factor + i[:, None], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        x_tile = tl.load(
            x + rows[:, None] * input_width + i[None, :], mask=exists[:, None] & inside[None, :], other=0.0
        )
        total += tl.dot(x_tile, b_tile)
    target = out + ((split * SLICES + part).to(tl.int64) * token_count + rows[:, None]) * out_width + r[None, :]
    tl.store(target, total, mask=exists[:, None] & (r < rank)[None, :])


_shrink = triton.jit(_shrink_rows)


def _expand_rows(
    reduced: tl.tensor, b: tl.tensor, y: tl.tensor, token_count: tl.tensor, reduced_width: tl.tensor,
    y_stride: tl.tensor, tokens: tl.tensor, counts: tl.tensor, starts: tl.tensor, slots: tl.tensor, firsts: tl.tensor,
    ranks: tl.tensor, widths: tl.tensor, part_starts: tl.tensor, part_sizes: tl.tensor, most_outputs: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
    EQUAL: tl.constexpr, B_TYPE: tl.constexpr,
) -> None:  # fmt: skip
    """Adds sum over split and r of reduced[split, slice, row, r] * B[o, r] to y[row, part_start + o]."""
    pid, part, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output_blocks = tl.cdiv(most_outputs, BLOCK_O)
    output_block, row_block = pid % output_blocks, pid // output_blocks
    slot = tl.load(slots + place)
    if slot < 0:
        return
    if row_block * BLOCK_M >= tl.load(counts + place):
        return
    if EQUAL:
        size = part_sizes
    else:
        size = tl.multiple_of(tl.load(part_sizes + part).to(tl.int32), ALIGNED)
    if output_block * BLOCK_O >= size:
        return
    if SLICES == 1:
        factor = b
        begin = part_starts
    else:
        factor = tl.load(b + part).to(tl.pointer_type(B_TYPE))
        begin = tl.multiple_of(tl.load(part_starts + part).to(tl.int32), ALIGNED)
    rows, exists = _rows_of(tokens, counts, starts, place, row_block, BLOCK_M)
    # Without these hints the compiler would load B element by element.
    rank, width = tl.multiple_of(tl.load(ranks + slot), 8), tl.multiple_of(tl.load(widths + slot), 8)
    first = tl.multiple_of(tl.load(firsts + slot), 8).to(tl.int64)
    o = output_block * BLOCK_O + tl.arange(0, BLOCK_O)
    inside = o < size
    factor += first * size + o.to(tl.int64)[None, :] * width
    source = reduced + (part.to(tl.int64) * token_count + rows[:, None]) * reduced_width
    total = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        used = r < rank
        b_tile = tl.load(factor + r[:, None], mask=used[:, None] & inside[None, :], other=0.0)
        x_tile = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(SPLIT):
            summed = source + tl.cast(token_count, tl.int64) * (split * SLICES * reduced_width) + r[None, :]
            x_tile += tl.load(summed, mask=exists[:, None] & used[None, :], other=0.0)
        total += tl.dot(x_tile.to(B_TYPE), b_tile)
    target = y + rows[:, None] * y_stride + (begin + o)[None, :]
    mask = exists[:, None] & inside[None, :]
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (before + total).to(y.dtype.element_ty), mask=mask)


_expand = triton.jit(_expand_rows)


@functools.cache
def _tensor(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns the values as int64 [n] on the device. Kept, because CUDA graphs read it at every replay."""
    return torch.tensor(values, dtype=torch.int64).to(device)


def _pointers(stacks: list[torch.Tensor]) -> torch.Tensor:
    return stacks[0] if len(stacks) == 1 else _tensor(tuple(one.data_ptr() for one in stacks), stacks[0].device)


def shrink_blocks(row_count: int, input_width: int) -> dict[str, int]:
    """Returns the sizes of the blocks of `_shrink`."""
    if row_count <= _FEW_TOKENS:
        return {"BLOCK_M": 16, "BLOCK_R": 32, "BLOCK_I": 128, "SPLIT": triton.cdiv(input_width, _STEP_INPUTS)}
    return {"BLOCK_M": 64, "BLOCK_R": 32, "BLOCK_I": 64, "SPLIT": 4 if row_count <= 4 * _FEW_TOKENS else 2}


def expand_blocks(row_count: int) -> dict[str, int]:
    """Returns the sizes of the blocks of `_expand`."""
    if row_count <= _FEW_TOKENS:
        return {"BLOCK_M": 16, "BLOCK_O": 256 if row_count >= 16 else 128, "BLOCK_R": 32}
    return {"BLOCK_M": 64, "BLOCK_O": 128, "BLOCK_R": 32}


def _places(token_count: int, slots: torch.Tensor, active_count: torch.Tensor) -> int:
    """Returns how many adapters the step may use: the true number or, in a CUDA graph, the most of its size."""
    if slots.is_cuda and torch.cuda.is_current_stream_capturing():
        return min(token_count, slots.shape[0])
    return min(int(active_count), slots.shape[0])


def add_products(
    x: torch.Tensor,
    a_stacks: list[torch.Tensor],
    b_stacks: list[torch.Tensor],
    y: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    is_idle: torch.Tensor,
    active_count: torch.Tensor,
    firsts: torch.Tensor,
    ranks: torch.Tensor,
    widths: torch.Tensor,
) -> None:
    """Adds x A^T B^T of each row's own adapter to the outputs y. The order of all sums is fixed.

    Args:
        x: The rows, [N, I], in the adapters' 16-bit type.
        a_stacks: The memory of A of each slice, [slots, 1, R, I].
        b_stacks: The memory of B of each slice, [slots, 1, O, R].
        y: The outputs of all slices, [N, sum of O].
        tokens: The rows, sorted by adapter, int32 [N].
        counts: The number of rows of each adapter, int32 [slots + 1].
        starts: The first of `tokens` of each adapter, int32 [slots + 2].
        slots: The slots of the adapters, then -1, int32 [slots + 1].
        is_idle: On the CPU; true if no row has an adapter.
        active_count: On the CPU: the number of different adapters.
        firsts: The first rank of each slot in the memory, int32 [slots].
        ranks: The rank of the adapter in each slot, rounded up to a multiple of 8, int32 [slots].
        widths: The ranks for which each slot has memory, a multiple of 8, int32 [slots].
    """
    (count, input_width), parts, most_rank = x.shape, len(a_stacks), a_stacks[0].shape[-2]
    if bool(is_idle) or not count:
        return
    x, places = x.contiguous(), _places(count, slots, active_count)
    step = tokens, counts, starts, slots, firsts, ranks
    blocks = shrink_blocks(count, input_width)
    split = blocks["SPLIT"]
    reduced = torch.empty((split, parts, count, most_rank), dtype=torch.float32, device=x.device)
    programs = split * triton.cdiv(count, blocks["BLOCK_M"]) * triton.cdiv(most_rank, blocks["BLOCK_R"])
    _shrink[(programs, parts, places)](
        x, _pointers(a_stacks), reduced, count, input_width, most_rank, *step,
        **blocks, SLICES=parts, num_warps=4, num_stages=3,
    )  # fmt: skip
    sizes = tuple(one.shape[-2] for one in b_stacks)
    begins = tuple(sum(sizes[:number]) for number in range(parts))
    equal = len(set(sizes)) == 1
    part_starts = _tensor(begins, y.device) if parts > 1 else 0
    part_sizes = sizes[0] if equal else _tensor(sizes, y.device)
    blocks = expand_blocks(count)
    programs = triton.cdiv(count, blocks["BLOCK_M"]) * triton.cdiv(max(sizes), blocks["BLOCK_O"])
    _expand[(programs, parts, places)](
        reduced, _pointers(b_stacks), y, count, most_rank, y.stride(0), *step, widths, part_starts, part_sizes,
        max(sizes), ALIGNED=8 if all(size % 8 == 0 for size in sizes) else 1, **blocks, SPLIT=split, SLICES=parts,
        EQUAL=equal, B_TYPE=_TYPES[b_stacks[0].dtype], num_warps=4, num_stages=2,
    )  # fmt: skip


direct_register_custom_op("fovea_add_lora", add_products, mutates_args=["y"])
