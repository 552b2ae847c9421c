"""Log-probabilities of target tokens from hidden states, never holding the logits of more than one chunk of positions.

Shapes: T positions, C positions of one chunk, D hidden size, V vocabulary, K targets a position, R rank of the adapter.

logprob[t, k] = z[t, y[t, k]] - logsumexp(z[t]) with z = x W' + scale (x A') B' in the head's type, which is float32 or
that of the weights, as the sampler's is, and all else in float32. Some families cap z: c tanh(z / c). A temperature
divides z, in float32, as a sampler does. The backward pass computes each chunk's logits again and skips positions whose
gradient is zero, which for supervised training are most.

The gradient of a confident target is a small difference of large numbers, 1 - p, and all the others of its row are as
small: what is known of the likeliest token is kept as the sum of all other probabilities, which loses nothing.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fovea_services.trainer.model.fused_layers import fused
from fovea_services.trainer.model.lora_linear import LoraPair, add_product, gradient_of, product


def target_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    trained: LoraPair | Tensor | None,
    targets_TK: Tensor,
    chunk_positions: int,
    head_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """float32 [T, K], differentiable in the hidden states, the weight and the adapter.

    Args:
        trained: An adapter of the weight; or its float32 master, [V, D], to whose gradient that of the weight is added.
        head_dtype: Of the logits: float32, or the type of the weight, which None means.
        softcap: c, which no logit exceeds; None for no cap.
        temperature: What logits are divided by, after the cap.
    """
    apply: Any = _TargetLogprobs.apply
    lora = trained if isinstance(trained, LoraPair) else None
    master = trained if isinstance(trained, Tensor) else None
    result: Tensor = apply(
        hidden_TD,
        weight_VD,
        lora and lora.a,
        lora,
        master,
        targets_TK,
        chunk_positions,
        head_dtype or weight_VD.dtype,
        softcap,
        temperature,
    )
    return result


def _logits(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    lora: LoraPair | None,
    dtype: torch.dtype,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor | None]:
    """[C, V] of that type, capped, divided, and x A' [C, R] in the type of the weight if there is an adapter."""
    logits_CV, low_CR = _products(hidden_CD, weight_VD, lora, dtype)
    if softcap is not None:
        logits_CV.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        logits_CV = logits_CV.float().div_(temperature)
    return logits_CV, low_CR


