"""Attention over packed sequences: a token sees only its own document or image.

`kernel_for` chooses the implementation. On a CPU, and in float32 on a GPU, torch's attention is called once per
document length. In 16 bits on a GPU, variable-length flash attention is used where it can compute the scores. On a
Hopper GPU that is FlashAttention 4, if the package flash-attn-4 is installed, else torch's own FlashAttention 2. Flex
attention computes the rest: images with tokens that see each other both ways, capped scores, sinks, and heads of more
than 256 channels. All of them support sliding windows.

The function is registered with transformers as `PACKED_ATTENTION`. The name contains "flash" so that transformers'
vision towers pass the packed tensors with `cu_seq_lens_q`, instead of one call per image.

Shapes: T tokens of all documents, H heads, D head size, N documents of one length L.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from fovea_trainer.batches.datum_groups import Share
from fovea_trainer.model.document_masks import DocumentRule, Packing, select

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "fovea_packed_flash"

HARMLESS = {
    "cu_seq_lens_k": "documents attend to themselves, so the bounds of keys are those of queries",
    "max_length_k": "documents attend to themselves, so the longest keys are the longest queries",
    "position_ids": "the rotary embedding has already been applied",
    "seq_idx": "the document number of each token, which follows from the bounds",
    "use_cache": "nothing is cached in training",
    "past_key_values": "nothing is cached in training",
    "output_attentions": "attention weights are never returned",
}
"""Keyword arguments of transformers' models that have no effect here, and the reason."""

# torch 2.11 has no such flag and always accepts grouped queries. Later versions require the flag for them.
_GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


MAX_FLASH_CHANNELS = 256
"""The largest head size of the flash attention kernels, in channels."""

_FLASH_4_CHANNELS = (64, 128, 192, 256)
"""The head sizes for which FlashAttention 4 is used, in channels. Other sizes are wrong or not measured: with 72
channels, flash-attn-4 4.0.0b36 returns gradients of queries that are wrong by their whole size (H200).
"""
_HOPPER = 9
"""The compute capability of the GPUs on which FlashAttention 4 was measured: 1.6 to 1.9 times FlashAttention 2."""
_LEAST_LONGEST = 256
"""The least length to announce to FlashAttention 4. Below one tile, it would compile further kernels."""
_FLASH_4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"
"""Prefix of the variables that make FlashAttention 4 keep compiled kernels on disk."""

