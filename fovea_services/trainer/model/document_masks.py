"""What tokens of packed documents see: their document up to themselves, within a window, and their own image whole.

Each token sees all tokens between a first and a last one.

Shapes: T tokens of all documents, N documents of one length L, B blocks of tokens, R tokens of a block.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

_MASK_BLOCK = 128
"""Tokens on either side of what flex attention skips, or computes without looking at the mask."""


@dataclass(frozen=True)
class LengthGroup:
    """All documents of one length.

    Args:
        length: Tokens of each.
        start: First token if the documents stand side by side, else None.
        count: How many.
        index: int64 [count * length], positions of their tokens; None if they stand side by side.
    """

    length: int
    start: int | None
    count: int
    index: Tensor | None


@dataclass(frozen=True)
class Grouping:
    """Documents by length. `restore` is int64 [T], where each token's output stands, or None if in order already."""

    groups: tuple[LengthGroup, ...]
    restore: Tensor | None


@lru_cache(maxsize=256)
def group_by_length(bounds: tuple[int, ...]) -> Grouping:
    """Groups the documents that `bounds` (0, end of first, ..., T) delimits."""
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(bounds):
        if end > start:
            starts.setdefault(end - start, []).append(start)
    groups, order = [], []
    for length, members in starts.items():
        index = (torch.tensor(members)[:, None] + torch.arange(length)).flatten()
        side_by_side = members == list(range(members[0], members[0] + length * len(members), length))
        groups.append(
            LengthGroup(length, members[0] if side_by_side else None, len(members), None if side_by_side else index)
        )
        order.append(index)
    permutation = torch.cat(order)
    in_order = bool((permutation[1:] > permutation[:-1]).all())
    return Grouping(tuple(groups), None if in_order else torch.argsort(permutation))


