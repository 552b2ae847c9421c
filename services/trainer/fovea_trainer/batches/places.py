"""Plans: the micro-batch that computes each datum, and places of small calls in passes that several models share.

Every rank computes the same plan from the sizes of all datums. Each rank computes one micro-batch per step of the plan,
because all ranks must join the collectives of a step. A rank without a datum in a step computes a filler.
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from fovea_trainer.batches.datum_decoding import DatumSize
from fovea_trainer.batches.datum_groups import group_sizes_of, long_steps

_LEAST = 64
MOST_SLOTS = 16
_FILLED_TOKENS = 1024
"""A shared pass of up to this many tokens may have empty slots, because they hardly add to its time."""
_NARROW = 256
"""A call of at most this many tokens takes calls of at least half its size into its pass; a longer one, of 7/8."""
_PLACE = re.compile("([0-9]{1,9})x([0-9]{1,9}):([0-9]{1,9})@([0-9]{1,9})")


@dataclass(frozen=True)
class Place:
    """One slot of a shared pass.

    Args:
        slots: The number of slots of the pass, 1 to 16.
        rows: P, the rows of each slot.
        slot: The slot.
        device_rank: The rank of the trainer that runs the pass.
    """

    slots: int
    rows: int
    slot: int
    device_rank: int

    def __str__(self) -> str:
        return f"{self.slots}x{self.rows}:{self.slot}@{self.device_rank}"

    @classmethod
    def parse(cls, given: str, most_tokens: int, ranks: int) -> "Place | None":
        """Reads the text that `str` makes of a place. Returns None if it is no place of this trainer.

        Args:
            given: The text.
            most_tokens: Most tokens of a shared pass.
            ranks: Number of ranks of this trainer.
        """
        found = _PLACE.fullmatch(given)
        place = cls(*map(int, found.groups())) if found else None
        if place is None or not (place.slot < place.slots <= MOST_SLOTS and place.slots * place.rows <= most_tokens):
            return None
        return place if place.rows == padded_size(max(place.rows, 1)) and place.device_rank < ranks else None


@dataclass(frozen=True)
class PassTerms:
    """The conditions under which a call may share a pass with calls of other models.

    Args:
        kind: Equal for calls that can share a pass: layout of the adapter, temperature, with or without gradients, and
            on a CPU the number of rows.
        rows: The padded number of tokens of the call.
        most: The most calls of this size that one pass can have.
    """

    kind: Hashable
    rows: int
    most: int

    def takes(self, other: "PassTerms") -> bool:
        """Returns True if `other` fits into a slot of this call's size without much padding."""
        least = self.rows // 2 if self.rows <= _NARROW else self.rows * 7 // 8
        return self.kind == other.kind and least <= other.rows <= self.rows


def slot_count(calls: int, rows: int) -> int:
    """Returns the number of slots for a pass of waiting calls, a power of two.

    It is less than the number of calls if too many slots would be empty otherwise. The rest then has another pass.

    Args:
        calls: Number of waiting calls.
        rows: P, the rows of each slot.
    """
    more = power_of_two(calls)
    return more if more == calls or more * rows <= _FILLED_TOKENS else more // 2


