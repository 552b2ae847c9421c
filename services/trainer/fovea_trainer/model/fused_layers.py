"""Faster versions of Hugging Face layers, equal up to rounding.

On a GPU each pointwise part of a language layer runs as one kernel. Unfused, these parts make about fifty passes over
memory per layer, which take as long as the matrix products. Fusing is optional: a family without it is only slower.

Shapes: T tokens of all documents, H heads, D head size, I intermediate size, P patches, W bytes per patch.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Callable
from functools import cache, wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from fovea.runtime.model_files import LLAMA_LIKE
from fovea_trainer.model.lora_linear import shared_products, widen
from fovea_trainer.model.packed_attention import packed_attention

Result = TypeVar("Result")


def fused(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a pure function of tensors: compiled on a GPU, run eagerly on a CPU.

    The first argument decides the device. One compiled kernel serves all sizes.
    """

    @cache
    def compiled() -> Any:  # only when a GPU needs it: importing the compiler takes a second
        # Keep the rounding between steps as written. The sampler rounds there too, so both agree better.
        return torch.compile(function, dynamic=True, options={"emulate_precision_casts": True})

    @wraps(function)
    def run(first: Tensor, *rest: Any) -> Result:
        if first.is_cuda:
            # torch compiles a function once each for adapters, for full parameters, and with and without gradients.
            # Above the limit, which each thread has for itself, it would stop compiling.
            torch._dynamo.config.recompile_limit = 32
        result: Result = (compiled() if first.is_cuda else function)(first, *rest)
        return result

    return run


