"""Linear modules with LoRA: the product, the adapter's contribution and all gradients in one autograd function.

Gradients of an adapter are added to preallocated float32 buffers, without autograd or FSDP. So are the gradients of a
weight that this rank holds whole. Gradients of other weights are passed to FSDP in float32.

Shapes: T rows of input, R rank, V vocabulary, D hidden size, K adapters, P rows of one adapter, N inputs, O outputs.
"""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

UNEMBEDDING = "lm_head"
"""The last name of the unembedding's path, which is longer in some models."""


@dataclass(frozen=True)
class LoraPair:
    """The two LoRA factors of a linear module: y += scale * B (A x).

    Args:
        a: float32 [rank, in], trained.
        b: float32 [out, rank], trained.
        a_cast: `a` in the dtype of the model, used in products.
        b_cast: `b` in the dtype of the model, used in products.
        a_grad: float32 [rank, in], to which backward passes add.
        b_grad: float32 [out, rank], to which backward passes add.
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
        """Returns x A', [T, R]."""
        return functional.linear(x, self.a_cast)

    def add_output(self, output: Tensor, low_TR: Tensor) -> Tensor:
        """Adds scale * low B' to the output in place, where `low_TR` is x A'."""
        return output.addmm_(low_TR, self.b_cast.T, alpha=self.scale)

    def add_wide_output(self, output: Tensor, low_TR: Tensor) -> None:
        """Adds scale * low B' to a float32 output in place."""
        add_product(output, low_TR, self.b_cast.T, self.scale)

    def add_gradients(self, grad: Tensor, x: Tensor, low_TR: Tensor, d_x: Tensor | None) -> None:
        """Adds the adapter's gradients, given the gradient of the output: to `d_x`, and to the gradients of A and B.

        Sums are computed in float32. The gradients of A and B are never rounded to the model's dtype.

        Args:
            grad: [T, out], gradient of the output.
            x: [T, in], the input.
            low_TR: x A'.
            d_x: [T, in], gradient of the input, or None if not needed.
        """
        d_low_TR = torch.empty_like(low_TR).addmm_(grad, self.b_cast, beta=0, alpha=self.scale)
        if d_x is not None:
            d_x.addmm_(d_low_TR, self.a_cast)
        add_product(self.a_grad, d_low_TR.T, x)
        add_product(self.b_grad, grad.T, low_TR, self.scale)

    def chunk(self, positions: int) -> int:
        """Returns the largest number of positions up to `positions` into which the rows may be divided; see `part`."""
        return positions

    def part(self, rows: slice | Tensor) -> "LoraPair":
        """Returns the pair that applies to these rows."""
        return self


def unembedding_of(pairs: Mapping[str, LoraPair]) -> LoraPair | None:
    """Returns the pair of the unembedding among pairs by path, or None if it is not adapted."""
    return next((pair for name, pair in pairs.items() if name.rpartition(".")[2] == UNEMBEDDING), None)


@dataclass(frozen=True)
class StackedPair(LoraPair):
    """The factors of K adapters of one layout. Adapter k applies to rows k P to (k + 1) P of K P rows.

    The tensors are those of `LoraPair` with a first dimension of size K.

    Args:
        rows: P.
    """

    rows: int

    def project(self, x: Tensor) -> Tensor:
        return torch.bmm(self._by_adapter(x), self.a_cast.mT).flatten(0, 1)

    def add_output(self, output: Tensor, low_TR: Tensor) -> Tensor:
        self._by_adapter(output).baddbmm_(self._by_adapter(low_TR), self.b_cast.mT, alpha=self.scale)
        return output

    def add_wide_output(self, output: Tensor, low_TR: Tensor) -> None:
        _add_batched_product(self._by_adapter(output), self._by_adapter(low_TR), self.b_cast.mT, self.scale)

    def add_gradients(self, grad: Tensor, x: Tensor, low_TR: Tensor, d_x: Tensor | None) -> None:
        grad_KPO, x_KPN, low_KPR = map(self._by_adapter, (grad, x, low_TR))
        d_low_KPR = torch.baddbmm(torch.empty_like(low_KPR), grad_KPO, self.b_cast, beta=0, alpha=self.scale)
        if d_x is not None:
            self._by_adapter(d_x).baddbmm_(d_low_KPR, self.a_cast)
        _add_batched_product(self.a_grad, d_low_KPR.mT, x_KPN)
        _add_batched_product(self.b_grad, grad_KPO.mT, low_KPR, self.scale)

    def chunk(self, positions: int) -> int:
        """Returns a multiple or a divisor of P, so that no chunk has rows of two adapters in part."""
        if positions >= self.rows:
            return positions - positions % self.rows
        return next(size for size in range(positions, 0, -1) if self.rows % size == 0)

    def part(self, rows: slice | Tensor) -> LoraPair:
        if not isinstance(rows, slice):
            raise TypeError("rows of stacked adapters must be consecutive")
        first, end = rows.start // self.rows, -(-rows.stop // self.rows)
        tensors = (self.a, self.b, self.a_cast, self.b_cast, self.a_grad, self.b_grad)
        a, b, a_cast, b_cast, a_grad, b_grad = (tensor[first:end] for tensor in tensors)
        if end - first == 1:
            return LoraPair(a[0], b[0], a_cast[0], b_cast[0], a_grad[0], b_grad[0], self.scale)
        return StackedPair(a, b, a_cast, b_cast, a_grad, b_grad, self.scale, self.rows)

    def _by_adapter(self, x: Tensor) -> Tensor:
        return x.view(-1, self.rows, x.shape[1])


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left right in float32. On a GPU this makes no float32 copies of the operands."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _biased_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = product(x, weight.T)
    return output if bias is None else output.add_(bias)


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Adds scale * left right to `total`, summed in float32. On a GPU this makes no float32 copies of the operands."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, alpha=scale, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), alpha=scale)


