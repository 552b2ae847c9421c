"""Triton kernels of the gate between the two products of an expert, forward and backward, including an adapter's part.

For each copy of a token, with a row of `inner` = [gate, up] and a router weight w, the forward kernel computes

    gate += scale * gate_low B_gate'     up += scale * up_low B_up'     (with an adapter)
    out   = silu(gate) * up * w
    low   = out A_down'                                                 (with an adapter)

and the backward kernel, with s = sigmoid(gate) and g = the gradient of `out`, plus d_low A_down with an adapter:

    d_w    = sum over columns of g * silu(gate) * up
    d_up   = g * w * silu(gate)
    d_gate = g * w * up * s * (1 + gate * (1 - s))
    d_gate_low = scale * d_gate B_gate     d_up_low = scale * d_up B_up  (with an adapter)

It recomputes gate and up, because reading stored values would take as long.

Layout: all tensors are row-major. A program owns BLOCK_S consecutive rows (copies) and walks over the columns in steps
of BLOCK_I. A copy reads `gate_low` and `up_low` at the row of its token. All other tensors except factors have one row
per copy. Only the base address of a block needs int64. Offsets inside a block fit in int32, which halves the registers
for addresses.

Experts: rows are sorted by expert, so most blocks have a single expert. For each expert of the block, `_add_products`
multiplies all rows by its matrix, with the rows of other experts set to zero. The sum over experts is each row's own
product.

Accuracy: `_rounded` rounds to the tensors' dtype wherever torch's separate operators would store a tensor. Sums are
float32. One program adds all terms of a row, in ascending order of columns and experts, without atomic additions.
Results therefore do not depend on scheduling.

Shapes: T tokens, S copies of tokens sorted by expert, I intermediate size, R LoRA rank, E experts.
"""

# ruff: noqa: N803, N806 -- Triton's constants are in capitals

import triton
import triton.language as tl


