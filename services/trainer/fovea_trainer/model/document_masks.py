"""Attention masks for packed documents.

A token sees itself and the earlier tokens of its document, within a window if the layer has one. In some families the
tokens of an image also see all of that image. In Llama 4, most layers cut documents into chunks. In each case the
visible tokens form one range.

Shapes: T tokens of all documents, N documents of one length L, B blocks of tokens, R tokens of a block.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

_MASK_BLOCK = 128
"""Edge length of a mask block in tokens. Flex attention skips blocks that are fully masked, and applies no mask in
blocks that are fully visible.
"""


@dataclass(frozen=True)
class LengthGroup:
    """All documents of one length.

    Args:
        length: Tokens of each document.
        start: Position of the first token if the documents are adjacent, else None.
        count: Number of documents.
        index: int64 [count * length], positions of their tokens; None if they are adjacent.
    """

    length: int
    start: int | None
    count: int
    index: Tensor | None


@dataclass(frozen=True)
class Grouping:
    """Documents grouped by length.

    Args:
        groups: The groups.
        restore: int64 [T], the row of each packed token in the concatenated outputs of all groups. None if these are
            already in packed order.
    """

    groups: tuple[LengthGroup, ...]
    restore: Tensor | None


@lru_cache(maxsize=256)
def group_by_length(bounds: tuple[int, ...]) -> Grouping:
    """Groups the documents of a micro-batch by length.

    Args:
        bounds: 0, the end of the first document, ..., T.
    """
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


@dataclass(frozen=True)
class DocumentRule:
    """The attention of a layer of Llama 4, as far as it depends on the positions of tokens in their document.

    Args:
        chunk_size: Tokens see only those of their own chunk of so many tokens; None for no chunks.
        floor_scale: Number of tokens after which the scores of a query grow; None if they never do.
        scale: Strength of that growth (Nakanishi, 2025).
    """

    chunk_size: int | None
    floor_scale: int | None
    scale: float

    def applied(self, query: Tensor, packing: "Packing", longest: int) -> tuple[Tensor, "Packing", int]:
        """Returns the arguments of plain attention that has the same result.

        Args:
            query: [1, H, T, D].
            packing: The documents.
            longest: Length of the longest document.

        Returns:
            The queries, multiplied as the positions of their tokens demand; the chunks; and the longest one's length.
        """
        if self.floor_scale is not None:
            steps_T = torch.floor((packing.places.float() + 1.0) / self.floor_scale)
            query = (query * (torch.log1p(steps_T) * self.scale + 1.0)[:, None]).to(query.dtype)
        if self.chunk_size is None:
            return query, packing, longest
        return query, packing.chunks(self.chunk_size), min(longest, self.chunk_size)


def use_document_rules(decoder: nn.Module) -> None:
    """Gives the layers of Llama 4 their rules. Its modules would count positions from the start of a micro-batch."""
    for part in filter(lambda part: isinstance(part, Llama4TextAttention), decoder.modules()):
        attention: Any = part
        is_tuned = attention.attn_temperature_tuning and not attention.use_rope
        chunk_size = attention.config.attention_chunk_size if attention.use_rope else None
        floor_scale = attention.floor_scale if is_tuned else None
        attention.document_rule = DocumentRule(chunk_size, floor_scale, attention.attn_scale)
        attention.attn_temperature_tuning = False


class Packing:
    """The documents of one micro-batch, and its images if their tokens see each other. All layers share the masks.

    Args:
        bounds: int32 [documents + 1].
        token_count: T.
        blocks_T: int64, the block of each token, or -1 for a token outside blocks. Tokens of a block also see later
            tokens of that block. Each block is contiguous. None if there are no blocks.
        only_windows: True if blocks apply only in layers with a sliding window (Gemma 4).
    """

    def __init__(
        self, bounds: Tensor, token_count: int, blocks_T: Tensor | None = None, only_windows: bool = False
    ) -> None:
        self.bounds = bounds
        self.token_count = token_count
        self.blocks_T = blocks_T
        self._only_windows = only_windows
        self._seen: dict[tuple[bool, int | None], tuple[Tensor, Tensor]] = {}
        self._chunked: dict[int, Packing] = {}
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._block_masks: dict[tuple[bool, int | None], BlockMask] = {}

    @cached_property
    def grouping(self) -> Grouping:
        """The documents grouped by length. Reading the bounds makes the host wait for the GPU."""
        return group_by_length(tuple(self.bounds.tolist()))

    @cached_property
    def places(self) -> Tensor:
        """The position of each token in its document, int64 [T]."""
        return torch.arange(self.token_count, device=self.bounds.device) - self._bounds_of(True, None)[0]

    def chunks(self, size: int) -> "Packing":
        """Returns these documents, each cut at every multiple of `size` of its own tokens.

        The bounds have as many entries as there may be chunks, so that the host need not wait for the GPU. The last
        ones may be empty documents.
        """
        if size not in self._chunked:
            index_T = torch.arange(self.token_count, device=self.bounds.device)
            starts_T = torch.where(self.places % size == 0, index_T, self.token_count).sort().values
            most = len(self.bounds) - 1 + self.token_count // size
            bounds = functional.pad(starts_T[:most], (0, 1), value=self.token_count)
            self._chunked[size] = Packing(bounds.to(self.bounds.dtype), self.token_count)
        return self._chunked[size]

    def has_blocks(self, window: int | None) -> bool:
        """Returns True if blocks apply in layers with this window."""
        return self._blocks(window) is not None

    def _blocks(self, window: int | None) -> Tensor | None:
        return None if self._only_windows and window is None else self.blocks_T

    def mask(self, group: LengthGroup, window: int | None) -> Tensor | None:
        """Returns the mask of causal attention for the documents of one length.

        Returns:
            bool [N, 1, L, L], or [1, 1, L, L] if all N have the same mask, True where a query (row) sees a key
            (column). None if plain causal attention is correct.
        """
        key = (group.length, window)
        if key not in self._masks:
            self._masks[key] = self._mask(group, window)
        return self._masks[key]

    def _mask(self, group: LengthGroup, window: int | None) -> Tensor | None:
        is_cut = window is not None and group.length > window
        blocks_T = self._blocks(window)
        has_blocks = blocks_T is not None and bool((_select_values(blocks_T, group) >= 0).any())
        if not has_blocks and not is_cut:
            return None
        index_T = torch.arange(self.token_count, device=self.bounds.device)
        # Without blocks all documents of one length have the same mask, so one suffices.
        count = group.count if has_blocks else 1
        first_NL, last_NL, index_NL = (
            _select_values(bound_T, group)[:count] for bound_T in (*self._bounds_of(True, window), index_T)
        )
        keys_N1L = index_NL[:, None]
        return ((keys_N1L >= first_NL[..., None]) & (keys_N1L <= last_NL[..., None]))[:, None]

    def block_mask(self, causal: bool, window: int | None) -> BlockMask:
        """Returns the mask of all documents in flex attention's block-sparse form."""
        key = (causal, window)
        if key not in self._block_masks:
            self._block_masks[key] = _block_mask(*self._bounds_of(causal, window))
        return self._block_masks[key]

    def _bounds_of(self, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
        """Returns the first and the last token that each token sees, both int64 [T].

        A token sees all tokens between them.
        """
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
            # The end of a token's block is the first position, from the token onwards, at which the document or the
            # block ends. A running minimum from the back finds it for all tokens.
            is_last_T = (index_T == ends_T) | (blocks_T != blocks_T.roll(-1))
            block_ends_T = torch.where(is_last_T, index_T, self.token_count).flip(0).cummin(0).values.flip(0)
            last_T = torch.where(blocks_T >= 0, block_ends_T, last_T)
        if window is not None:
            first_T = torch.maximum(first_T, index_T - window + 1)
        return first_T, last_T


def contiguous_runs(index_M: Tensor, token_count: int) -> Tensor:
    """Numbers the contiguous runs of ascending positions. Returns int64 [T], with -1 for positions outside of runs."""
    gaps = torch.diff(index_M, prepend=index_M[:1]) > 1
    return torch.full((token_count,), -1, device=index_M.device).index_copy(0, index_M, gaps.cumsum(0))


def _block_mask(first_T: Tensor, last_T: Tensor) -> BlockMask:
    """Builds flex attention's mask from the visible range of each token.

    The mask function reads the ranges from tensors, so all layers and sizes share one compiled kernel.

    Args:
        first_T: int64, first visible token of each query.
        last_T: int64, last visible token of each query.
    """
    count = len(first_T)
    block_count = -(-count // _MASK_BLOCK)
    padding = (0, block_count * _MASK_BLOCK - count)
    starts_B = torch.arange(block_count, device=first_T.device) * _MASK_BLOCK
    ends_B = starts_B + _MASK_BLOCK - 1
    # Padding rows of the last block get an empty range.
    first_BR = functional.pad(first_T, padding, value=count).view(block_count, _MASK_BLOCK)
    last_BR = functional.pad(last_T, padding, value=-1).view(block_count, _MASK_BLOCK)
    first_B1, highest_first_B1 = first_BR.aminmax(dim=1, keepdim=True)
    lowest_last_B1, last_B1 = last_BR.aminmax(dim=1, keepdim=True)
    # A pair of blocks is visible if a query of the row block may see a key of the column block. It is fully visible if
    # every query sees every key; flex attention then skips the mask function.
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
    """Converts block marks to flex attention's format.

    Args:
        marked_BB: bool, marked column blocks of each row block.

    Returns:
        The number of marked blocks per row, int32 [1, 1, B], and their column indices first, int32 [1, 1, B, B].
    """
    order_BB = torch.argsort(marked_BB.int(), dim=1, descending=True, stable=True)
    return marked_BB.sum(dim=1, dtype=torch.int32)[None, None], order_BB.int()[None, None]


def _select_values(values_T: Tensor, group: LengthGroup) -> Tensor:
    """Returns the values of the tokens of one group, [N, L]."""
    return select(values_T[None, None, :, None], group)[:, 0, :, 0]


def select(packed_1HTD: Tensor, group: LengthGroup) -> Tensor:
    """Returns the documents of one length as [N, H, L, D]."""
    heads_HTD = packed_1HTD.squeeze(0)
    if group.index is None:
        assert group.start is not None
        picked = heads_HTD.narrow(1, group.start, group.count * group.length)
    else:
        picked = heads_HTD.index_select(1, group.index.to(heads_HTD.device))
    return picked.reshape(picked.shape[0], group.count, group.length, -1).transpose(0, 1)
