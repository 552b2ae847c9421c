"""Linear modules that share an input: their products with what is trained of them, and all gradients, in one go.

What the weights' gradients and an adapter's are added to is float32 and lies ready: they go past autograd and FSDP.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.trainer.lora_pair import LoraPair, add_product

Trained = LoraPair | Tensor
"""What is trained of a module: an adapter of it, or the float32 master of its weight, whose `grad` is added to."""


def shared_products(x: Tensor, *modules: Any) -> Sequence[Tensor]:
    """The outputs of linear modules for one input, with what is trained of them as a LoraInjector says."""
    trained = [module.trained() for module in modules]
    if any(one is None for one in trained):
        return [
            functional.linear(x, module.weight, module.bias) if one is None else products(x, [module], [one])[0]
            for module, one in zip(modules, trained, strict=True)
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
        for one, weight, grad in zip(ctx.trained, saved[:count], grads, strict=True):
            if ctx.needs_input_grad[0]:
                d_x = grad @ weight if d_x is None else d_x.addmm_(grad, weight)
            if isinstance(one, LoraPair):
                one.add_gradients(grad, x, next(lows), d_x)
            else:
                add_product(gradient_of(one), grad.T, x)
        needs_bias = ctx.needs_input_grad[2 + count : 2 + 2 * count]
        d_biases = [grad.sum(0) if needed else None for grad, needed in zip(grads, needs_bias, strict=True)]
        leaves = len(ctx.needs_input_grad) - 2 - 2 * count
        return d_x, None, *[None] * count, *d_biases, *[None] * leaves


def gradient_of(master: Tensor) -> Tensor:
    """The gradient of a float32 tensor, zeros if it has none yet."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad
