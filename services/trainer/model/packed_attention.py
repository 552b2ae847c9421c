"""Attention over packed sequences: tokens see only their own document or image.

Which kernel computes it (`kernel_for`): on a CPU, and in float32 on a GPU, torch's attention once for each length of
documents; on a GPU in 16 bits variable-length flash attention, and flex attention for what that cannot do: images whose
tokens see each other both ways, capped scores, sinks, heads of more than 256 channels. Windows are in all three.

Shapes: T tokens of all documents, H heads, D head size, N documents of one length L.

It is registered with transformers under `PACKED_ATTENTION`. The name holds the word "flash" because transformers'
vision towers then hand over the packed tensors whole with `cu_seq_lens_q`, instead of one call per image.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

PACKED_ATTENTION = "fovea_packed_flash"

HARMLESS = {
    "cu_seq_lens_k": "documents attend to themselves: the same as of the queries",
    "max_length_k": "likewise",
    "position_ids": "the rotary embedding has been applied",
    "seq_idx": "the number of each token's document, which the bounds say",
    "use_cache": "nothing is cached in training",
    "past_key_values": "likewise",
    "output_attentions": "no weights are returned, whatever is asked",
}
"""Keywords of transformers' models that change nothing here, and why."""

# Without the flag torch 2.11 takes grouped queries as they are; later versions want to be told.
_GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


_MOST_FLASH_CHANNELS = 256
"""Of a head: flash attention has no kernel for more."""

