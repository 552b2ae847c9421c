"""Layers with a recurrent state, on packed documents. The state is reset at the start of each document.

They are gated delta nets (Yang et al., 2024) as in Qwen3-Next and Qwen3.5, and the gated short convolutions of LFM2.
On a GPU, flash-linear-attention computes the delta rule if it is installed. Otherwise transformers' version does. It
ignores document bounds, so the documents are passed to it as separate rows. A short convolution is a few products,
fused on a GPU.

Shapes: T tokens of all documents, D channels, K taps of a convolution, H heads, N documents of L tokens.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

import logging
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from inspect import unwrap
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.utils.import_utils import is_flash_linear_attention_available

from fovea_trainer.model.fused_layers import fused
from fovea_trainer.model.packed_attention import HARMLESS

logger = logging.getLogger(__name__)

_CHUNK = 64
"""Chunk length of the delta rule in tokens. Documents are padded to a multiple of it."""

_SOUND_TRITON = Version("3.7.1")
"""The first Triton since 3.4 that compiles the backward pass of the delta rule correctly on Hopper GPUs
(flash-linear-attention #640).
"""

_HAS_KERNELS = (
    is_flash_linear_attention_available()
    and find_spec("triton") is not None
    and Version(version("triton")) >= _SOUND_TRITON
)


def pack(decoder: nn.Module) -> None:
    """Makes the stateful layers of a language model respect document bounds."""
    if (
        torch.cuda.is_available()
        and not _HAS_KERNELS
        and any(_FORWARDS.get(type(part)) is _gated_delta_net for part in decoder.modules())
    ):
        logger.warning("gated delta nets are slow without flash-linear-attention and Triton %s or newer", _SOUND_TRITON)
    for module in decoder.modules():
        if type(module) in _FORWARDS:
            module.forward = MethodType(_FORWARDS[type(module)], module)  # type: ignore[method-assign]


def retained_bytes(text: PretrainedConfig, dtype: torch.dtype) -> int:
    """Returns the bytes that a gated delta net retains per token for its backward pass.

    Without kernels these are 22 float32 tensors as wide as all heads, measured with documents longer than a chunk, plus
    a reserve of a quarter. With kernels these are 3.5 times the kernels' inputs and outputs. That factor was measured
    with Qwen3.5 9B on an H200: a peak of 72.0 GB with micro-batches of 4,096 tokens.
    """
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    if not _HAS_KERNELS:
        repeated_keys = text.linear_num_value_heads * text.linear_key_head_dim
        return int(14 * (repeated_keys + values) * torch.float32.itemsize)
    mixed = 3 * (2 * keys + values) + _CHUNK * text.linear_num_value_heads
    return int(3.5 * (mixed + 4 * values) * dtype.itemsize)


def _gated_delta_net(
    module: Any,
    hidden_states: Tensor,
    *,
    cu_seq_lens_q: Tensor,
    seq_idx: Tensor,
    **others: Any,
) -> Tensor:
    """Computes the forward pass of a module of `_FORWARDS` per document, [1, T, D].

    All steps are the module's own, except the two that mix tokens: the convolution and the delta rule.

    Args:
        module: The module.
        hidden_states: [1, T, D].
        cu_seq_lens_q: int32 [documents + 1], bounds of the documents.
        seq_idx: int32 [1, T], the document number of each token.
        others: Options of transformers' models that have no effect here.
    """
    _refuse_unknown(module, others)
    mixed_1TD, gate_1TD, steps_1TH, decay_steps_1TH = _projected(module, hidden_states)
    mixed_1TD = _convolve(mixed_1TD, module.conv1d.weight, module.conv1d.bias, seq_idx, True)
    query_1TD, key_1TD, value_1TD = torch.split(mixed_1TD, [module.key_dim, module.key_dim, module.value_dim], dim=2)
    rows_1T = mixed_1TD.shape[:2]
    query_1THD, key_1THD = (each.reshape(*rows_1T, -1, module.head_k_dim) for each in (query_1TD, key_1TD))
    value_1THD = value_1TD.reshape(*rows_1T, -1, module.head_v_dim)
    beta_1TH, decay_1TH = steps_1TH.sigmoid(), _decay(decay_steps_1TH, module.A_log, module.dt_bias)
    packed = (query_1THD, key_1THD, value_1THD, decay_1TH, beta_1TH)
    rule = _delta_rule_kernel if hidden_states.is_cuda and _HAS_KERNELS else _delta_rule
    output_THD = rule(packed, cu_seq_lens_q)
    normed = module.norm(output_THD.flatten(0, 1), gate_1TD.reshape(-1, module.head_v_dim))
    projected_1TD: Tensor = module.out_proj(normed.view_as(gate_1TD))
    return projected_1TD


def _projected(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values [1, T, 3 D]; the gate [1, T, D]; and the inputs of beta and decay [1, T, H]."""
    if not hasattr(module, "in_proj_qkvz"):
        return (
            module.in_proj_qkv(hidden),
            module.in_proj_z(hidden),
            module.in_proj_b(hidden),
            module.in_proj_a(hidden),
        )
    # Qwen3-Next's weights are in groups, one per head of keys.
    products = (module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
    *mixed, gate_1THD, steps_1TH, decay_steps_1TH = module.fix_query_key_value_ordering(*products)
    mixed_1TD = torch.cat([part_1THD.flatten(2) for part_1THD in mixed], dim=-1)
    return mixed_1TD, gate_1THD.flatten(2), steps_1TH, decay_steps_1TH


@fused
def _decay(steps_1TH: Tensor, log_rate_H: Tensor, bias_H: Tensor) -> Tensor:
    """Returns the logarithm of the state's decay, float32 [1, T, H]."""
    return -log_rate_H.float().exp() * functional.softplus(steps_1TH.float() + bias_H)


def _delta_rule_kernel(packed: tuple[Tensor, ...], bounds: Tensor) -> Tensor:
    """Computes `_delta_rule` with flash-linear-attention.

    The package caches what it derives from `bounds`, which all layers share.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    query, key, value, decay, beta = packed
    output_1THD, _ = chunk_gated_delta_rule(
        query, key, value, decay, beta, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True
    )
    output_THD: Tensor = output_1THD.squeeze(0)
    return output_THD


def _delta_rule(packed: tuple[Tensor, ...], bounds: Tensor) -> Tensor:
    """Computes the delta rule with transformers' implementation, in one call per number of chunks.

    Args:
        packed: Queries and keys [1, T, G, D], each shared by H / G heads; values [1, T, H, D]; decays and betas [1, T,
            H].
        bounds: int32 [documents + 1].

    Returns:
        [T, H, D].
    """
    repeats = packed[2].shape[2] // packed[0].shape[2]
    packed = (*(tensor.repeat_interleave(repeats, dim=2) for tensor in packed[:2]), *packed[2:])
    # Append a row of zeros. It serves as the padding token of chunks, because it does not change the state.
    padded = [functional.pad(tensor.squeeze(0), (0, 0) * (tensor.dim() - 2) + (0, 1)) for tensor in packed]
    rule: Any = unwrap(torch_chunk_gated_delta_rule)
    outputs = []
    positions, restore = _group_by_chunks(tuple(bounds.tolist()))
    for position_NL in positions:
        index = position_NL.flatten().to(padded[0].device)
        taken = (tensor.index_select(0, index).view(*position_NL.shape, *tensor.shape[1:]) for tensor in padded)
        query, key, value, decay, beta = taken
        output_NLHD, _ = rule(query, key, value, decay, beta, _CHUNK, use_qk_l2norm_in_kernel=True)
        outputs.append(output_NLHD.flatten(0, 1))
    output_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output_THD.index_select(0, restore.to(output_THD.device))


@lru_cache(maxsize=256)
def _group_by_chunks(bounds: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Groups documents by their number of chunks.

    Returns:
        For each group int64 [N, L], the packed positions of its documents' tokens, padded with T; and int64 [T], the
        row of each token in the concatenation of all groups.
    """
    groups: dict[int, list[Tensor]] = {}
    for start, end in pairwise(bounds):
        if end > start:
            groups.setdefault((end - start - 1) // _CHUNK, []).append(torch.arange(start, end))
    positions = tuple(pad_sequence(group, batch_first=True, padding_value=bounds[-1]) for group in groups.values())
    return positions, torch.argsort(torch.cat([position_NL.flatten() for position_NL in positions]))[: bounds[-1]]


def _short_convolution(module: Any, hidden_states: Tensor, *, seq_idx: Tensor, **others: Any) -> Tensor:
    """Computes Lfm2ShortConv's forward pass per document, [1, T, D].

    Args:
        module: The module.
        hidden_states: [1, T, D].
        seq_idx: int32 [1, T], the document number of each token.
        others: Options of transformers' models that have no effect here.
    """
    _refuse_unknown(module, others)
    gate_in, gate_out, values = module.in_proj(hidden_states).chunk(3, dim=-1)
    convolved_1TD = _convolve(gate_in * values, module.conv.weight, module.conv.bias, seq_idx, False)
    output_1TD: Tensor = module.out_proj(gate_out * convolved_1TD)
    return output_1TD


@fused
def _convolve(
    values_1TD: Tensor, weight_D1K: Tensor, bias_D: Tensor | None, seq_idx: Tensor, activated: bool
) -> Tensor:
    """Applies a causal convolution per channel, [1, T, D], that does not cross document bounds. Sums in float32.

    Args:
        values_1TD: The input.
        weight_D1K: Taps of each channel; the last is that of the token itself.
        bias_D: Bias of each channel, or None.
        seq_idx: int32 [1, T], the document number of each token.
        activated: True to apply SiLU to the result.
    """
    weight_DK = weight_D1K.squeeze(1).float()
    summed_1TD = values_1TD.float() * weight_DK[:, -1]
    for back in range(1, min(weight_DK.shape[1], values_1TD.shape[1])):
        is_same_1T1 = (seq_idx[:, back:] == seq_idx[:, :-back]).unsqueeze(-1)
        earlier_1TD = values_1TD[:, :-back] * is_same_1T1 * weight_DK[:, -1 - back]
        summed_1TD = summed_1TD + functional.pad(earlier_1TD, (0, 0, back, 0))
    if bias_D is not None:
        summed_1TD = summed_1TD + bias_D
    result_1TD = summed_1TD.to(values_1TD.dtype)
    return functional.silu(result_1TD) if activated else result_1TD


def _refuse_unknown(module: nn.Module, others: Mapping[str, Any]) -> None:
    if refused := [name for name in others if others[name] is not None and name not in (*HARMLESS, "max_length_q")]:
        raise ValueError(f"packed layers do not support {', '.join(refused)}, which {type(module).__name__} receives")


_FORWARDS = {
    Qwen3_5GatedDeltaNet: _gated_delta_net,
    Qwen3_5MoeGatedDeltaNet: _gated_delta_net,
    Qwen3NextGatedDeltaNet: _gated_delta_net,
    Lfm2ShortConv: _short_convolution,
}
