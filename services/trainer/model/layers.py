"""What takes the place of parts of Hugging Face's layers: attention over packed sequences, fused pointwise functions.

Tokens see only their own document or image, and there is never a mask of T x T. The pointwise parts of a language layer
are one kernel each on a GPU; left to themselves they are some fifty passes over memory per layer, as much time as the
matrix products. Their formulas are the Hugging Face modules' own.

Shapes: T tokens of all documents, H heads, D head size, N documents of one length L, I intermediate size.

Attention is registered with transformers under `PACKED_ATTENTION`. The name holds the word "flash" because
transformers' vision towers then hand over the packed tensors whole with `cu_seq_lens_q`, instead of one call per image.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, wraps
from inspect import signature
from itertools import pairwise
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from services.trainer.model.lora_linear import shared_products

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


Result = TypeVar("Result")


def fused(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a pure function of tensors, the first of which says where it runs. Any sizes share one kernel."""
    # Adapters and full parameters, with gradients and without, are kernels of their own; above the limit none is made.
    torch._dynamo.config.recompile_limit = 32
    # Rounding between steps stays as written: the sampler rounds there too, and agrees better for it.
    compiled: Any = torch.compile(function, dynamic=True, options={"emulate_precision_casts": True})

    @wraps(function)
    def run(first: Tensor, *rest: Any) -> Result:
        result: Result = (compiled if first.is_cuda else function)(first, *rest)
        return result

    return run


def fuse_layers(layers: Iterable[Any]) -> None:
    """Has the language layers of a Qwen model compute their pointwise parts fused. Numbers stay but for rounding."""
    for layer in layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = MethodType(_norm, norm)
        layer.mlp.forward = MethodType(_mlp, layer.mlp)
        if hasattr(layer.self_attn, "q_norm"):
            layer.self_attn.forward = MethodType(_attention, layer.self_attn)


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _mlp(mlp: Any, hidden: Tensor) -> Tensor:
    product: Tensor = mlp.down_proj(swiglu(*shared_products(hidden, mlp.gate_proj, mlp.up_proj)))
    return product


def _attention(
    attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **options: Any
) -> tuple[Tensor, None]:
    rows_1T = hidden_states.shape[:-1]
    heads = (*rows_1T, -1, attention.head_dim)
    cos_1TD, sin_1TD = position_embeddings
    found = shared_products(hidden_states, attention.q_proj, attention.k_proj, attention.v_proj)
    query_1THD, key_1THD, value_1THD = (product.view(heads) for product in found)
    query_1THD, key_1THD = (
        norm_and_rotate(product_1THD, norm.weight, norm.variance_epsilon, cos_1TD, sin_1TD)
        for product_1THD, norm in ((query_1THD, attention.q_norm), (key_1THD, attention.k_norm))
    )
    out_1THD, _ = packed_attention(
        attention,
        query_1THD.transpose(1, 2),
        key_1THD.transpose(1, 2),
        value_1THD.transpose(1, 2),
        scaling=attention.scaling,
        **options,
    )
    return attention.o_proj(out_1THD.reshape(*rows_1T, -1)), None


@fused
def swiglu(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020)."""
    return functional.silu(gate_TI) * up_TI


@fused
def norm_and_rotate(heads_THD: Tensor, weight_D: Tensor, epsilon: float, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """RMSNorm over each head, then rotary position embedding of its two halves (Su et al., 2021)."""
    values_THD = heads_THD.float()
    values_THD = values_THD * torch.rsqrt(values_THD.square().mean(-1, keepdim=True) + epsilon)
    normed_THD = weight_D * values_THD.to(heads_THD.dtype)
    first, second = normed_THD.chunk(2, dim=-1)
    turned_THD = torch.cat((-second, first), dim=-1)
    return normed_THD * cos_TD.unsqueeze(-2) + turned_THD * sin_TD.unsqueeze(-2)