def _products(
    hidden_CD: Tensor, weight_VD: Tensor, lora: LoraPair | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    is_wider = dtype != weight_VD.dtype
    logits_CV = product(hidden_CD, weight_VD.T) if is_wider else hidden_CD @ weight_VD.T
    if lora is None:
        return logits_CV, None
    low_CR = lora.project(hidden_CD)
    if is_wider:
        add_product(logits_CV, low_CR, lora.b_cast.T, lora.scale)
    else:
        lora.add_output(logits_CV, low_CR)
    return logits_CV, low_CR


@dataclass(frozen=True)
class _Softmax:
    """softmax(z) of each row, exact where one token has nearly all: p[v] = exp(z[v] - z[top]) / (1 + rest).

    Args:
        logits_CV: z.
        top_C: int64, the likeliest token of each row; one of them if there are several.
        peak_C: float32, z[top].
        rest_C: float32, exp(z - z[top]) summed over all other tokens.
    """

    logits_CV: Tensor
    top_C: Tensor
    peak_C: Tensor
    rest_C: Tensor

    @classmethod
    def of(cls, logits_CV: Tensor) -> "_Softmax":
        """Holds no copy of the logits."""
        return cls(logits_CV, *_top_peak_rest(logits_CV))

    def logprobs(self, targets_CK: Tensor) -> Tensor:
        """log p of the targets, float32 [C, K]."""
        logits_CK = self.logits_CV.gather(1, targets_CK).float()
        return logits_CK - self.peak_C[:, None] - torch.log1p(self.rest_C)[:, None]

    def logits_gradient(self, targets_CK: Tensor, grad_CK: Tensor, dtype: torch.dtype) -> Tensor:
        """d logits [C, V] of sum grad logprobs: at v, the gradients of the targets that are v, less total p[v].

        Made in float32 and rounded once to the type that is asked for. At the likeliest token it is total (1 - p) less
        the gradients of the other targets, so that what is small is not what is left of a difference.
        """
        targets_CK, own_CK, total_C1 = _sum_equal(targets_CK, grad_CK)
        d_logits_CV = _scaled_softmax(self.logits_CV, self.peak_C, self.rest_C, -total_C1[:, 0], dtype)
        at_top_CK = total_C1 * (self.rest_C / (1 + self.rest_C))[:, None] - (total_C1 - own_CK)
        elsewhere_CK = own_CK - total_C1 * torch.exp(self.logprobs(targets_CK))
        found_CK = torch.where(targets_CK == self.top_C[:, None], at_top_CK, elsewhere_CK)
        return d_logits_CV.scatter_(1, targets_CK, found_CK.to(d_logits_CV.dtype))


def _logits_gradient(
    logits_CV: Tensor,
    targets_CK: Tensor,
    grad_CK: Tensor,
    dtype: torch.dtype,
    softcap: float | None,
    temperature: float,
) -> Tensor:
    """d z [C, V], rounded once to `dtype`, of `_logits`: the slope of a cap is (1 - (z T / c)^2) / T, else 1 / T."""
    softmax = _Softmax.of(logits_CV)
    grad_CK = grad_CK / temperature
    if softcap is None:
        return softmax.logits_gradient(targets_CK, grad_CK, dtype)
    d_capped_CV = softmax.logits_gradient(targets_CK, grad_CK, torch.float32)
    return _uncapped(logits_CV, d_capped_CV, softcap / temperature, dtype)


@fused
def _uncapped(logits_CV: Tensor, d_capped_CV: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    shares_CV = logits_CV.float() / softcap
    return (d_capped_CV * (1 - shares_CV.square())).to(dtype)


def _sum_equal(targets_CK: Tensor, grad_CK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The targets of each position sorted, beside each the summed gradient of all that equal it; the total [C, 1].

    Where all targets with a gradient are one, it is the total to the bit.
    """
    sorted_CK, order_CK = targets_CK.sort(dim=1)
    group_CK = functional.pad((sorted_CK[:, 1:] != sorted_CK[:, :-1]).cumsum(dim=1), (1, 0))
    sums_CK = torch.zeros_like(grad_CK).scatter_add_(1, group_CK, grad_CK.gather(1, order_CK))
    return sorted_CK, sums_CK.gather(1, group_CK), sums_CK.sum(dim=1, keepdim=True)


@fused
def _top_peak_rest(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As _Softmax holds them."""
    values_CV = logits_CV.float()
    peak_C, top_C = values_CV.max(dim=-1)
    shares_CV = torch.exp(values_CV - peak_C[:, None])
    is_other_CV = torch.arange(values_CV.shape[1], device=values_CV.device) != top_C[:, None]
    return top_C, peak_C, torch.where(is_other_CV, shares_CV, 0.0).sum(dim=-1)


@fused
def _scaled_softmax(logits_CV: Tensor, peak_C: Tensor, rest_C: Tensor, scale_C: Tensor, dtype: torch.dtype) -> Tensor:
    """scale softmax(logits), [C, V], rounded once to `dtype`."""
    shares_CV = torch.exp(logits_CV.float() - peak_C[:, None])
    return (shares_CV * (scale_C / (1 + rest_C))[:, None]).to(dtype)


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
        head_dtype: torch.dtype,
        softcap: float | None,
        temperature: float,
    ) -> Tensor:
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        for start in range(0, hidden_TD.shape[0], chunk_positions):
            rows = slice(start, start + chunk_positions)
            logits_CV, _ = _logits(hidden_TD[rows], weight_VD, lora, head_dtype, softcap, temperature)
            logprobs_TK[rows] = _Softmax.of(logits_CV).logprobs(targets_TK[rows])
        ctx.save_for_backward(hidden_TD, weight_VD, targets_TK)
        ctx.lora, ctx.master_VD, ctx.chunk_positions = lora, master_VD, chunk_positions
        ctx.head_dtype, ctx.softcap, ctx.temperature = head_dtype, softcap, temperature
        return logprobs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_TK = ctx.saved_tensors
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
            logits_CV, low_CR = _logits(hidden_CD, weight_VD, lora, ctx.head_dtype, ctx.softcap, ctx.temperature)
            d_logits_CV = _logits_gradient(
                logits_CV, targets_TK[rows], grad_CK, weight_VD.dtype, ctx.softcap, ctx.temperature
            )
            d_hidden_CD = d_logits_CV @ weight_VD if need_hidden else None
            if lora is not None and low_CR is not None:
                lora.add_gradients(d_logits_CV, hidden_CD, low_CR, d_hidden_CD)
            if d_hidden is not None and d_hidden_CD is not None:
                d_hidden[rows] = d_hidden_CD
            if d_weight is not None:
                add_product(d_weight, d_logits_CV.T, hidden_CD)
        # Autograd rounds it where the weight wants its gradient in its own type.
        passed_on = d_weight if ctx.master_VD is None else None
        return d_hidden, passed_on, *(8 * (None,))
