"""Log-probabilities of target tokens from hidden states, never holding the logits of more than one chunk of positions.

Shapes: T positions, C positions of one chunk, D hidden size, V vocabulary, K targets a position, R rank of the adapter.

logprob[t, k] = z[t, y[t, k]] - logsumexp(z[t]) with z = x W' + scale (x A') B' in the weights' own type, as the sampler
computes it, and all else in float32. The backward pass computes each chunk's logits again and skips positions whose
gradient is zero, which for supervised training are most.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from typing import Any

import torch
from torch import Tensor

from services.trainer.fusing import fused
from services.trainer.lora_pair import LoraPair, add_product
from services.trainer.products import gradient_of


def target_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, trained: LoraPair | Tensor | None, targets_TK: Tensor, chunk_positions: int
) -> Tensor:
    """float32 [T, K], differentiable in the hidden states, the weight and the adapter.

    Args:
        trained: An adapter of the weight; or its float32 master, [V, D], to whose gradient that of the weight is added.
    """
    apply: Any = _TargetLogprobs.apply
    lora = trained if isinstance(trained, LoraPair) else None
    master = trained if isinstance(trained, Tensor) else None
    result: Tensor = apply(hidden_TD, weight_VD, lora and lora.a, lora, master, targets_TK, chunk_positions)
    return result


def _logits(hidden_CD: Tensor, weight_VD: Tensor, lora: LoraPair | None) -> tuple[Tensor, Tensor | None]:
    """[C, V], and x A' [C, R] if there is an adapter."""
    logits_CV = hidden_CD @ weight_VD.T
    if lora is None:
        return logits_CV, None
    low_CR = lora.project(hidden_CD)
    return lora.add_output(logits_CV, low_CR), low_CR


@fused
def _normalizers(logits_CV: Tensor) -> Tensor:
    return torch.logsumexp(logits_CV.float(), dim=-1)


@fused
def _softmax_gradient(logits_CV: Tensor, normalizers_C: Tensor, total_C: Tensor) -> Tensor:
    """-total softmax(logits), in the type of the logits."""
    probabilities_CV = torch.exp(logits_CV.float() - normalizers_C[:, None])
    return (probabilities_CV * -total_C[:, None]).to(logits_CV.dtype)


class _TargetLogprobs(torch.autograd.Function):
    """Of an adapter it is given A too, only to be part of its graph: see lora_pair.py."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        a: Tensor | None,
        lora: LoraPair | None,
        master_VD: Tensor | None,
        targets_TK: Tensor,
        chunk_positions: int,
    ) -> Tensor:
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        normalizers_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        for start in range(0, hidden_TD.shape[0], chunk_positions):
            rows = slice(start, start + chunk_positions)
            logits_CV, _ = _logits(hidden_TD[rows], weight_VD, lora)
            normalizers_T[rows] = _normalizers(logits_CV)
            logprobs_TK[rows] = logits_CV.gather(1, targets_TK[rows]).float() - normalizers_T[rows, None]
        ctx.save_for_backward(hidden_TD, weight_VD, targets_TK, normalizers_T)
        ctx.lora, ctx.master_VD, ctx.chunk_positions = lora, master_VD, chunk_positions
        return logprobs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_TK, normalizers_T = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        lora: LoraPair | None = ctx.lora
        grad_TK = grads[0]
        d_hidden = torch.zeros_like(hidden_TD) if need_hidden else None
        d_weight = None
        if need_weight and ctx.master_VD is not None:
            d_weight = gradient_of(ctx.master_VD)
        elif need_weight:
            d_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
        positions = grad_TK.abs().sum(dim=1).nonzero().squeeze(1)
        for rows in torch.split(positions, ctx.chunk_positions):
            hidden_CD, grad_CK = hidden_TD[rows], grad_TK[rows]
            logits_CV, low_CR = _logits(hidden_CD, weight_VD, lora)
            d_logits_CV = _softmax_gradient(logits_CV, normalizers_T[rows], grad_CK.sum(dim=1))
            d_logits_CV.scatter_add_(1, targets_TK[rows], grad_CK.to(d_logits_CV.dtype))
            d_hidden_CD = d_logits_CV @ weight_VD if need_hidden else None
            if lora is not None and low_CR is not None:
                lora.add_gradients(d_logits_CV, hidden_CD, low_CR, d_hidden_CD)
            if d_hidden is not None and d_hidden_CD is not None:
                d_hidden[rows] = d_hidden_CD
            if d_weight is not None:
                add_product(d_weight, d_logits_CV.T, hidden_CD)
        passed_on = d_weight.to(weight_VD.dtype) if d_weight is not None and ctx.master_VD is None else None
        return d_hidden, passed_on, None, None, None, None, None
