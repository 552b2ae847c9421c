"""Runs the kernels of adapters in Triton's interpreter and compares them with float64 products.

A separate program, because Triton reads TRITON_INTERPRET when it is imported. In float16, because the interpreter
multiplies bfloat16 bit patterns as integers.
"""

from typing import NamedTuple

from fovea.runtime.processes import UNUSED, importing

with importing(*UNUSED):
    import torch

    from fovea_sampler import lora_kernels

SLOT_RANKS = 64


class Case(NamedTuple):
    """Rows, the widths of a layer, and the type of its outputs."""

    rows: int
    inputs: int
    outputs: tuple[int, ...]
    out_dtype: torch.dtype


CASES = (
    Case(7, 200, (48, 16, 16), torch.float16),
    Case(20, 1300, (300,), torch.float16),
    Case(150, 200, (48, 48), torch.float32),
    Case(9, 130, (301,), torch.float32),
)
PLACES = ((0, 64, 64), (64, 16, 8), (80, 16, 16), (96, 32, 32), (128, 64, 40))
"""First rank, width and rank of the adapters in five slots of a memory of 192 ranks."""


def check(case: Case) -> None:
    """Compares both kernels for rows of all adapters and of none, in runs of three."""
    torch.manual_seed(0)
    units = 192 // SLOT_RANKS
    a = [torch.randn(units, 1, SLOT_RANKS, case.inputs).half() for _ in case.outputs]
    b = [torch.randn(units, 1, size, SLOT_RANKS).half() for size in case.outputs]
    x = torch.randn(case.rows, case.inputs).half() / case.inputs**0.5
    y = torch.randn(case.rows, sum(case.outputs)).to(case.out_dtype)
    slot_of = torch.arange(case.rows) // 3 % (len(PLACES) + 1) - 1
    expected = y.double()
    for row, slot in enumerate(slot_of.tolist()):
        if slot < 0:
            continue
        first, width, rank = PLACES[slot]
        products = []
        for factor, other in zip(a, b, strict=True):
            size = other.shape[-2]
            own_b = other.view(-1)[first * size :][: size * width].view(size, width)[:, :rank]
            products.append(
                own_b.double() @ (factor.view(-1, case.inputs)[first : first + rank].double() @ x[row].double())
            )
        expected[row] += torch.cat(products)
    firsts, widths, ranks = torch.tensor(PLACES, dtype=torch.int32).T.contiguous()
    step = step_of(slot_of)
    again = y.clone()
    lora_kernels.add_products(x, a, b, y, *step, firsts, ranks, widths)
    lora_kernels.add_products(x, a, b, again, *step, firsts, ranks, widths)
    assert torch.equal(y, again)
    # The kernels round the reduced rows to 16 bits, as the adapters do.
    assert (y.double() - expected).abs().max() < 0.02, (case, (y.double() - expected).abs().max())


def step_of(slot_of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the kernels' description of the rows of a step."""
    slots, counts = torch.unique(slot_of, sorted=True, return_counts=True)
    active = torch.full((len(PLACES) + 1,), -1, dtype=torch.int32)
    active[: len(slots)] = slots
    padded = torch.zeros(len(PLACES) + 1, dtype=torch.int32)
    padded[: len(slots)] = counts
    starts = torch.zeros(len(PLACES) + 2, dtype=torch.int32)
    starts[1 : 1 + len(slots)] = torch.cumsum(counts, 0)
    tokens = torch.sort(slot_of, stable=True)[1].int()
    return tokens, padded, starts, active, torch.tensor([False]), torch.tensor([len(slots)], dtype=torch.int32)


if __name__ == "__main__":
    for case in CASES:
        check(case)
        print("equal", case.rows)
