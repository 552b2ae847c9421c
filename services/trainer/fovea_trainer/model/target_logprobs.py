"""Log-probabilities of target tokens from hidden states, with the logits of only one chunk of positions in memory.

logprob[t, k] = z[t, y[t, k]] - logsumexp(z[t]) with z = x W' + scale (x A') B'. As in the sampler, z is computed in the
head's dtype, which is float32 or that of the weights. All else is float32. Some families cap z: c tanh(z / c). A
temperature divides z in float32, as in a sampler. Outside the support from which a target was drawn, z is -inf, so that
values and gradients are those of the renormalised distribution. The backward pass recomputes the logits of each chunk.
It skips positions with a gradient of zero, which are most positions in supervised training.

The gradient of a target is 1 - p. If p is near 1, this difference of large numbers is small and would lose its digits.
For the likeliest token, 1 - p is therefore computed as the sum of all other probabilities.

Shapes: T positions, C positions of one chunk, D hidden size, V vocabulary, K targets per position, R rank of the
adapter, M ids in the largest support.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fovea_trainer.model.fused_layers import fused
from fovea_trainer.model.lora_linear import LoraPair, add_product, gradient_of, product


def target_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    trained: LoraPair | Tensor | None,
    targets_TK: Tensor,
    chunk_positions: int,
    head_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    takes_all: bool = False,
    support_TM: Tensor | None = None,
) -> Tensor:
    """Returns log-probabilities, float32 [T, K], with gradients of the hidden states, the weight and the adapter.

    Args:
        hidden_TD: Hidden states.
        weight_VD: Unembedding weight.
        trained: An adapter of the weight, the weight's float32 master [V, D], or None. With a master, the weight's
            gradient is added to the master's `grad`.
        targets_TK: int64, target tokens.
        chunk_positions: Positions per chunk.
        head_dtype: Dtype of the logits, float32 or that of the weight; None means that of the weight.
        softcap: c, which no logit exceeds; None for no cap.
        temperature: Divisor of the logits, applied after the cap.
        takes_all: True to compute all positions in the backward pass, and not only those with a gradient. Selecting
            positions would make the host wait for the device. Required for a `StackedPair`.
        support_TM: int32, the ids from which each position's targets were drawn, then -1; a row of -1 is the whole
            vocabulary. None means that all rows are.
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
        takes_all,
        support_TM,
    )
    return result