def _round(values: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Rounds float32 values to a dtype and back."""
    return values.to(TYPE).to(tl.float32)


_rounded = triton.jit(_round)


def _load_adapter_rows(
    expert_of: tl.tensor,
    token_of: tl.tensor,
    gate_low: tl.tensor,
    up_low: tl.tensor,
    row: tl.tensor,
    row_inside: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FACTOR: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Loads the adapter's values for a block of rows.

    Returns:
        The expert of each row, or -1 past the last row; the first and the last expert of the block; the indices 0 ..
        BLOCK_R - 1; offsets [BLOCK_S, BLOCK_R] in a tensor [S, R], and their mask; `gate_low` and `up_low` of each
        row's token, [BLOCK_S, BLOCK_R].
    """
    expert = tl.load(expert_of + row, mask=row_inside, other=-1).to(tl.int32)
    last = tl.max(expert, 0)
    first = tl.min(tl.where(row_inside, expert, last), 0)
    rank = tl.arange(0, BLOCK_R)
    inside = row_inside[:, None] & (rank < RANK)[None, :]
    of_token = tl.load(token_of + row, mask=row_inside, other=0)[:, None] * RANK + rank[None, :]
    gate_x = tl.load(gate_low + of_token, mask=inside, other=0.0).to(FACTOR)
    up_x = tl.load(up_low + of_token, mask=inside, other=0.0).to(FACTOR)
    return expert, first, last, rank, row[:, None] * RANK + rank[None, :], inside, gate_x, up_x


_adapter_rows = triton.jit(_load_adapter_rows)


def _load_gate_and_up(
    inner: tl.tensor, offset: tl.tensor, size: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Loads a tile of gate and one of up, the two halves of a row of [S, 2 I], as float32."""
    gate = tl.load(inner + offset, mask=inside, other=0.0).to(tl.float32)
    return gate, tl.load(inner + size + offset, mask=inside, other=0.0).to(tl.float32)


_gate_and_up = triton.jit(_load_gate_and_up)


def _add_expert_products(
    total: tl.tensor,
    rows: tl.tensor,
    factors: tl.tensor,
    offset: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    FACTOR: tl.constexpr,
) -> tl.tensor:
    """Adds to `total` [S, N] the product of each row [S, M] with the matrix [M, N] of its own expert.

    Args:
        factors: The matrices of all experts.
        offset: Offsets [M, N] within one matrix.
        inside: Mask of `offset`.
        stride: Elements from one expert's matrix to the next.
    """
    for one in range(first, last + 1):
        own = tl.where((expert == one)[:, None], rows, 0.0).to(FACTOR)
        factor = tl.load(factors + one * stride + offset, mask=inside, other=0.0).to(FACTOR)
        total += tl.dot(own, factor, input_precision="ieee")
    return total


_add_products = triton.jit(_add_expert_products)


def _adapt(
    rows: tl.tensor,
    low: tl.tensor,
    factors: tl.tensor,
    offset: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    FACTOR: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """Returns rows + scale * low F for the matrix F of each row's expert, rounded as separate operators would."""
    more = _add_products(tl.zeros_like(rows), low, factors, offset, inside, stride, expert, first, last, FACTOR)
    return _rounded(rows + scale * _rounded(more, TYPE), TYPE)


_adapted = triton.jit(_adapt)


def _differentiate(
    gate: tl.tensor,
    up: tl.tensor,
    grad: tl.tensor,
    share: tl.tensor,
    share_sum: tl.tensor,
    d_inner: tl.tensor,
    size: tl.tensor,
    inside: tl.tensor,
    TYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Computes d_gate and d_up of a tile [BLOCK_S, BLOCK_I] and stores them at `d_inner` and `d_inner` + `size`.

    Returns:
        d_gate and d_up, and `share_sum` [BLOCK_S] with the tile's terms of d_w added.
    """
    sigmoid = tl.sigmoid(gate)
    silu = _rounded(gate * sigmoid, TYPE)
    share_sum += tl.sum(_rounded(grad * _rounded(silu * up, TYPE), TYPE), 1)
    grad = _rounded(grad * share, TYPE)
    d_silu = _rounded(grad * up, TYPE)
    d_gate = (d_silu * sigmoid * (1 + gate * (1 - sigmoid))).to(TYPE)
    d_up = (grad * silu).to(TYPE)
    tl.store(d_inner, d_gate, mask=inside)
    tl.store(d_inner + size, d_up, mask=inside)
    return d_gate, d_up, share_sum


_gradients = triton.jit(_differentiate)


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
    """The forward kernel. RANK is 0 without an adapter; the adapter's pointers are then unused."""
    TYPE: tl.constexpr = inner.dtype.element_ty
    base = tl.program_id(0).to(tl.int64) * BLOCK_S
    inner, found = inner + base * (2 * size), found + base * size
    row = tl.arange(0, BLOCK_S)
    row_inside = row < count - tl.program_id(0) * BLOCK_S
    share = tl.load(weight + base + row, mask=row_inside, other=0.0).to(tl.float32)[:, None]
    if RANK > 0:
        expert, first, last, rank, low_offset, low_inside, gate_x, up_x = _adapter_rows(
            expert_of + base, token_of + base, gate_low, up_low, row, row_inside, RANK, BLOCK_R, FACTOR
        )
        low_sum = tl.zeros([BLOCK_S, BLOCK_R], dtype=tl.float32)
    for start in range(0, size, BLOCK_I):
        column = start + tl.arange(0, BLOCK_I)
        inside = row_inside[:, None] & (column < size)[None, :]
        offset = row[:, None] * (2 * size) + column[None, :]
        gate, up = _gate_and_up(inner, offset, size, inside)
        if RANK > 0:
            at, known = column[None, :] * RANK + rank[:, None], (rank < RANK)[:, None] & (column < size)[None, :]
            gate = _adapted(gate, gate_x, gate_b, at, known, size * RANK, expert, first, last, scale, FACTOR, TYPE)
            up = _adapted(up, up_x, up_b, at, known, size * RANK, expert, first, last, scale, FACTOR, TYPE)
        silu = _rounded(gate * tl.sigmoid(gate), TYPE)
        out = (_rounded(silu * up, TYPE) * share).to(TYPE)
        tl.store(found + row[:, None] * size + column[None, :], out, mask=inside)
        if RANK > 0:
            at, known = rank[None, :] * size + column[:, None], (column < size)[:, None] & (rank < RANK)[None, :]
            low_sum = _add_products(low_sum, out, down_a, at, known, size * RANK, expert, first, last, FACTOR)
    if RANK > 0:
        tl.store(low + base * RANK + low_offset, low_sum.to(TYPE), mask=low_inside)


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
    """The backward kernel. RANK is 0 without an adapter; the adapter's pointers are then unused."""
    TYPE: tl.constexpr = inner.dtype.element_ty
    base = tl.program_id(0).to(tl.int64) * BLOCK_S
    inner, d_inner, d_found = inner + base * (2 * size), d_inner + base * (2 * size), d_found + base * size
    row = tl.arange(0, BLOCK_S)
    row_inside = row < count - tl.program_id(0) * BLOCK_S
    share = tl.load(weight + base + row, mask=row_inside, other=0.0).to(tl.float32)[:, None]
    share_sum = tl.zeros([BLOCK_S], dtype=tl.float32)
    if RANK > 0:
        expert, first, last, rank, low_offset, low_inside, gate_x, up_x = _adapter_rows(
            expert_of + base, token_of + base, gate_low, up_low, row, row_inside, RANK, BLOCK_R, FACTOR
        )
        d_x = tl.load(d_low + base * RANK + low_offset, mask=low_inside, other=0.0).to(FACTOR)
        gate_sum, up_sum = tl.zeros([BLOCK_S, BLOCK_R], tl.float32), tl.zeros([BLOCK_S, BLOCK_R], tl.float32)
    for start in range(0, size, BLOCK_I):
        column = start + tl.arange(0, BLOCK_I)
        inside = row_inside[:, None] & (column < size)[None, :]
        offset = row[:, None] * (2 * size) + column[None, :]
        gate, up = _gate_and_up(inner, offset, size, inside)
        grad = tl.load(d_found + row[:, None] * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if RANK > 0:
            at, known = column[None, :] * RANK + rank[:, None], (rank < RANK)[:, None] & (column < size)[None, :]
            gate = _adapted(gate, gate_x, gate_b, at, known, size * RANK, expert, first, last, scale, FACTOR, TYPE)
            up = _adapted(up, up_x, up_b, at, known, size * RANK, expert, first, last, scale, FACTOR, TYPE)
            at = rank[:, None] * size + column[None, :]
            grad = _adapted(grad, d_x, down_a, at, known, size * RANK, expert, first, last, 1.0, FACTOR, TYPE)
        d_gate, d_up, share_sum = _gradients(gate, up, grad, share, share_sum, d_inner + offset, size, inside, TYPE)
        if RANK > 0:
            at, known = column[:, None] * RANK + rank[None, :], (column < size)[:, None] & (rank < RANK)[None, :]
            gate_sum = _add_products(gate_sum, d_gate, gate_b, at, known, size * RANK, expert, first, last, FACTOR)
            up_sum = _add_products(up_sum, d_up, up_b, at, known, size * RANK, expert, first, last, FACTOR)
    tl.store(d_weight + base + row, share_sum.to(TYPE), mask=row_inside)
    if RANK > 0:
        tl.store(d_gate_low + base * RANK + low_offset, (scale * _rounded(gate_sum, TYPE)).to(TYPE), mask=low_inside)
        tl.store(d_up_low + base * RANK + low_offset, (scale * _rounded(up_sum, TYPE)).to(TYPE), mask=low_inside)


gate_kernel = triton.jit(_gate, do_not_specialize=["count"])
gate_gradient_kernel = triton.jit(_gate_gradient, do_not_specialize=["count"])
