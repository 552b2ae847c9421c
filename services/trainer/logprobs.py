"""Log-probabilities of target tokens from hidden states, never holding the logits of more than one chunk of positions.

Shapes: T positions, C positions of one chunk, D hidden size, V vocabulary, K targets a position, R rank of the adapter.

logprob[t, k] = z[t, y[t, k]] - logsumexp(z[t]) with z = x W' + scale (x A') B', all in float32 but x W', which is a
product in the weights' own type, as the sampler computes it. The backward pass computes each chunk's logits again and
skips positions whose gradient is zero, which for supervised training are most.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoraPair:
    """The adapter of one linear module: y += scale * B (A x).

    Args:
        a: float32 [R, in].
        b: float32 [out, R].
        scale: alpha / rank.
    """

    a: Tensor
    b: Tensor
    scale: float


def target_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, lora: LoraPair | None, targets_TK: Tensor, chunk_positions: int
) -> Tensor:
    """float32 [T, K], differentiable in the hidden states, the weight and the adapter."""
    a, b, scale = (lora.a, lora.b, lora.scale) if lora else (None, None, 0.0)
    apply: Any = _TargetLogprobs.apply
    result: Tensor = apply(hidden_TD, weight_VD, a, b, scale, targets_TK, chunk_positions)
    return result


def _logits(hidden_CD: Tensor, weight_VD: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
    logits_CV = (hidden_CD @ weight_VD.T).float()
    if a is not None and b is not None:
        logits_CV = torch.addmm(logits_CV, hidden_CD.float() @ a.T, b.T, alpha=scale)
    return logits_CV


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
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        normalizers_T = torch.empty(hidden_TD.shape[0], dtype=torch.float32, device=hidden_TD.device)
        for start in range(0, hidden_TD.shape[0], chunk_positions):
            rows = slice(start, start + chunk_positions)
            logits_CV = _logits(hidden_TD[rows], weight_VD, a, b, scale)
            normalizers_T[rows] = torch.logsumexp(logits_CV, dim=-1)
            logprobs_TK[rows] = logits_CV.gather(1, targets_TK[rows]) - normalizers_T[rows, None]
        ctx.save_for_backward(hidden_TD, weight_VD, a, b, targets_TK, normalizers_T)
        ctx.scale, ctx.chunk_positions = scale, chunk_positions
        return logprobs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, a, b, targets_TK, normalizers_T = ctx.saved_tensors
        need_hidden, need_weight, need_a, need_b = ctx.needs_input_grad[:4]
        grad_TK = grads[0]
        d_hidden = torch.zeros_like(hidden_TD) if need_hidden else None
        d_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        d_a = torch.zeros_like(a) if need_a else None
        d_b = torch.zeros_like(b) if need_b else None
        positions = grad_TK.abs().sum(dim=1).nonzero().squeeze(1)
        for rows in torch.split(positions, ctx.chunk_positions):
            hidden_CD, grad_CK = hidden_TD[rows], grad_TK[rows]
            logits_CV = _logits(hidden_CD, weight_VD, a, b, ctx.scale)
            d_logits_CV = torch.exp(logits_CV - normalizers_T[rows, None]) * -grad_CK.sum(dim=1, keepdim=True)
            d_logits_CV.scatter_add_(1, targets_TK[rows], grad_CK)
            d_hidden_CD = (d_logits_CV.to(weight_VD.dtype) @ weight_VD).float() if need_hidden else None
            if a is not None:
                d_low_CR = ctx.scale * (d_logits_CV @ b)
                hidden_32 = hidden_CD.float()
                if d_hidden_CD is not None:
                    d_hidden_CD = d_hidden_CD + d_low_CR @ a
                if d_a is not None:
                    d_a += d_low_CR.T @ hidden_32
                if d_b is not None:
                    d_b += ctx.scale * (d_logits_CV.T @ (hidden_32 @ a.T))
            if d_hidden is not None and d_hidden_CD is not None:
                d_hidden[rows] = d_hidden_CD.to(d_hidden.dtype)
            if d_weight is not None:
                d_weight += d_logits_CV.T @ hidden_CD.float()
        if d_weight is not None:
            d_weight = d_weight.to(weight_VD.dtype)
        return d_hidden, d_weight, d_a, d_b, None, None, None