def stream_dtype(text_model_type: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the residual stream between the layers of a language model.

    Models in `LLAMA_LIKE` keep it in float32, as the sampler does (`vllm_patches/float32_residual.py`). Rounded to
    bfloat16 in each layer, it would cause more of the difference between the two than any other rounding.

    Args:
        text_model_type: `model_type` of the language model.
        dtype: Dtype of the model.
    """
    return torch.promote_types(dtype, torch.float32) if text_model_type in LLAMA_LIKE else dtype


def fuse_language(model: Any) -> None:
    """Fuses the language layers of a `LLAMA_LIKE` model, and gives it a residual stream of `stream_dtype`.

    The stream widens in the first layer, because rotary embeddings have the dtype of the decoder's input. Each norm
    returns the model's dtype, in which attention and MLP compute. On a GPU, products that are added to the stream, and
    those of a gated MLP, are not rounded either: rounded, they would cause a third of the difference to the sampler.
    """
    decoder = model.get_decoder()
    widens = stream_dtype(decoder.config.model_type, model.dtype) != model.dtype
    norm_forward = _norm_of_stream if widens else _norm
    for layer in decoder.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = MethodType(norm_forward, norm)
        dense = hasattr(layer.mlp, "gate_proj")
        if dense:
            layer.mlp.forward = MethodType(_mlp, layer.mlp)
        if widens:
            mlp = layer.mlp
            widen(layer.self_attn.o_proj, *((mlp.gate_proj, mlp.up_proj, mlp.down_proj) if dense else ()))
        if hasattr(layer.self_attn, "q_norm"):
            layer.self_attn.forward = MethodType(_attention, layer.self_attn)
    if widens:
        decoder.norm.forward = MethodType(norm_forward, decoder.norm)
        decoder.layers[0].register_forward_pre_hook(_widen_stream)


def fuse_qwen_tower(model: Any) -> None:
    """Replaces the patch embedding of a Qwen tower by a single matrix product."""
    patch_embed = (model.visual if hasattr(model, "visual") else model.model.visual).patch_embed
    patch_embed.forward = MethodType(_embed_patches, patch_embed)


def add_level(_: Any, hidden_1TD: Tensor, image_index_M: Tensor, level_MD: Tensor) -> Tensor:
    """Adds one level of deepstack features at the image positions.

    The module's own method uses a mask, which makes the host wait for the GPU six times per pass.
    """
    return hidden_1TD.index_add(1, image_index_M, level_MD.to(hidden_1TD.dtype).unsqueeze(0))


def _embed_patches(patch_embed: Any, pixels_PW: Tensor) -> Tensor:
    """Computes the module's Conv3d as a matrix product, since each patch has exactly the size of the kernel.

    On a CPU, torch's convolution takes five times as long.
    """
    weight = patch_embed.proj.weight
    return functional.linear(pixels_PW.to(weight.dtype), weight.flatten(1), patch_embed.proj.bias)


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _norm_of_stream(norm: Any, hidden: Tensor) -> Tensor:
    return residual_norm(hidden, norm.weight, norm.variance_epsilon)


def _widen_stream(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    hidden, *rest = given
    return hidden.float(), *rest


def _mlp(mlp: Any, hidden: Tensor) -> Tensor:
    gate, up = shared_products(hidden, mlp.gate_proj, mlp.up_proj)
    rounds: Any = _RoundedSwiglu.apply if torch.is_grad_enabled() else rounded_swiglu
    gated = swiglu(gate, up) if gate.dtype == hidden.dtype else rounds(gate, up, hidden.dtype)
    product: Tensor = mlp.down_proj(gated)
    return product


class _RoundedSwiglu(torch.autograd.Function):
    """silu(gate) * up of float32 products, rounded once to the model's dtype, as the sampler computes it.

    The backward pass retains gate and up in the model's dtype, in half of the memory.
    """

    @staticmethod
    def forward(ctx: Any, gate_TI: Tensor, up_TI: Tensor, dtype: torch.dtype) -> Tensor:
        product_TI, *inputs = swiglu_with_inputs(gate_TI, up_TI, dtype)
        ctx.save_for_backward(*inputs)
        return product_TI

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return *swiglu_gradients(grads[0], *ctx.saved_tensors), None


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
        sliding_window=getattr(attention, "sliding_window", None),
        **options,
    )
    return attention.o_proj(out_1THD.reshape(*rows_1T, -1)), None


@fused
def residual_norm(stream_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Applies RMSNorm to a float32 stream. Returns the weight's dtype, rounded once."""
    normed_TD = functional.rms_norm(stream_TD, weight_D.shape, weight_D.to(stream_TD.dtype), epsilon)
    return normed_TD.to(weight_D.dtype)


@fused
def swiglu(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """Returns silu(gate) * up (Shazeer, 2020)."""
    return functional.silu(gate_TI) * up_TI


@fused
def rounded_swiglu(gate_TI: Tensor, up_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns silu(gate) * up of float32 tensors, rounded once, as `vllm_patches/float32_residual.py` computes it."""
    return (functional.silu(gate_TI) * up_TI).to(dtype)


@fused
def swiglu_with_inputs(gate_TI: Tensor, up_TI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `rounded_swiglu` and both inputs, rounded."""
    return (functional.silu(gate_TI) * up_TI).to(dtype), gate_TI.to(dtype), up_TI.to(dtype)


@fused
def swiglu_gradients(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up in float32, where silu'(g) = s + g s (1 - s) with s = sigmoid(g)."""
    grad, gate, up = grad_TI.float(), gate_TI.float(), up_TI.float()
    share = torch.sigmoid(gate)
    return grad * up * (share + gate * share * (1 - share)), grad * gate * share


@fused
def weighted_swiglu(gate_SI: Tensor, up_SI: Tensor, weight_S1: Tensor) -> Tensor:
    """Returns silu(gate) * up * weight, with one weight per row."""
    return functional.silu(gate_SI) * up_SI * weight_S1


@fused
def norm_and_rotate(heads_THD: Tensor, weight_D: Tensor, epsilon: float, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Applies RMSNorm to each head, then rotary position embedding (Su et al., 2021).

    Args:
        heads_THD: Queries or keys.
        weight_D: Weight of the norm.
        epsilon: Added to the mean square.
        cos_TD: Cosines of the rotation angles.
        sin_TD: Sines of the rotation angles.
    """
    values_THD = heads_THD.float()
    values_THD = values_THD * torch.rsqrt(values_THD.square().mean(-1, keepdim=True) + epsilon)
    normed_THD = weight_D * values_THD.to(heads_THD.dtype)
    first, second = normed_THD.chunk(2, dim=-1)
    turned_THD = torch.cat((-second, first), dim=-1)
    return normed_THD * cos_TD.unsqueeze(-2) + turned_THD * sin_TD.unsqueeze(-2)
