"""The adapter of one linear module, and what it adds to that module's product and gradients.

Shapes: T rows of input, R rank.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class LoraPair:
    """y += scale * B (A x).

    Args:
        a: float32 [rank, in], what is trained.
        b: float32 [out, rank], likewise.
        a_cast: What is computed with: `a` in the type of the model.
        b_cast: Likewise.
        a_grad: float32 [rank, in], to which backward passes add.
        b_grad: Likewise.
        scale: alpha / rank.
    """

    a: Tensor
    b: Tensor
    a_cast: Tensor
    b_cast: Tensor
    a_grad: Tensor
    b_grad: Tensor
    scale: float

    def project(self, x: Tensor) -> Tensor:
        """x A', [T, R]."""
        return functional.linear(x, self.a_cast)

    def add_output(self, output: Tensor, low_TR: Tensor) -> Tensor:
        """output += scale * low B', in place; `low_TR` is x A'."""
        return output.addmm_(low_TR, self.b_cast.T, alpha=self.scale)

    def add_gradients(self, grad: Tensor, x: Tensor, low_TR: Tensor, d_x: Tensor | None) -> None:
        """Adds what follows from the gradient of the output: to `d_x`, and to the gradients of A and B.

        Sums are made in float32; those of A and B are not rounded to the type of the model in between.
        """
        d_low_TR = torch.empty_like(low_TR).addmm_(grad, self.b_cast, beta=0, alpha=self.scale)
        if d_x is not None:
            d_x.addmm_(d_low_TR, self.a_cast)
        add_product(self.a_grad, d_low_TR.T, x)
        add_product(self.b_grad, grad.T, low_TR, self.scale)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left right, summed and given in float32, without a float32 copy of the factors on a GPU."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """total += scale * left right, summed in float32, without a float32 copy of the factors on a GPU."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, alpha=scale, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), alpha=scale)
