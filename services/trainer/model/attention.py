"""Attention over packed sequences: tokens see only their own document or image. Never a mask of T x T.

Shapes: T tokens of all documents, H heads, D head size, N documents of one length L.

Registered with transformers under `PACKED_ATTENTION`. The name holds the word "flash" because transformers' vision
towers then hand over the packed tensors whole with `cu_seq_lens_q`, instead of one call an image.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

PACKED_ATTENTION = "fovea_packed_flash"

# Without the flag torch 2.11 takes grouped queries as they are; later versions want to be told.
_GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


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
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [1, H, T, D]; `key` and `value` may have fewer heads.
        cu_seq_lens_q: int32 [documents + 1], bounds of the documents.
        is_causal: Falls back to the module's own.

    Returns:
        [1, T, H, D]. Raises ValueError without bounds: attention over everything would leak between documents.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("packed attention needs cu_seq_lens_q and max_length_q")
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, scaling, cu_seq_lens_q, max_length_q, causal), None
    return _grouped(query, key, value, scaling, tuple(cu_seq_lens_q.tolist()), causal), None


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, bounds: tuple[int, ...], causal: bool
) -> Tensor:
    """One batched call a length: exact, and without padding."""
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    grouping = group_by_length(bounds)
    outputs = []
    for group in grouping.groups:
        q_NHLD, k_NHLD, v_NHLD = (_take(tensor, group) for tensor in (query, key, value))
        out_NHLD = nn.functional.scaled_dot_product_attention(q_NHLD, k_NHLD, v_NHLD, is_causal=causal, scale=scaling)
        outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    out_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if grouping.restore is not None:
        out_THD = out_THD.index_select(0, grouping.restore.to(out_THD.device))
    return out_THD.unsqueeze(0)


def _take(packed_1HTD: Tensor, group: LengthGroup) -> Tensor:
    heads_HTD = packed_1HTD.squeeze(0)
    if group.index is None:
        assert group.start is not None
        picked = heads_HTD.narrow(1, group.start, group.count * group.length)
    else:
        picked = heads_HTD.index_select(1, group.index.to(heads_HTD.device))
    return picked.reshape(picked.shape[0], group.count, group.length, -1).transpose(0, 1)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, bounds: Tensor, longest: int, causal: bool
) -> Tensor:
    """torch's variable-length flash attention."""
    q_THD, k_THD, v_THD = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    window = (-1, 0) if causal else (-1, -1)
    out_THD = varlen_attn(
        q_THD, k_THD, v_THD, bounds, bounds, longest, longest, scale=scaling, window_size=window, **_GROUPED
    )
    assert isinstance(out_THD, Tensor)
    return out_THD.unsqueeze(0)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