def _add_batched_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Adds to each matrix of `total` what `add_product` adds, on a CPU with the same bits."""
    if total.is_cuda and left.dtype != total.dtype:
        total.add_(torch.bmm(left, right, out_dtype=total.dtype), alpha=scale)
    else:
        total.baddbmm_(left.to(total.dtype), right.to(total.dtype), alpha=scale)


Trained = LoraPair | Tensor | None
"""The trained tensor of a module: an adapter; or the float32 master of its weight, to the `grad` of which gradients are
added; or None, in which case the weight itself receives a gradient if it requires one.
"""


def shared_products(x: Tensor, *modules: Any) -> Sequence[Tensor]:
    """Returns the outputs of linear modules for one input. A LoraInjector has activated their trained tensors."""
    trained = [module.trained() for module in modules]
    is_wide = x.is_cuda and getattr(modules[0], "is_wide", False)
    frozen = [one is None and not module.weight.requires_grad for module, one in zip(modules, trained, strict=True)]
    if any(frozen) and not is_wide:
        return [
            functional.linear(x, module.weight, module.bias) if plain else products(x, [module], [one])[0]
            for module, one, plain in zip(modules, trained, frozen, strict=True)
        ]
    return products(x, modules, trained, is_wide)


def products(
    x: Tensor, modules: Sequence[nn.Linear], trained: Sequence[Trained], is_wide: bool = False
) -> tuple[Tensor, ...]:
    """Returns x W' + bias of each module, plus scale * (x A') B' for a module with an adapter.

    Args:
        x: [..., in], in the dtype of the weights.
        modules: The modules.
        trained: The trained tensor of each module. A weight with an adapter receives no gradient.
        is_wide: Return float32, without rounding to the dtype of the weights.

    Returns:
        [..., out] of each module.
    """
    apply: Any = _Products.apply
    # Passing A to autograd makes the outputs part of the graph even if x is not.
    leaves = [one.a for one in trained if isinstance(one, LoraPair)]
    weights, biases = [module.weight for module in modules], [module.bias for module in modules]
    found: tuple[Tensor, ...] = apply(x.reshape(-1, x.shape[-1]), trained, is_wide, *weights, *biases, *leaves)
    return tuple(output.view(*x.shape[:-1], -1) for output in found)


def widen(*modules: Any) -> None:
    """Makes linear modules return float32 on a GPU, as the sampler's do (`vllm_patches/float32_residual.py`)."""
    for module in modules:
        module.is_wide = True


class _Products(torch.autograd.Function):
    """The autograd function of `products`. It accumulates in place; autograd would allocate and sum separate tensors.

    This saves a tenth of a training step.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, trained: Sequence[Trained], is_wide: bool, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(trained)
        weights, biases = given[:count], given[count : 2 * count]
        outputs, lows = [], []
        for one, weight, bias in zip(trained, weights, biases, strict=True):
            assert weight is not None
            output = _biased_product(x, weight, bias) if is_wide else functional.linear(x, weight, bias)
            if isinstance(one, LoraPair):
                lows.append(one.project(x))
                add: Any = one.add_wide_output if is_wide else one.add_output
                add(output, lows[-1])
            outputs.append(output)
        needs_x = any(one is not None for one in trained) or any(ctx.needs_input_grad[3 : 3 + count])
        ctx.save_for_backward(x if needs_x else None, *weights, *lows)
        ctx.trained = trained
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.trained)
        x, *saved = ctx.saved_tensors
        lows = iter(saved[count:])
        d_x: Tensor | None = None
        d_weights: list[Tensor | None] = [None] * count
        for place, (one, weight, wide_grad) in enumerate(zip(ctx.trained, saved[:count], grads, strict=True)):
            grad = wide_grad.to(weight.dtype)
            if ctx.needs_input_grad[0]:
                d_x = grad @ weight if d_x is None else d_x.addmm_(grad, weight)
            if isinstance(one, LoraPair):
                one.add_gradients(grad, x, next(lows), d_x)
            elif one is not None:
                add_product(gradient_of(one), grad.T, x)
            elif ctx.needs_input_grad[3 + place]:
                d_weights[place] = product(grad.T, x)
        needs_bias = ctx.needs_input_grad[3 + count : 3 + 2 * count]
        d_biases = [
            grad.sum(0, dtype=torch.float32) if needed else None for grad, needed in zip(grads, needs_bias, strict=True)
        ]
        leaves = len(ctx.needs_input_grad) - 3 - 2 * count
        return d_x, None, None, *d_weights, *d_biases, *[None] * leaves


def embedding(tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
    """Returns the weight's rows of the tokens, [T, D].

    The gradient of the weight is summed in float32, because a frequent token adds many terms.
    """
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
    """Returns the gradient of a float32 tensor; sets it to zeros if there is none yet."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad
