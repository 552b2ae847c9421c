"""Linear modules with LoRA: products with what is trained of them, and all gradients, in one go.

What an adapter's gradients are added to is float32 and lies ready, likewise for weights that are whole on this rank:
they go past autograd and FSDP. Other weights' gradients are handed to FSDP in float32.

Shapes: T rows of input, R rank, V vocabulary, D hidden size.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
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


Trained = LoraPair | Tensor | None
"""What is trained of a module: an adapter; the float32 master of its weight, whose `grad` is added to; or None: the
weight itself gets the gradient, if it needs one.
"""


def shared_products(x: Tensor, *modules: Any) -> Sequence[Tensor]:
    """The outputs of linear modules for one input, with what is trained of them as a LoraInjector says."""
    trained = [module.trained() for module in modules]
    frozen = [one is None and not module.weight.requires_grad for module, one in zip(modules, trained, strict=True)]
    if any(frozen):
        return [
            functional.linear(x, module.weight, module.bias) if plain else products(x, [module], [one])[0]
            for module, one, plain in zip(modules, trained, frozen, strict=True)
        ]
    return products(x, modules, trained)


def products(x: Tensor, modules: Sequence[nn.Linear], trained: Sequence[Trained]) -> tuple[Tensor, ...]:
    """x W' + bias of each module, plus scale * (x A') B' where an adapter is trained.

    Args:
        x: [..., in], of the type of the weights.
        trained: Of each module. A weight with an adapter gets no gradient.
    """
    apply: Any = _Products.apply
    # A's only make the outputs part of the graph where x is not.
    leaves = [one.a for one in trained if isinstance(one, LoraPair)]
    weights, biases = [module.weight for module in modules], [module.bias for module in modules]
    found: tuple[Tensor, ...] = apply(x.reshape(-1, x.shape[-1]), trained, *weights, *biases, *leaves)
    return tuple(output.view(*x.shape[:-1], -1) for output in found)


class _Products(torch.autograd.Function):
    """Adds in place where autograd would make and sum separate tensors: a tenth of a training step, measured."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trained: Sequence[Trained], *given: Tensor | None) -> tuple[Tensor, ...]:
        count = len(trained)
        weights, biases = given[:count], given[count : 2 * count]
        outputs, lows = [], []
        for one, weight, bias in zip(trained, weights, biases, strict=True):
            assert weight is not None
            output = functional.linear(x, weight, bias)
            if isinstance(one, LoraPair):
                lows.append(one.project(x))
                one.add_output(output, lows[-1])
            outputs.append(output)
        ctx.save_for_backward(x, *weights, *lows)
        ctx.trained = trained
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.trained)
        x, *saved = ctx.saved_tensors
        lows = iter(saved[count:])
        d_x: Tensor | None = None
        d_weights: list[Tensor | None] = [None] * count
        for place, (one, weight, grad) in enumerate(zip(ctx.trained, saved[:count], grads, strict=True)):
            if ctx.needs_input_grad[0]:
                d_x = grad @ weight if d_x is None else d_x.addmm_(grad, weight)
            if isinstance(one, LoraPair):
                one.add_gradients(grad, x, next(lows), d_x)
            elif one is not None:
                add_product(gradient_of(one), grad.T, x)
            elif ctx.needs_input_grad[2 + place]:
                d_weights[place] = product(grad.T, x)
        needs_bias = ctx.needs_input_grad[2 + count : 2 + 2 * count]
        d_biases = [
            grad.sum(0, dtype=torch.float32) if needed else None for grad, needed in zip(grads, needs_bias, strict=True)
        ]
        leaves = len(ctx.needs_input_grad) - 2 - 2 * count
        return d_x, None, *d_weights, *d_biases, *[None] * leaves


def embedding(tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of the weight, [T, D]; its gradient is summed in float32, where a token that is frequent adds up many."""
    apply: Any = _Embedding.apply
    found: Tensor = apply(tokens_T, weight_VD)
    return found


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.row_count = weight_VD.shape[0]
        return functional.embedding(tokens_T, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (tokens_T,) = ctx.saved_tensors
        grad_TD = grads[0].float()
        return None, torch.ops.aten.embedding_dense_backward(grad_TD, tokens_T, ctx.row_count, -1, False)


def gradient_of(master: Tensor) -> Tensor:
    """The gradient of a float32 tensor, zeros if it has none yet."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad
