"""Times the kernels of adapters on a GPU, for `benchmarks.many_adapters --kernels`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Layer = Mapping[str, tuple[int, tuple[int, ...]]]
Kernel = Callable[..., None]


def ways(vllm_shrink: Any, vllm_expand: Any) -> Iterator[tuple[str, Kernel]]:
    """Yields a name, and a function with the arguments of `lora_kernels.add_products`."""
    try:
        from fovea_sampler import lora_kernels

        yield "fovea", lora_kernels.add_products
    except ImportError:
        print("this checkout has no kernels of its own")

    def add(x: Any, a: Any, b: Any, y: Any, tokens: Any, counts: Any, starts: Any, slots: Any, *rest: Any) -> None:
        reduced = torch.empty((len(a), x.shape[0], a[0].shape[-2]), dtype=torch.float32, device=x.device)
        most = torch.tensor([len(slots)], dtype=torch.int32)
        vllm_shrink(x, a, reduced, tokens, tokens, counts, starts, slots, rest[0], most, 1.0)
        vllm_expand(reduced, b, y, tokens, tokens, counts, starts, slots, rest[0], most, 0, True)

    yield "vllm", add


def microseconds(layer: Layer, slots: int, width: int, rows: int, active: int, rank: int, add: Kernel) -> float:
    """Returns the microseconds of all projections of a layer, in a CUDA graph, with caches that other layers flush.

    Args:
        layer: Input width and output widths of each projection.
        slots: The slots for adapters.
        width: The ranks of a slot.
        rows: The tokens of the step.
        active: The adapters of the step, which the tokens use in turns.
        rank: The rank of each adapter.
        add: The kernels.
    """
    device = torch.device("cuda:0")
    calls = []
    step = step_of(rows, active, slots, device)
    firsts = torch.arange(slots, dtype=torch.int32, device=device) * width
    ranks, widths = (torch.full((slots,), size, dtype=torch.int32, device=device) for size in (rank, width))
    for input_width, sizes in layer.values():
        stacks = [
            [torch.randn(slots, 1, *size, device=device, dtype=torch.bfloat16) for size in shapes]
            for shapes in ([(width, input_width) for _ in sizes], [(size, width) for size in sizes])
        ]
        x = torch.randn(rows, input_width, device=device, dtype=torch.bfloat16)
        y = torch.zeros(rows, sum(sizes), device=device, dtype=torch.bfloat16)
        calls.append((x, *stacks, y))

    def run() -> None:
        for x, a, b, y in calls:
            add(x, a, b, y, *step, firsts, ranks, widths)

    return graph_microseconds(run)


def step_of(rows: int, active: int, slots: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns the arguments of `lora_kernels` that describe the rows of a step."""
    mapping = torch.arange(rows, device=device) % active
    ids, counts = torch.unique(mapping, sorted=True, return_counts=True)
    tables = [torch.zeros(slots + 1, dtype=torch.int32, device=device) for _ in range(2)]
    starts = torch.zeros(slots + 2, dtype=torch.int32, device=device)
    tables[0][:active] = counts
    starts[1 : 1 + active] = torch.cumsum(counts, 0)
    tables[1].fill_(-1)[:active] = ids
    tokens = torch.sort(mapping, stable=True)[1].int()
    return tokens, tables[0], starts, tables[1], torch.tensor([False]), torch.tensor([active], dtype=torch.int32)


def graph_microseconds(run: Callable[[], None], repeats: int = 30) -> float:
    """Returns the microseconds of one replay of a CUDA graph of `run`."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    event: Any = torch.cuda.Event
    begun, ended = event(enable_timing=True), event(enable_timing=True)
    graph.replay()
    begun.record()
    for _ in range(repeats):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return float(1000 * begun.elapsed_time(ended) / repeats)
