"""Kernels on a CPU: RMS norms, rotary embeddings of [T, heads, D], delta nets, tied unembeddings, strided products.

Replaces: `vllm.platforms.cpu.CpuPlatform.get_default_ir_op_priority`, `RotaryEmbedding.forward_cpu`,
    `vllm._custom_ops.onednn_mm` and, except for bfloat16,
    `vllm.model_executor.layers.mamba.ops.cpu.gdn_attention.cpu_gdn_attention_core`; adds an implementation to
    `vllm.ir.ops.rms_norm` and `vllm.ir.ops.fused_add_rms_norm`. Completes
    `vllm.model_executor.model_loader.reload.finalize_layerwise_reload`.
Why: vLLM's CPU build contains fused RMS norms but registers them only for GPUs, and uses the formula in torch, which
    makes seven passes over the data instead of one. The patch registers the fused kernels.
    vLLM's rotary kernel assumes that the last but one dimension is the token. For queries [T, heads, D], as in LFM2, it
    rotates the heads of the first tokens by the angles of later tokens (an error of 0.4 nat). The patch passes
    [T, heads * D], which the kernel handles correctly.
    For gated delta nets (Qwen3.5), vLLM has kernels for bfloat16 and some head sizes; anything else kills the engine.
    The patch computes other types with the functions of transformers.
    An unembedding that shares the embedding's weight multiplies by a packed copy of that weight (`cpu_linear`). After
    a reload, vLLM packs only modules that loaded a weight, and only the embedding loads the shared one. `lm_head` kept
    the old copy, with an error of 1.3 nat. The patch packs all embeddings after each load.
    oneDNN's products refuse inputs that are not contiguous, such as the patches of Llama 4's tower, and the engine
    dies. The patch copies them.
Upstream: none filed; vllm-project/vllm pull request 33825 made these operations; RFC 48312, on weight reloading for
    RL, has tensors derived from weights as its second point.
Delete when: vLLM has a CPU implementation of norms other than "native" and the CPU platform prefers it, the rotary
    kernel returns the same for both shapes, `chunk_gated_delta_rule_cpu` accepts float32, a reload of a tied
    embedding leaves a `cpu_linear` of the new weight, and `onednn_mm` takes strided inputs.

Shapes: N sequences, L new tokens of each, K taps of a convolution, D channels, H heads.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm import ir
from vllm.config.kernel import IrOpPriorityConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

PROVIDER = "fovea_cpu"
_LANES = 16  # vector width of vLLM's kernels; other widths use vLLM's own formula
_delta_net_in_bfloat16: Any = gdn_attention.cpu_gdn_attention_core


def apply() -> None:
    """Registers the kernels with vLLM's dispatch and makes it prefer them. It may be called twice."""
    _flatten_heads()
    _copy_strided()
    gdn_attention.cpu_gdn_attention_core = _delta_net
    platform: Any = type(current_platform)
    platform.get_default_ir_op_priority = classmethod(lambda _, config: _priority())
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_sum, inplace=True)(_fused_add_rms_norm)