def padded_size(count: int) -> int:
    """Returns the smallest allowed size for `count` tokens. At most an eighth of it, or 63 tokens, is padding."""
    step = max(power_of_two(count) // 16, _LEAST)
    return -(-count // step) * step


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


@dataclass(frozen=True)
class Step:
    """One micro-batch on every rank.

    Args:
        datums: For each rank the indices of its datums in packed order; empty if it has none.
        has_vision: True if any rank has an image; all ranks then run the vision tower.
        ranks: Number of ranks that compute a datum together. If it is not 1, all ranks of a group have the same datum.
    """

    datums: tuple[tuple[int, ...], ...]
    has_vision: bool
    ranks: int = 1

    def tokens_of(self, sizes: Sequence[DatumSize], rank: int) -> int:
        """Returns the number of tokens that a rank computes."""
        return -(-sum(sizes[index].token_count for index in self.datums[rank]) // self.ranks)


@dataclass(frozen=True)
class Plan:
    """All micro-batches of one call, in execution order.

    Args:
        steps: The micro-batches.
        efficiency: The share of the capacity that the tokens use, in (0, 1]. The capacity of a step is the number of
            ranks times the tokens of its fullest rank.
    """

    steps: tuple[Step, ...]
    efficiency: float

    def datums_of(self, rank: int) -> list[int]:
        """Returns the indices of the datums of `rank`, in its order."""
        return [index for step in self.steps for index in step.datums[rank]]

    @property
    def shares_datums(self) -> bool:
        """True if ranks compute datums together."""
        return any(step.ranks > 1 for step in self.steps)


def plan(
    sizes: Sequence[DatumSize], world_size: int, token_budget: int, patch_budget: int, group_sizes: Sequence[int] = ()
) -> Plan:
    """Distributes datums over ranks and splits each rank's share into micro-batches within the budgets.

    A datum above the token budget is shared by a group of ranks, if there are any. Another datum above a budget gets a
    micro-batch of its own. The plan depends on the arguments alone, so all ranks compute the same one.

    Args:
        sizes: Size of each datum.
        world_size: Number of ranks.
        token_budget: Maximum tokens per micro-batch.
        patch_budget: Maximum patches per micro-batch.
        group_sizes: Numbers of ranks that can share a datum, as of `DatumGroups`.
    """
    groups = group_sizes_of(sizes, group_sizes, token_budget)
    alone = [index for index in range(len(sizes)) if index not in groups]
    steps = [Step(dealt, _has_vision(dealt, sizes), ranks) for ranks, dealt in long_steps(sizes, groups, world_size)]
    shares = _spread(alone, sizes, world_size)
    per_rank = [_cut(share, sizes, token_budget, patch_budget) for share in shares]
    step_count = max(len(batches) for batches in per_rank)
    for index in range(step_count):
        datums = tuple(batches[index] if index < len(batches) else () for batches in per_rank)
        steps.append(Step(datums, _has_vision(datums, sizes)))
    return Plan(tuple(steps), _efficiency(steps, sizes, world_size))


def _has_vision(dealt: Sequence[Sequence[int]], sizes: Sequence[DatumSize]) -> bool:
    return any(sizes[datum].patch_count for batch in dealt for datum in batch)


def _spread(datums: Sequence[int], sizes: Sequence[DatumSize], world_size: int) -> list[list[int]]:
    """Assigns each datum, the largest first, to the least loaded rank (Graham, 1969). Images come before text."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, 0)] * world_size
    for index in sorted(datums, key=lambda i: (-sizes[i].patch_count, -sizes[i].token_count, i)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        load, count = loads[rank]
        loads[rank] = (load + sizes[index].token_count + sizes[index].patch_count, count + 1)
    return shares


def _cut(
    share: Sequence[int], sizes: Sequence[DatumSize], token_budget: int, patch_budget: int
) -> list[tuple[int, ...]]:
    """Packs by first fit in the order of `share`, largest first. Sorts each batch: equal lengths are then adjacent."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in share:
        size = sizes[index]
        fits = (
            i for i, (tokens, patches) in enumerate(room) if size.token_count <= tokens and size.patch_count <= patches
        )
        entry = next(fits, len(batches))
        if entry == len(batches):
            batches.append([])
            room.append((token_budget, patch_budget))
        batches[entry].append(index)
        tokens, patches = room[entry]
        room[entry] = (tokens - size.token_count, patches - size.patch_count)
    return [packed_order(batch, sizes) for batch in batches]


def packed_order(datums: Iterable[int], sizes: Sequence[DatumSize]) -> tuple[int, ...]:
    """Returns the order of datums in a pass, shared or not. Sums over tokens have other bits in another order."""
    return tuple(sorted(datums, key=lambda i: (sizes[i].token_count, sizes[i].patch_count, i)))


def _efficiency(steps: Sequence[Step], sizes: Sequence[DatumSize], world_size: int) -> float:
    used = capacity = 0
    for step in steps:
        tokens = [step.tokens_of(sizes, rank) for rank in range(world_size)]
        used += sum(tokens)
        capacity += max(tokens) * world_size
    return used / capacity if capacity else 1.0