_SMALL_BLOCKS: Any = {
    **dict.fromkeys(("fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 32),
    **{"fwd_BLOCK_M": 64, "num_stages": 1, "num_warps": 8},
}
"""Smaller blocks for heads of 512 channels: flex attention's defaults exceed the shared memory of an H100."""


class Kernel(StrEnum):
    """An implementation of attention."""

    GROUPED = "attention per document length"
    VARLEN = "FlashAttention 2"
    FLASH_4 = "FlashAttention 4"
    FLEX = "flex attention"


@dataclass(frozen=True)
class Scores:
    """The computation of attention scores, besides q k'.

    Args:
        scaling: Factor of the scores; None for 1 / sqrt(D).
        causal: True if tokens see only themselves and earlier ones, apart from blocks.
        window: Number of tokens that a token sees, counting back from itself and including it; None for its whole
            document.
        softcap: c in c tanh(score / c); None for no cap.
        sinks_H: An additional score per head that receives weight but has no value; None for no sinks.
    """

    scaling: float | None
    causal: bool
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


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
    share: Share | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface.

    Args:
        query: [1, H, T, D]; `key` and `value` may have fewer heads.
        attention_mask: Must be None; the bounds define visibility.
        scaling: As `Scores.scaling`.
        cu_seq_lens_q: int32 [documents + 1], bounds of the documents.
        max_length_q: Length of the longest document.
        is_causal: None uses the attribute of the module.
        dropout: Must be 0.
        sliding_window: As `Scores.window`; only for causal attention.
        softcap: As `Scores.softcap`.
        s_aux: [H], as `Scores.sinks_H`.
        packing: The masks of the same bounds; required for images with tokens that see each other.
        share: This rank's part of the tokens, if a group of ranks computes them together.
        others: Keyword arguments of `HARMLESS`.

    Returns:
        [1, T, H, D] and None.

    Raises:
        ValueError: Bounds are missing, without which documents would see each other; or an argument is not supported.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("packed attention needs cu_seq_lens_q and max_length_q")
    _check_arguments(module, attention_mask, dropout, others)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if sliding_window is not None and not causal:
        raise ValueError(f"packed attention supports only causal windows; {type(module).__name__} has another kind")
    scores = Scores(scaling, causal, sliding_window, softcap, s_aux)
    rule: DocumentRule | None = getattr(module, "document_rule", None)
    if share is not None and (s_aux is not None or rule is not None):
        raise ValueError(f"ranks cannot share a datum of {type(module).__name__}, which has sinks or chunks")
    if rule is not None:
        packing = packing or Packing(cu_seq_lens_q, query.shape[2])
        query, packing, max_length_q = rule.applied(query, packing, max_length_q)
        cu_seq_lens_q = packing.bounds
    if share is None:
        return _attention(query, key, value, scores, cu_seq_lens_q, max_length_q, packing), None
    query, key, value = (share.heads(tensor) for tensor in (query, key, value))
    return share.tokens(_attention(query, key, value, scores, cu_seq_lens_q, max_length_q, packing)), None


def _check_arguments(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, others: Mapping[str, Any]
) -> None:
    if refused := [name for name in others if name not in HARMLESS]:
        raise ValueError(
            f"packed attention does not support {', '.join(refused)}, which {type(module).__name__} passes"
        )
    if attention_mask is not None or dropout:
        raise ValueError(f"packed attention supports no mask and no dropout, which {type(module).__name__} passes")


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, bounds: Tensor, longest: int, packing: Packing | None
) -> Tensor:
    packing, width = packing or Packing(bounds, query.shape[2]), value.shape[-1]
    if value.is_cuda and width < query.shape[-1]:  # DeepSeek-V3's values are narrower than its keys
        padded = functional.pad(value, (0, query.shape[-1] - width))
        return _attention(query, key, padded, scores, bounds, longest, packing)[..., :width]
    match kernel_for(query, scores, packing):
        case Kernel.FLASH_4:
            function, _ = flash_4()
            assert function is not None
            return varlen_4(function, query, key, value, scores, bounds, longest)
        case Kernel.VARLEN:
            return _varlen(query, key, value, scores, bounds, longest)
        case Kernel.FLEX:
            return flex(query, key, value, scores, packing)
        case _:
            return _grouped(query, key, value, scores, packing)


def kernel_for(query: Tensor, scores: Scores, packing: Packing) -> Kernel:
    """Returns the implementation for a layer; the module's docstring explains the choice."""
    kernel, _ = kernel_of(query.device, query.dtype)
    if kernel == Kernel.GROUPED:
        return kernel
    channels = query.shape[-1]
    is_plain = scores.softcap is None and scores.sinks_H is None and not packing.has_blocks(scores.window)
    if not is_plain or channels > MAX_FLASH_CHANNELS:
        return Kernel.FLEX
    return kernel if channels in _FLASH_4_CHANNELS else Kernel.VARLEN


def kernel_of(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, str]:
    """Returns the implementation for plain layers on a device, and the reason in words."""
    if device.type != "cuda":
        return Kernel.GROUPED, "there is no GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return Kernel.GROUPED, f"the model is in {str(dtype).removeprefix('torch.')}"
    function, reason = flash_4()
    return (Kernel.VARLEN if function is None else Kernel.FLASH_4), reason


@cache
def flash_4() -> tuple[Callable[..., Any] | None, str]:
    """Returns FlashAttention 4 for variable lengths, or None where it cannot run, and the reason in words."""
    if torch.cuda.get_device_capability()[0] != _HOPPER:
        return None, f"{torch.cuda.get_device_name()} is no Hopper GPU"
    try:
        found = version("flash-attn-4")
    except PackageNotFoundError:
        return None, "flash-attn-4 is not installed"
    _keep_compiled()
    try:
        from flash_attn.cute import flash_attn_varlen_func

        _rehearse(flash_attn_varlen_func)
    except Exception as error:  # any failure of its compiler, which has no common type of error
        logger.warning("flash-attn-4 %s does not work here, so training is slower", found, exc_info=True)
        return None, f"flash-attn-4 {found} failed: {error}".splitlines()[0]
    return flash_attn_varlen_func, f"flash-attn-4 {found} is installed"


def _keep_compiled() -> None:
    """Makes FlashAttention 4 keep compiled kernels on disk, since each takes seconds. Call it before the import."""
    folder = Path(os.environ.setdefault(f"{_FLASH_4_CACHE}_DIR", str(Path.home() / ".cache/fovea/flash-attn-4")))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("kernels of FlashAttention 4 are compiled at every start: %s", error)
        return
    os.environ.setdefault(f"{_FLASH_4_CACHE}_ENABLED", "1")


def _rehearse(function: Callable[..., Any]) -> None:
    """Computes a small attention and its gradients."""
    q_THD, k_THD, v_THD = (
        torch.zeros(_LEAST_LONGEST, heads, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for heads in (2, 1, 1)
    )
    bounds = torch.tensor([0, _LEAST_LONGEST], dtype=torch.int32, device="cuda")
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q_THD, k_THD, v_THD))
    with torch.enable_grad():
        out = varlen_4(function, query, key, value, Scores(None, True), bounds, _LEAST_LONGEST)
        torch.autograd.grad(out.sum(), (q_THD, k_THD, v_THD))
    torch.cuda.synchronize()


