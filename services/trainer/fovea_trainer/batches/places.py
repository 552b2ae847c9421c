"""Places of small calls in passes that calls of several models share, and the sizes to which passes are padded."""

import re
from collections.abc import Hashable
from dataclasses import dataclass

_LEAST = 64
MOST_SLOTS = 16
_FILLED_TOKENS = 1024
"""A shared pass of up to this many tokens may have empty slots. It takes the same time with fewer tokens."""
_NARROW = 256
"""Calls of up to this many tokens share a pass with calls of half as many tokens, longer ones with calls of 7/8."""
_PLACE = re.compile(r"(\d+)x(\d+):(\d+)@(\d+)")


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
        """Reads a place as `str` writes it. Returns None if no pass of this trainer has it.

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
class Share:
    """The conditions under which a call may share a pass with calls of other models.

    Args:
        kind: Equal for calls that can share a pass: layout of the adapter, temperature, and with or without gradients.
        rows: The padded number of tokens of the call.
        most: The most calls of this size in one pass.
    """

    kind: Hashable
    rows: int
    most: int

    def takes(self, other: "Share") -> bool:
        """Returns True if `other` fits into a slot of the size of this call without much padding."""
        least = self.rows // 2 if self.rows <= _NARROW else self.rows * 7 // 8
        return self.kind == other.kind and least <= other.rows <= self.rows


def slot_count(calls: int, rows: int) -> int:
    """Returns the number of slots, a power of two, for a pass of at most `calls` calls; 1 if they should not share."""
    more = power_of_two(calls)
    return more if more == calls or more * rows <= _FILLED_TOKENS else more // 2


def padded_size(count: int) -> int:
    """Returns the smallest allowed size for `count` tokens. At most an eighth of it, or 63 tokens, is padding."""
    step = max(power_of_two(count) // 16, _LEAST)
    return -(-count // step) * step


def power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
