"""Assignment of datums to ranks and micro-batches. Every rank computes the same plan from sizes alone.

Pure functions. The plan has the same number of steps on every rank, because all ranks must join the collectives of a
step. A rank without a datum in a step computes a filler with a loss of zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DatumSize:
    """The computing cost of a datum.

    Args:
        token_count: Tokens after rendering, at least 1.
        patch_count: Vision patches of all images, 0 for text.
    """

    token_count: int
    patch_count: int


@dataclass(frozen=True)
class Step:
    """One micro-batch on every rank.

    Args:
        datums: For each rank the indices of its datums in packed order; empty if it has none.
        has_vision: True if any rank has an image; all ranks then run the vision tower.
    """

    datums: tuple[tuple[int, ...], ...]
    has_vision: bool


@dataclass(frozen=True)
class Plan:
    """All micro-batches of one call, in execution order.

    Args:
        steps: The micro-batches.
        efficiency: Number of tokens divided by the number if every rank were as full as the fullest in each step, in
            (0, 1].
    """

    steps: tuple[Step, ...]
    efficiency: float

    def datums_of(self, rank: int) -> list[int]:
        """Returns the indices of the datums of `rank`, in its order."""
        return [index for step in self.steps for index in step.datums[rank]]


def plan(sizes: Sequence[DatumSize], world_size: int, token_budget: int, patch_budget: int) -> Plan:
    """Distributes datums over ranks and splits each rank's share into micro-batches within the budgets.

    A datum above a budget gets a micro-batch of its own. Deterministic: all ranks compute the same plan.

    Args:
        sizes: Size of each datum.
        world_size: Number of ranks.
        token_budget: Maximum tokens per micro-batch.
        patch_budget: Maximum patches per micro-batch.
    """
    shares = _spread(sizes, world_size)
    per_rank = [_cut(share, sizes, token_budget, patch_budget) for share in shares]
    step_count = max(len(batches) for batches in per_rank)
    steps = []
    for index in range(step_count):
        datums = tuple(batches[index] if index < len(batches) else () for batches in per_rank)
        has_vision = any(sizes[datum].patch_count for batch in datums for datum in batch)
        steps.append(Step(datums, has_vision))
    return Plan(tuple(steps), _efficiency(steps, sizes, world_size))


def _spread(sizes: Sequence[DatumSize], world_size: int) -> list[list[int]]:
    """Assigns the largest datums first, each to the least loaded rank (Graham, 1969). Images come before text."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, 0)] * world_size
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i].patch_count, -sizes[i].token_count, i)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        load, count = loads[rank]
        loads[rank] = (load + sizes[index].token_count + sizes[index].patch_count, count + 1)
    return shares


def _cut(
    share: Sequence[int], sizes: Sequence[DatumSize], token_budget: int, patch_budget: int
) -> list[tuple[int, ...]]:
    """Packs first-fit in the order of `share`, largest first. Sorts each batch so that equal lengths are adjacent."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in share:
        size = sizes[index]
        fits = (
            i for i, (tokens, patches) in enumerate(room) if size.token_count <= tokens and size.patch_count <= patches
        )
        place = next(fits, len(batches))
        if place == len(batches):
            batches.append([])
            room.append((token_budget, patch_budget))
        batches[place].append(index)
        tokens, patches = room[place]
        room[place] = (tokens - size.token_count, patches - size.patch_count)
    return [tuple(sorted(batch, key=lambda i: (sizes[i].token_count, sizes[i].patch_count, i))) for batch in batches]


def _efficiency(steps: Sequence[Step], sizes: Sequence[DatumSize], world_size: int) -> float:
    used = capacity = 0
    for step in steps:
        tokens = [sum(sizes[datum].token_count for datum in batch) for batch in step.datums]
        used += sum(tokens)
        capacity += max(tokens) * world_size
    return used / capacity if capacity else 1.0