_SMALL_BLOCKS: Any = {
    **dict.fromkeys(("fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 32),
    **{"fwd_BLOCK_M": 64, "num_stages": 1, "num_warps": 8},
}
"""Flex attention's own are too large for the shared memory of an H100 with heads of 512 channels."""


class Kernel(StrEnum):
    """What computes attention."""

    GROUPED = "grouped"
    VARLEN = "varlen"
    FLEX = "flex"


class Packing:
    """The documents of one micro-batch and its images that see themselves whole; masks are made once, for all layers.

    Args:
        bounds: int32 [documents + 1].
        token_count: T.
        blocks_T: int64, the block of each token, whose members see also those after them; -1 for a token of none. None
            if there are no blocks.
        only_windows: Whether they do so only in layers with a window (Gemma 4).
    """

    def __init__(
        self, bounds: Tensor, token_count: int, blocks_T: Tensor | None = None, only_windows: bool = False
    ) -> None:
        self.bounds = bounds
        self.token_count = token_count
        self.blocks_T = blocks_T
        self._only_windows = only_windows
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._block_masks: dict[tuple[bool, int | None], BlockMask] = {}

    @cached_property
    def grouping(self) -> "Grouping":
        """The documents by length. Has the host wait for the GPU."""
        return group_by_length(tuple(self.bounds.tolist()))

    def has_blocks(self, window: int | None) -> bool:
        """Whether blocks count in layers of this window."""
        return self.blocks_T is not None and not (self._only_windows and window is None)

    def mask(self, group: "LengthGroup", window: int | None) -> Tensor | None:
        """bool [N, 1, L, L] or [L, L], what causal documents of one length see; None for all that is causal."""
        key = (group.length, window)
        if key not in self._masks:
            self._masks[key] = self._mask(group, window)
        return self._masks[key]

    def _mask(self, group: "LengthGroup", window: int | None) -> Tensor | None:
        length = group.length
        is_cut = window is not None and length > window
        blocks_NL = None
        if self.blocks_T is not None and self.has_blocks(window):
            found_NL = _take(self.blocks_T[None, None, :, None], group)[:, 0, :, 0]
            blocks_NL = found_NL if bool((found_NL >= 0).any()) else None
        if blocks_NL is None and not is_cut:
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=self.bounds.device).tril()
        if blocks_NL is not None:
            is_same_NLL = (blocks_NL[:, :, None] == blocks_NL[:, None, :]) & (blocks_NL[:, :, None] >= 0)
            seen = (seen | is_same_NLL)[:, None]
        return seen if window is None else seen.triu(1 - window)

    def block_mask(self, causal: bool, window: int | None) -> BlockMask:
        """The same of all documents, for flex attention."""
        key = (causal, window)
        if key not in self._block_masks:
            self._block_masks[key] = self._block_mask(causal, window)
        return self._block_masks[key]

    def _block_mask(self, causal: bool, window: int | None) -> BlockMask:
        blocks_T, count = self.blocks_T if self.has_blocks(window) else None, self.token_count
        documents_T = torch.searchsorted(self.bounds[1:], torch.arange(count, device=self.bounds.device), right=True)

        def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (query >= key) if causal else (query == query)
            if blocks_T is not None:
                seen = seen | ((blocks_T[query] == blocks_T[key]) & (blocks_T[query] >= 0))
            if window is not None:
                seen = seen & (query - key < window)
            return seen & (documents_T[query] == documents_T[key])

        device = self.bounds.device
        # Compiled it never holds T x T.
        return create_block_mask(sees, None, None, count, count, device=device, _compile=device.type == "cuda")


@dataclass(frozen=True)
class Scores:
    """How the scores of a layer come to be, besides q k'.

    Args:
        scaling: Their factor; None for 1 / sqrt(D).
        causal: Whether tokens see only themselves and those before them, but for blocks.
        window: The most tokens back that a token sees, itself included; None for all of its document.
        softcap: c of c tanh(score / c); None for no cap.
        sinks_H: A further score for each head that takes weight and gives no value; None for none.
    """

    scaling: float | None
    causal: bool
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


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


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [1, H, T, D]; `key` and `value` may have fewer heads.
        attention_mask: Must be None: the bounds say what is seen.
        cu_seq_lens_q: int32 [documents + 1], bounds of the documents.
        is_causal: Falls back to the module's own.
        dropout: Must be 0.
        sliding_window: As `Scores.window`; of causal attention only.
        softcap: As `Scores.softcap`.
        s_aux: [H], as `Scores.sinks_H`.
        packing: Of the same bounds; needed where images see themselves whole, and to make masks once for all layers.

    Returns:
        [1, T, H, D]. Raises ValueError without bounds, since attention over everything would leak between documents,
        and naming any keyword that it would have to ignore.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("packed attention needs cu_seq_lens_q and max_length_q")
    if refused := [name for name in others if name not in HARMLESS]:
        raise ValueError(f"packed attention does not know {', '.join(refused)}, which {type(module).__name__} gives")
    if attention_mask is not None or dropout:
        raise ValueError(f"packed attention takes no mask and no dropout, which {type(module).__name__} gives")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if sliding_window is not None and not causal:
        raise ValueError(f"packed attention knows causal windows only, {type(module).__name__} has another")
    scores = Scores(scaling, causal, sliding_window, softcap, s_aux)
    packing = packing or Packing(cu_seq_lens_q, query.shape[2])
    match kernel_for(query, scores, packing):
        case Kernel.VARLEN:
            return _varlen(query, key, value, scores, cu_seq_lens_q, max_length_q), None
        case Kernel.FLEX:
            return flex(query, key, value, scores, packing), None
        case _:
            return _grouped(query, key, value, scores, packing), None


def kernel_for(query: Tensor, scores: Scores, packing: Packing) -> Kernel:
    """What computes a layer's attention; see above."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return Kernel.GROUPED
    is_plain = scores.softcap is None and scores.sinks_H is None and not packing.has_blocks(scores.window)
    return Kernel.VARLEN if is_plain and query.shape[-1] <= _MOST_FLASH_CHANNELS else Kernel.FLEX


def _grouped(query: Tensor, key: Tensor, value: Tensor, scores: Scores, packing: Packing) -> Tensor:
    """One batched call a length: exact, and without padding."""
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    grouping = packing.grouping
    outputs = []
    for group in grouping.groups:
        q_NHLD, k_NHLD, v_NHLD = (_take(tensor, group) for tensor in (query, key, value))
        mask = packing.mask(group, scores.window) if scores.causal else None
        out_NHLD = _attend(q_NHLD, k_NHLD, v_NHLD, scores, mask)
        outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    out_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if grouping.restore is not None:
        out_THD = out_THD.index_select(0, grouping.restore.to(out_THD.device))
    return out_THD.unsqueeze(0)


def _attend(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, scores: Scores, mask: Tensor | None) -> Tensor:
    """[N, H, L, D] of documents of one length, each by itself, with a mask as `Packing.mask` makes it."""
    if scores.softcap is None and scores.sinks_H is None:
        is_causal = scores.causal and mask is None
        return nn.functional.scaled_dot_product_attention(
            q_NHLD, k_NHLD, v_NHLD, mask, is_causal=is_causal, scale=scores.scaling
        )
    if mask is None:
        whole = q_NHLD.new_ones(q_NHLD.shape[2], q_NHLD.shape[2], dtype=torch.bool)
        mask = whole.tril() if scores.causal else whole
    return _attend_by_steps(q_NHLD, k_NHLD, v_NHLD, mask, scores)


def _attend_by_steps(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """What torch has no kernel for: capped scores (Gemma 2, 2024) and sinks (gpt-oss, 2025).

    Args:
        seen: bool [L, L], or [N, 1, L, L] where documents differ.
    """
    scaling = q_NHLD.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    found_NHLL = (q_NHLD @ k_NHLD.transpose(-1, -2)).float() * scaling
    if scores.softcap is not None:
        found_NHLL = scores.softcap * torch.tanh(found_NHLL / scores.softcap)
    found_NHLL = found_NHLL.masked_fill(~seen, float("-inf"))
    total_NHL1 = torch.logsumexp(found_NHLL, dim=-1, keepdim=True)
    if scores.sinks_H is not None:
        total_NHL1 = torch.logaddexp(total_NHL1, scores.sinks_H.float()[:, None, None])
    return torch.exp(found_NHLL - total_NHL1).to(v_NHLD.dtype) @ v_NHLD


def _take(packed_1HTD: Tensor, group: LengthGroup) -> Tensor:
    heads_HTD = packed_1HTD.squeeze(0)
    if group.index is None:
        assert group.start is not None
        picked = heads_HTD.narrow(1, group.start, group.count * group.length)
    else:
        picked = heads_HTD.index_select(1, group.index.to(heads_HTD.device))
    return picked.reshape(picked.shape[0], group.count, group.length, -1).transpose(0, 1)


def _varlen(query: Tensor, key: Tensor, value: Tensor, scores: Scores, bounds: Tensor, longest: int) -> Tensor:
    """torch's variable-length flash attention."""
    q_THD, k_THD, v_THD = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    # How many tokens are seen on either side; -1 for all.
    window = (-1 if scores.window is None else scores.window - 1, 0) if scores.causal else (-1, -1)
    out_THD = varlen_attn(
        q_THD, k_THD, v_THD, bounds, bounds, longest, longest, scale=scores.scaling, window_size=window, **_GROUPED
    )
    assert isinstance(out_THD, Tensor)
    return out_THD.unsqueeze(0)


@cache
def _compiled_flex() -> Any:  # not before a GPU asks: the compiler takes a second to import
    # A cap that is an argument of the kernel does not compile (torch 2.11).
    torch._dynamo.config.specialize_float = True
    return torch.compile(flex_attention, dynamic=True)


def flex(query: Tensor, key: Tensor, value: Tensor, scores: Scores, packing: Packing) -> Tensor:
    """torch's flex attention, [1, T, H, D]: one kernel for all documents, compiled on a GPU."""
    softcap, sinks_H = scores.softcap, scores.sinks_H
    attend = _compiled_flex() if query.is_cuda else flex_attention
    is_large = query.is_cuda and query.shape[-1] > _MOST_FLASH_CHANNELS
    out_1HTD, found = attend(
        query,
        key,
        value,
        score_mod=softcap and (lambda score, *_: softcap * torch.tanh(score / softcap)),
        block_mask=packing.block_mask(scores.causal, scores.window),
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=_SMALL_BLOCKS if is_large else None,
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is not None:
        # A sink is one more term of the sum that the weights are divided by.
        share_1HT1 = torch.sigmoid(found.lse - sinks_H.float()[:, None]).unsqueeze(-1)
        out_1HTD = out_1HTD * share_1HT1.to(out_1HTD.dtype)
    out_1THD: Tensor = out_1HTD.transpose(1, 2)
    return out_1THD


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
