"""Products of one input with several weights, and their gradients, against autograd."""

import pytest
import torch
from torch import Tensor, nn

from services.trainer.lora_pair import LoraPair
from services.trainer.products import products

SCALE = 1.5


def _pair(module: nn.Linear, rank: int, generator: torch.Generator) -> LoraPair:
    shapes = ((rank, module.in_features), (module.out_features, rank))
    kind = module.weight.dtype
    a, b = (torch.randn(shape, generator=generator).to(kind).float().requires_grad_() for shape in shapes)
    casts = (leaf.detach().to(kind) for leaf in (a, b))
    return LoraPair(a, b, *casts, torch.zeros_like(a), torch.zeros_like(b), SCALE)


def _plain(x: Tensor, module: nn.Linear, pair: LoraPair | None) -> Tensor:
    """In float32, with autograd's own sums."""
    bias = None if module.bias is None else module.bias.float()
    output = nn.functional.linear(x, module.weight.float(), bias)
    return output if pair is None else output + pair.scale * x @ pair.a.T @ pair.b.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_gradients_are_those_of_autograd_and_add_up(dtype: torch.dtype, has_adapters: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    modules = [nn.Linear(24, size, bias=size == 20, dtype=dtype) for size in (16, 20, 8)]
    pairs = [_pair(module, 4, generator) for module in modules]
    masters = [module.weight.detach().to(torch.float32, copy=True) for module in modules]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.3}
    for passes in (1, 2):
        x = torch.randn(2, 9, 24, generator=generator).to(dtype).requires_grad_()
        exact_x = x.detach().float().requires_grad_()
        found = products(x, modules, pairs if has_adapters else masters)
        plain = [_plain(exact_x, *one) for one in zip(modules, pairs if has_adapters else [None] * 3, strict=True)]
        directions = [torch.randn(output.shape, generator=generator).to(dtype) for output in found]
        torch.autograd.backward(found, directions)
        given = [exact_x, *(leaf for pair in pairs for leaf in (pair.a, pair.b))]
        if not has_adapters:
            given = [exact_x, *(module.weight for module in modules)]
        exact = torch.autograd.grad(plain, given, [direction.float() for direction in directions])
        for output, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(output.float(), expected, **tolerance)
        assert x.grad is not None
        torch.testing.assert_close(x.grad.float(), exact[0], **tolerance)
        added = [grad for pair in pairs for grad in (pair.a_grad, pair.b_grad)]
        if not has_adapters:
            added = [master.grad for master in masters if master.grad is not None]
        if passes == 1:
            first = [grad.clone() for grad in added]
            continue
        for grad, before, expected in zip(added, first, exact[1:], strict=True):
            torch.testing.assert_close(grad - before, expected.float(), **tolerance)


def test_biases_get_their_gradients_from_autograd_and_weights_do_not() -> None:
    module = nn.Linear(4, 3)
    master = module.weight.detach().clone()
    (found,) = products(torch.ones(5, 4), [module], [master])
    found.sum().backward()
    torch.testing.assert_close(module.bias.grad, torch.full((3,), 5.0))
    assert module.weight.grad is None
    torch.testing.assert_close(master.grad, torch.full((3, 4), 5.0))
