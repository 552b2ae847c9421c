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
from services.trainer.lora_pair import LoraPair, add_lora


def target_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, lora: LoraPair | None, targets_TK: Tensor, chunk_positions: int
) -> Tensor:
    """float32 [T, K], differentiable in the hidden states, the weight and the adapter."""
    a, b, scale = (lora.a, lora.b, lora.scale) if lora else (None, None, 0.0)
    apply: Any = _TargetLogprobs.apply
    result: Tensor = apply(hidden_TD, weight_VD, a, b, scale, targets_TK, chunk_positions)
    return result


def _logits(hidden_CD: Tensor, weight_VD: Tensor, lora: LoraPair | None) -> Tensor:
    logits_CV = hidden_CD @ weight_VD.T
    return logits_CV if lora is None else add_lora(logits_CV, hidden_CD @ lora.a.to(hidden_CD.dtype).T, lora)


@fused
def _normalizers(logits_CV: Tensor) -> Tensor:
    return torch.logsumexp(logits_CV.float(), dim=-1)


@fused
def _softmax_gradient(logits_CV: Tensor, normalizers_C: Tensor, total_C: Tensor) -> Tensor:
    """-total softmax(logits), in the type of the logits."""
    probabilities_CV = torch.exp(logits_CV.float() - normalizers_C[:, None])
    return (probabilities_CV * -total_C[:, None]).to(logits_CV.dtype)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        scale: float,
        targets_TK: Tensor,
        chunk_positions: int,
    ) -> Tensor:
        lora = LoraPair.of(a, b, scale)
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        normalizers_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        for start in range(0, hidden_TD.shape[0], chunk_positions):
            rows = slice(start, start + chunk_positions)
            logits_CV = _logits(hidden_TD[rows], weight_VD, lora)
            normalizers_T[rows] = _normalizers(logits_CV)
            logprobs_TK[rows] = logits_CV.gather(1, targets_TK[rows]).float() - normalizers_T[rows, None]
        ctx.save_for_backward(hidden_TD, weight_VD, a, b, targets_TK, normalizers_T)
        ctx.scale, ctx.chunk_positions = scale, chunk_positions
        return logprobs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, a, b, targets_TK, normalizers_T = ctx.saved_tensors
        need_hidden, need_weight, need_a, need_b = ctx.needs_input_grad[:4]
        lora = LoraPair.of(a, b, ctx.scale)
        grad_TK = grads[0]
        d_hidden = torch.zeros_like(hidden_TD) if need_hidden else None
        d_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        d_a = torch.zeros_like(a) if need_a else None
        d_b = torch.zeros_like(b) if need_b else None
        positions = grad_TK.abs().sum(dim=1).nonzero().squeeze(1)
        for rows in torch.split(positions, ctx.chunk_positions):
            hidden_CD, grad_CK = hidden_TD[rows], grad_TK[rows]
            logits_CV = _logits(hidden_CD, weight_VD, lora)
            d_logits_CV = _softmax_gradient(logits_CV, normalizers_T[rows], grad_CK.sum(dim=1))
            d_logits_CV.scatter_add_(1, targets_TK[rows], grad_CK.to(d_logits_CV.dtype))
            d_hidden_CD = d_logits_CV @ weight_VD if need_hidden else None
            if lora is not None:
                kind = hidden_CD.dtype
                d_low_CR = lora.scale * (d_logits_CV @ lora.b.to(kind))
                if d_hidden_CD is not None:
                    d_hidden_CD.addmm_(d_low_CR, lora.a.to(kind))
                if d_a is not None:
                    d_a += d_low_CR.T @ hidden_CD
                if d_b is not None:
                    d_b += lora.scale * (d_logits_CV.T @ (hidden_CD @ lora.a.to(kind).T))
            if d_hidden is not None and d_hidden_CD is not None:
                d_hidden[rows] = d_hidden_CD
            if d_weight is not None:
                _add_product(d_weight, d_logits_CV.T, hidden_CD)
        if d_weight is not None:
            d_weight = d_weight.to(weight_VD.dtype)
        return d_hidden, d_weight, d_a, d_b, None, None, None


def _add_product(total_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """total += left right, summed in float32, without a float32 copy of the factors."""
    if total_VD.is_cuda and left_VC.dtype != total_VD.dtype:
        torch.addmm(total_VD, left_VC, right_CD, out_dtype=total_VD.dtype, out=total_VD)  # type: ignore[call-overload]
    else:
        total_VD.addmm_(left_VC.to(total_VD.dtype), right_CD.to(total_VD.dtype))
