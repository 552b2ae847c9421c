"""The adapter of one linear module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class LoraPair:
    """y += scale * B (A x).

    Args:
        a: float32 [rank, in].
        b: float32 [out, rank].
        scale: alpha / rank.
    """

    a: Tensor
    b: Tensor
    scale: float

    @classmethod
    def of(cls, a: Tensor | None, b: Tensor | None, scale: float) -> "LoraPair | None":
        """The pair, or None if there is none."""
        return None if a is None or b is None else cls(a, b, scale)


def add_lora(output: Tensor, low: Tensor, pair: LoraPair) -> Tensor:
    """output += scale * low B', in place; all in the type of the output, where `low` is x A', [T, rank]."""
    return output.addmm_(low, pair.b.to(output.dtype).T, alpha=pair.scale)


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, pair: LoraPair) -> Tensor:
    """x W' + bias + scale * (x A') B', with gradients for x and the pair; W and bias are frozen.

    Args:
        x: [..., in], of the type of `weight`.
    """
    apply: Any = _LoraLinear.apply
    result: Tensor = apply(x.reshape(-1, x.shape[-1]), weight, bias, pair.a, pair.b, pair.scale)
    return result.view(*x.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    """Adds in place where autograd would make and sum separate tensors: a tenth of a training step, measured."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = functional.linear(x, a.to(x.dtype))
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.scale = scale
        return add_lora(functional.linear(x, weight, bias), low, LoraPair(a, b, scale))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, a, b = ctx.saved_tensors
        (grad,) = grads
        d_low = (grad @ b.to(grad.dtype)).mul_(ctx.scale)
        d_x = (grad @ weight).addmm_(d_low, a.to(grad.dtype)) if ctx.needs_input_grad[0] else None
        d_a = (d_low.T @ x).to(a.dtype)
        d_b = (grad.T @ low).to(b.dtype).mul_(ctx.scale)
        return d_x, None, None, d_a, d_b, None