def pack_embeddings(model: torch.nn.Module) -> None:
    """Packs all embeddings and unembeddings of a CPU model again. Call it after the weights have changed."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _flatten_heads() -> None:
    rotate: Any = RotaryEmbedding.forward_cpu
    if rotate.__module__ == __name__:
        return

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        flat_query, flat_key = rotate(self, positions, query.flatten(1), key if key is None else key.flatten(1))
        return flat_query.view(query.shape), key if key is None else flat_key.view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu


def _copy_strided() -> None:
    multiply: Any = ops.onednn_mm
    if multiply.__module__ != __name__:
        ops.onednn_mm = lambda handler, x, bias: multiply(handler, x.contiguous(), bias)


def _priority() -> Any:
    ours = [PROVIDER, "native"]
    return IrOpPriorityConfig.with_default(["native"], rms_norm=ours, fused_add_rms_norm=ours)


def _takes(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    fits = weight is not None and weight.dtype == x.dtype and x.shape[-1] % _LANES == 0
    return fits and variance_size is None and x.device.type == "cpu"


def _takes_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _takes(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # slices of a packed projection are not contiguous
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def _delta_net(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    context: Any = get_forward_context()
    if mixed_qkv.dtype == torch.bfloat16 or context.attn_metadata is None:
        _delta_net_in_bfloat16(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    metadata = context.attn_metadata[layer.prefix]
    # First come the sequences that advance by one token, all at once; then prompts or chunks of them, one by one.
    decodes, slots = metadata.num_decodes, metadata.non_spec_state_indices_tensor
    if decodes:
        given = [tensor[:decodes].unsqueeze(1) for tensor in (mixed_qkv, b, a)]
        core_attn_out[:decodes] = _advance(layer, given, slots[:decodes], True).squeeze(1)
    bounds = metadata.non_spec_query_start_loc.tolist()
    for place in range(decodes, decodes + metadata.num_prefills):
        tokens = slice(bounds[place], bounds[place + 1])
        given = [tensor[tokens].unsqueeze(0) for tensor in (mixed_qkv, b, a)]
        has_begun = bool(metadata.has_initial_state[place])
        core_attn_out[tokens] = _advance(layer, given, slots[place : place + 1], has_begun).squeeze(0)


def _advance(layer: Any, given: Sequence[Tensor], slots_N: Tensor, has_begun: bool) -> Tensor:
    """Advances a delta net by L tokens with the functions of transformers, and stores the states after the last token.

    Args:
        layer: vLLM's layer, with its weights and states.
        given: Queries, keys and values before the convolution [N, L, D], then b and a [N, L, H].
        slots_N: The slots of the states of the sequences.
        has_begun: True if the slots contain the states of earlier tokens.

    Returns:
        The heads of the output [N, L, H, D].
    """
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    mixed_NLD, b_NLH, a_NLH = given
    taps, states = layer.kv_cache
    if is_conv_state_dim_first():
        taps = taps.transpose(1, 2)
    seen_NKD = taps[slots_N] if has_begun else taps.new_zeros(len(slots_N), *taps.shape[1:])
    window_NLD = torch.cat([seen_NKD, mixed_NLD], dim=1)
    taps[slots_N] = window_NLD[:, -taps.shape[1] :]
    weight, channels = layer.conv1d.weight, window_NLD.shape[2]
    mixed_NLD = functional.conv1d(window_NLD.mT, weight, layer.conv1d.bias, groups=channels).mT
    key_size, repeats = layer.key_dim // layer.tp_size, layer.num_v_heads // layer.num_k_heads
    rows_NL = mixed_NLD.shape[:2]
    keys_NLHD = functional.silu(mixed_NLD[..., : 2 * key_size]).reshape(*rows_NL, -1, layer.head_k_dim)
    query_NLHD, key_NLHD = keys_NLHD.repeat_interleave(repeats, dim=2).chunk(2, dim=2)
    value_NLHD = functional.silu(mixed_NLD[..., 2 * key_size :]).reshape(*rows_NL, -1, layer.head_v_dim)
    decay_NLH = -layer.A_log.float().exp() * functional.softplus(a_NLH.float() + layer.dt_bias)
    rule: Any = unwrap(torch_recurrent_gated_delta_rule if mixed_NLD.shape[1] == 1 else torch_chunk_gated_delta_rule)
    # vLLM defines only the size of a state. This code stores the state with keys first, as transformers computes it; no
    # other code reads it.
    states = states.view(*states.shape[:2], layer.head_k_dim, layer.head_v_dim)
    output_NLHD, after = rule(
        query_NLHD,
        key_NLHD,
        value_NLHD,
        decay_NLH,
        b_NLH.sigmoid(),
        initial_state=states[slots_N] if has_begun else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states[slots_N] = after.to(states.dtype)
    assert isinstance(output_NLHD, Tensor)
    return output_NLHD