class Packing:
    """The documents of one micro-batch and its images that see themselves whole; masks are made once, for all layers.

    Args:
        bounds: int32 [documents + 1].
        token_count: T.
        blocks_T: int64, the block of each token, whose members see also those after them; -1 for a token of none. No
            block has gaps. None if there are none.
        only_windows: Whether they do so only in layers with a window (Gemma 4).
    """

    def __init__(
        self, bounds: Tensor, token_count: int, blocks_T: Tensor | None = None, only_windows: bool = False
    ) -> None:
        self.bounds = bounds
        self.token_count = token_count
        self.blocks_T = blocks_T
        self._only_windows = only_windows
        self._seen: dict[tuple[bool, int | None], tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._block_masks: dict[tuple[bool, int | None], BlockMask] = {}

    @cached_property
    def grouping(self) -> Grouping:
        """The documents by length. Has the host wait for the GPU."""
        return group_by_length(tuple(self.bounds.tolist()))

    def has_blocks(self, window: int | None) -> bool:
        """Whether blocks count in layers of this window."""
        return self._blocks(window) is not None

    def _blocks(self, window: int | None) -> Tensor | None:
        return None if self._only_windows and window is None else self.blocks_T

    def mask(self, group: LengthGroup, window: int | None) -> Tensor | None:
        """bool [N, 1, L, L], or one for all N; what causal documents of one length see. None for all that is causal."""
        key = (group.length, window)
        if key not in self._masks:
            self._masks[key] = self._mask(group, window)
        return self._masks[key]

    def _mask(self, group: LengthGroup, window: int | None) -> Tensor | None:
        is_cut = window is not None and group.length > window
        blocks_T = self._blocks(window)
        has_blocks = blocks_T is not None and bool((_take_rows(blocks_T, group) >= 0).any())
        if not has_blocks and not is_cut:
            return None
        index_T = torch.arange(self.token_count, device=self.bounds.device)
        # Without blocks all documents of a length see the same.
        count = group.count if has_blocks else 1
        first_NL, last_NL, index_NL = (
            _take_rows(bound_T, group)[:count] for bound_T in (*self._bounds_of(True, window), index_T)
        )
        keys_N1L = index_NL[:, None]
        return ((keys_N1L >= first_NL[..., None]) & (keys_N1L <= last_NL[..., None]))[:, None]

    def block_mask(self, causal: bool, window: int | None) -> BlockMask:
        """The same of all documents, for flex attention."""
        key = (causal, window)
        if key not in self._block_masks:
            self._block_masks[key] = _block_mask(*self._bounds_of(causal, window))
        return self._block_masks[key]

    def _bounds_of(self, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
        """The first and the last token that each token sees, int64 [T] both: it sees all between them."""
        key = (causal, window)
        if key not in self._seen:
            self._seen[key] = self._find_bounds(causal, window)
        return self._seen[key]

    def _find_bounds(self, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
        index_T = torch.arange(self.token_count, device=self.bounds.device)
        documents_T = torch.searchsorted(self.bounds[1:], index_T, right=True)
        first_T, ends_T = self.bounds[documents_T].long(), self.bounds[documents_T + 1].long() - 1
        last_T = index_T if causal else ends_T
        if (blocks_T := self._blocks(window)) is not None:
            is_last_T = (index_T == ends_T) | (blocks_T != blocks_T.roll(-1))
            block_ends_T = torch.where(is_last_T, index_T, self.token_count).flip(0).cummin(0).values.flip(0)
            last_T = torch.where(blocks_T >= 0, block_ends_T, last_T)
        if window is not None:
            first_T = torch.maximum(first_T, index_T - window + 1)
        return first_T, last_T


def _block_mask(first_T: Tensor, last_T: Tensor) -> BlockMask:
    """For flex attention, which sees first and last as tensors: all layers and sizes share one compiled kernel."""
    count = len(first_T)
    block_count = -(-count // _MASK_BLOCK)
    padding = (0, block_count * _MASK_BLOCK - count)
    starts_B = torch.arange(block_count, device=first_T.device) * _MASK_BLOCK
    ends_B = starts_B + _MASK_BLOCK - 1
    # Rows that fill up the last block see nothing.
    first_BR = functional.pad(first_T, padding, value=count).view(block_count, _MASK_BLOCK)
    last_BR = functional.pad(last_T, padding, value=-1).view(block_count, _MASK_BLOCK)
    first_B1, highest_first_B1 = first_BR.aminmax(dim=1, keepdim=True)
    lowest_last_B1, last_B1 = last_BR.aminmax(dim=1, keepdim=True)
    is_seen_BB = (ends_B >= first_B1) & (starts_B <= last_B1)
    is_whole_BB = (starts_B >= highest_first_B1) & (ends_B <= lowest_last_B1)

    def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_T[query]) & (key <= last_T[query])

    return BlockMask.from_kv_blocks(
        *_ordered(is_seen_BB & ~is_whole_BB),
        *_ordered(is_whole_BB),
        BLOCK_SIZE=_MASK_BLOCK,
        mask_mod=sees,
        seq_lengths=(count, count),
    )


def _ordered(marked_BB: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are marked, int32 [1, 1, B], and which: their numbers come first, [1, 1, B, B]."""
    places_BB = torch.argsort(marked_BB.int(), dim=1, descending=True, stable=True)
    return marked_BB.sum(dim=1, dtype=torch.int32)[None, None], places_BB.int()[None, None]


def _take_rows(values_T: Tensor, group: LengthGroup) -> Tensor:
    """[N, L]."""
    return take(values_T[None, None, :, None], group)[:, 0, :, 0]


def take(packed_1HTD: Tensor, group: LengthGroup) -> Tensor:
    """The documents of one length, [N, H, L, D], of [1, H, T, D]."""
    heads_HTD = packed_1HTD.squeeze(0)
    if group.index is None:
        assert group.start is not None
        picked = heads_HTD.narrow(1, group.start, group.count * group.length)
    else:
        picked = heads_HTD.index_select(1, group.index.to(heads_HTD.device))
    return picked.reshape(picked.shape[0], group.count, group.length, -1).transpose(0, 1)