def _grouped(query: Tensor, key: Tensor, value: Tensor, scores: Scores, packing: Packing) -> Tensor:
    """Computes attention in one batched call per document length, without padding."""
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    grouping = packing.grouping
    outputs = []
    for group in grouping.groups:
        q_NHLD, k_NHLD, v_NHLD = (select(tensor, group) for tensor in (query, key, value))
        mask = packing.mask(group, scores.window) if scores.causal else None
        out_NHLD = _attend(q_NHLD, k_NHLD, v_NHLD, scores, mask)
        outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    out_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if grouping.restore is not None:
        out_THD = out_THD.index_select(0, grouping.restore.to(out_THD.device))
    return out_THD.unsqueeze(0)


def _attend(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, scores: Scores, mask: Tensor | None) -> Tensor:
    """Computes attention of documents of one length, [N, H, L, D].

    Args:
        q_NHLD: Queries.
        k_NHLD: Keys.
        v_NHLD: Values.
        scores: Computation of the scores.
        mask: As made by `Packing.mask`.
    """
    if scores.softcap is None and scores.sinks_H is None:
        is_causal = scores.causal and mask is None
        return functional.scaled_dot_product_attention(
            q_NHLD, k_NHLD, v_NHLD, mask, is_causal=is_causal, scale=scores.scaling
        )
    if mask is None:
        whole = q_NHLD.new_ones(q_NHLD.shape[2], q_NHLD.shape[2], dtype=torch.bool)
        mask = whole.tril() if scores.causal else whole
    return _attend_by_steps(q_NHLD, k_NHLD, v_NHLD, mask, scores)


def _attend_by_steps(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """Computes attention that torch has no kernel for: capped scores (Gemma 2, 2024) and sinks (gpt-oss, 2025).

    Args:
        q_NHLD: Queries.
        k_NHLD: Keys.
        v_NHLD: Values.
        seen: bool [L, L], or [N, 1, L, L] if documents differ. True where a query sees a key.
        scores: Computation of the scores.
    """
    scaling = q_NHLD.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    found_NHLL = (q_NHLD @ k_NHLD.transpose(-1, -2)).float() * scaling
    if scores.softcap is not None:
        found_NHLL = scores.softcap * torch.tanh(found_NHLL / scores.softcap)
    found_NHLL = found_NHLL.masked_fill(~seen, float("-inf"))
    total_NHL1 = torch.logsumexp(found_NHLL, dim=-1, keepdim=True)
    if scores.sinks_H is not None:
        # A sink adds one term to the denominator of the softmax.
        total_NHL1 = torch.logaddexp(total_NHL1, scores.sinks_H.float()[:, None, None])
    return torch.exp(found_NHLL - total_NHL1).to(v_NHLD.dtype) @ v_NHLD


def _varlen(query: Tensor, key: Tensor, value: Tensor, scores: Scores, bounds: Tensor, longest: int) -> Tensor:
    """Computes attention with torch's variable-length flash attention."""
    q_THD, k_THD, v_THD = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    # Numbers of visible tokens before and after each token; -1 for all.
    window = (-1 if scores.window is None else scores.window - 1, 0) if scores.causal else (-1, -1)
    out_THD = varlen_attn(
        q_THD, k_THD, v_THD, bounds, bounds, longest, longest, scale=scores.scaling, window_size=window, **_GROUPED
    )
    assert isinstance(out_THD, Tensor)
    return out_THD.unsqueeze(0)


def varlen_4(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    bounds: Tensor,
    longest: int,
) -> Tensor:
    """Computes attention with FlashAttention 4's function, [1, T, H, D]."""
    q_THD, k_THD, v_THD = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    longest = max(longest, _LEAST_LONGEST)
    out_THD: Tensor = function(
        q_THD,
        k_THD,
        v_THD,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scores.scaling,
        causal=scores.causal,
        # Numbers of visible tokens before and after each token; None for all.
        window_size=(None, None) if scores.window is None else (scores.window - 1, 0),
    )[0]
    return out_THD.unsqueeze(0)


@cache
def _compiled_flex() -> Any:  # only when a GPU needs it: importing the compiler takes a second
    # Without specialization the cap would be a kernel argument, and the kernel would not compile (torch 2.11).
    torch._dynamo.config.specialize_float = True
    return torch.compile(flex_attention, dynamic=True)


def flex(query: Tensor, key: Tensor, value: Tensor, scores: Scores, packing: Packing) -> Tensor:
    """Computes attention with torch's flex attention, [1, T, H, D]: one kernel for all documents, compiled on a GPU."""
    softcap, sinks_H = scores.softcap, scores.sinks_H
    attend = _compiled_flex() if query.is_cuda else flex_attention
    is_large = query.is_cuda and query.shape[-1] > MAX_FLASH_CHANNELS
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
        # Flex attention has no sinks. A sink adds exp(sink) to the denominator exp(lse), so scale the output by
        # exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
        share_1HT1 = torch.sigmoid(found.lse - sinks_H.float()[:, None]).unsqueeze(-1)
        out_1HTD = out_1HTD * share_1HT1.to(out_1HTD.dtype)
    out_1THD: Tensor = out_1HTD.transpose(1, 2)
    return out_1THD


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