def _chunks(count: int, chunk_positions: int, lora: LoraPair | None) -> Iterator[slice]:
    """Divides positions 0 to `count` into chunks, in order."""
    size = lora.chunk(chunk_positions) if lora is not None else chunk_positions
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _logits(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    lora: LoraPair | None,
    dtype: torch.dtype,
    softcap: float | None,
    temperature: float,
    support_CM: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns logits [C, V], capped, divided and cut to the support; and x A' [C, R] in the weight's dtype, or None.

    The logits have `dtype`, but are float32 with a temperature other than 1.
    """
    logits_CV, low_CR = _products(hidden_CD, weight_VD, lora, dtype)
    if softcap is not None:
        logits_CV.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        logits_CV = logits_CV.float().div_(temperature)
    if support_CM is not None:
        logits_CV.masked_fill_(_outside(support_CM, logits_CV.shape[1]), -torch.inf)
    return logits_CV, low_CR


def _outside(support_CM: Tensor, vocabulary_size: int) -> Tensor:
    """Returns a mask of the tokens outside the support of each position, bool [C, V]."""
    is_id_CM = support_CM >= 0
    outside = torch.ones(len(support_CM), vocabulary_size + 1, dtype=torch.bool, device=support_CM.device)
    outside.scatter_(1, torch.where(is_id_CM, support_CM, vocabulary_size).long(), False)
    return outside[:, :vocabulary_size] & is_id_CM[:, :1]


def _products(
    hidden_CD: Tensor, weight_VD: Tensor, lora: LoraPair | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    is_wider = dtype != weight_VD.dtype
    logits_CV = product(hidden_CD, weight_VD.T) if is_wider else hidden_CD @ weight_VD.T
    if lora is None:
        return logits_CV, None
    low_CR = lora.project(hidden_CD)
    if is_wider:
        lora.add_wide_output(logits_CV, low_CR)
    else:
        lora.add_output(logits_CV, low_CR)
    return logits_CV, low_CR


@dataclass(frozen=True)
class _Softmax:
    """softmax(z) of each row: p[v] = exp(z[v] - z[top]) / (1 + rest). It stays accurate if one p is almost 1.

    Args:
        logits_CV: z.
        top_C: int64, the likeliest token of each row; one of them if there are several.
        peak_C: float32, z[top].
        rest_C: float32, the sum of exp(z - z[top]) over all other tokens.
    """

    logits_CV: Tensor
    top_C: Tensor
    peak_C: Tensor
    rest_C: Tensor

    @classmethod
    def of(cls, logits_CV: Tensor) -> "_Softmax":
        """Computes the statistics of each row. Refers to the logits without copying them."""
        return cls(logits_CV, *_top_peak_rest(logits_CV))

    def logprobs(self, targets_CK: Tensor) -> Tensor:
        """Returns log p of the targets, float32 [C, K]."""
        logits_CK = self.logits_CV.gather(1, targets_CK).float()
        return logits_CK - self.peak_C[:, None] - torch.log1p(self.rest_C)[:, None]

    def logits_gradient(self, targets_CK: Tensor, grad_CK: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of the logits, [C, V], given the gradients of the targets' log-probabilities.

        Let `total` be the sum of the targets' gradients. At token v the result is the sum of the gradients of targets
        equal to v, minus total p[v]. At the likeliest token this equals total (1 - p) minus the gradients of the other
        targets; this form avoids a small difference of large values. Computed in float32 and rounded once to `dtype`.

        Args:
            targets_CK: int64, the targets.
            grad_CK: float32, gradients of their log-probabilities.
            dtype: Dtype of the result.
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
    """Returns the gradient of x W' before cap and temperature, [C, V], rounded once to `dtype`.

    The slope of cap and temperature is (1 - (z T / c)^2) / T, where z is the capped and divided logit and T is the
    temperature. Without a cap the slope is 1 / T.
    """
    softmax = _Softmax.of(logits_CV)
    grad_CK = grad_CK / temperature
    if softcap is None:
        return softmax.logits_gradient(targets_CK, grad_CK, dtype)
    d_capped_CV = softmax.logits_gradient(targets_CK, grad_CK, torch.float32)
    return _uncapped(logits_CV, d_capped_CV, softcap / temperature, dtype)


@fused
def _uncapped(logits_CV: Tensor, d_capped_CV: Tensor, softcap: float, dtype: torch.dtype) -> Tensor:
    shares_CV = (logits_CV.float() / softcap).clamp(min=-1)  # outside a support, logits are -inf
    return (d_capped_CV * (1 - shares_CV.square())).to(dtype)


def _sum_equal(targets_CK: Tensor, grad_CK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the targets of each position and sums the gradients of equal targets.

    If all targets with a gradient are the same token, its sum equals the total bit for bit.

    Args:
        targets_CK: int64, the targets.
        grad_CK: float32, their gradients.

    Returns:
        The sorted targets [C, K], for each the summed gradient of all targets equal to it [C, K], and the total [C, 1].
    """
    sorted_CK, order_CK = targets_CK.sort(dim=1)
    group_CK = functional.pad((sorted_CK[:, 1:] != sorted_CK[:, :-1]).cumsum(dim=1), (1, 0))
    sums_CK = torch.zeros_like(grad_CK).scatter_add_(1, group_CK, grad_CK.gather(1, order_CK))
    return sorted_CK, sums_CK.gather(1, group_CK), sums_CK.sum(dim=1, keepdim=True)


@fused
def _top_peak_rest(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns top, peak and rest of each row, as `_Softmax` holds them."""
    values_CV = logits_CV.float()
    peak_C, top_C = values_CV.max(dim=-1)
    shares_CV = torch.exp(values_CV - peak_C[:, None])
    is_other_CV = torch.arange(values_CV.shape[1], device=values_CV.device) != top_C[:, None]
    return top_C, peak_C, torch.where(is_other_CV, shares_CV, 0.0).sum(dim=-1)


@fused
def _scaled_softmax(logits_CV: Tensor, peak_C: Tensor, rest_C: Tensor, scale_C: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns scale softmax(logits), [C, V], rounded once to `dtype`."""
    shares_CV = torch.exp(logits_CV.float() - peak_C[:, None])
    return (shares_CV * (scale_C / (1 + rest_C))[:, None]).to(dtype)


class _TargetLogprobs(torch.autograd.Function):
    """The autograd function of `target_logprobs`.

    An adapter's A is an argument only to make the output part of the graph; see `lora_linear.products`.
    """

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
        takes_all: bool,
        support_TM: Tensor | None,
    ) -> Tensor:
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        for rows in _chunks(len(hidden_TD), chunk_positions, lora):
            part = lora and lora.part(rows)
            support_CM = None if support_TM is None else support_TM[rows]
            logits_CV, _ = _logits(hidden_TD[rows], weight_VD, part, head_dtype, softcap, temperature, support_CM)
            logprobs_TK[rows] = _Softmax.of(logits_CV).logprobs(targets_TK[rows])
        ctx.save_for_backward(hidden_TD, weight_VD, targets_TK, support_TM)
        ctx.lora, ctx.master_VD, ctx.chunk_positions = lora, master_VD, chunk_positions
        ctx.head_dtype, ctx.softcap, ctx.temperature, ctx.takes_all = head_dtype, softcap, temperature, takes_all
        return logprobs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, targets_TK, support_TM = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        lora: LoraPair | None = ctx.lora
        grad_TK = grads[0]
        d_hidden = torch.zeros_like(hidden_TD) if need_hidden else None
        d_weight = None
        if need_weight and ctx.master_VD is not None:
            d_weight = gradient_of(ctx.master_VD)
        elif need_weight:
            d_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
        chunks: Iterable[slice | Tensor]
        if ctx.takes_all:
            chunks = _chunks(len(grad_TK), ctx.chunk_positions, lora)
        else:
            chunks = torch.split(grad_TK.abs().sum(dim=1).nonzero().squeeze(1), ctx.chunk_positions)
        for rows in chunks:
            hidden_CD, grad_CK = hidden_TD[rows], grad_TK[rows]
            part = lora and lora.part(rows)
            support_CM = None if support_TM is None else support_TM[rows]
            logits_CV, low_CR = _logits(
                hidden_CD, weight_VD, part, ctx.head_dtype, ctx.softcap, ctx.temperature, support_CM
            )
            d_logits_CV = _logits_gradient(
                logits_CV, targets_TK[rows], grad_CK, weight_VD.dtype, ctx.softcap, ctx.temperature
            )
            d_hidden_CD = d_logits_CV @ weight_VD if need_hidden else None
            if part is not None and low_CR is not None:
                part.add_gradients(d_logits_CV, hidden_CD, low_CR, d_hidden_CD)
            if d_hidden is not None and d_hidden_CD is not None:
                d_hidden[rows] = d_hidden_CD
            if d_weight is not None:
                add_product(d_weight, d_logits_CV.T, hidden_CD)
        # Autograd rounds the gradient if the weight's `grad_dtype` is the dtype of the weight.
        passed_on = d_weight if ctx.master_VD is None else None
        return d_hidden, passed_on, *(10 * (None,))
