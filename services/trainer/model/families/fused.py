"""The parts of a Qwen language layer between its matrix products, as one kernel each on a GPU.

Left to themselves they are some fifty passes over memory a layer, as much time as the products. The formulas are the
Hugging Face modules' own.

Shapes: T packed tokens, H heads, D head size, I intermediate size.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.trainer.model.attention import packed_attention
from services.trainer.model.fusing import fused
from services.trainer.model.products import shared_products


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
