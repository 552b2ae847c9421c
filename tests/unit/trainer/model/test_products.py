"""Products of one input with several weights, and their gradients, against autograd in float64.

Errors are relative to the sum of absolute values: by that measure sums that almost cancel are as exact as others, for
any summation order.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fovea_trainer.model.lora_linear import LoraPair, StackedPair, embedding, products

SCALE = 1.5
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
"""A sum of 24 numbers in float32; four bfloat16 roundings in a row."""
KINDS = ["adapters", "masters", "weights"]


def _modules(dtype: torch.dtype, generator: torch.Generator) -> list[nn.Linear]:
    modules = [nn.Linear(24, size, bias=size == 20, dtype=dtype) for size in (16, 20, 8)]
    for module in modules:
        for parameter in module.parameters():
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
            parameter.grad_dtype = torch.float32
    return modules


def _pair(module: nn.Linear, generator: torch.Generator) -> LoraPair:
    shapes = ((4, module.in_features), (module.out_features, 4))
    kind = module.weight.dtype
    a, b = (torch.randn(shape, generator=generator).to(kind).float().requires_grad_() for shape in shapes)
    casts = (leaf.detach().to(kind) for leaf in (a, b))
    return LoraPair(a, b, *casts, torch.zeros_like(a), torch.zeros_like(b), SCALE)


def _exact(
    x: Tensor, modules: Sequence[nn.Linear], pairs: Sequence[LoraPair], directions: Sequence[Tensor], positive: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns outputs and gradients of x and of each module: weight, optional bias, and A and B for pairs.

    With all numbers positive, every sum is a sum of absolute values.
    """

    def leaf(given: Tensor) -> Tensor:
        values = given.detach().double()
        return (values.abs() if positive else values).requires_grad_()

    leaves, outputs = [exact_x := leaf(x)], []
    for place, module in enumerate(modules):
        own = [leaf(parameter) for parameter in module.parameters()]
        output = nn.functional.linear(exact_x, *own)
        if pairs:
            own += (pair := [leaf(pairs[place].a), leaf(pairs[place].b)])
            output = output + SCALE * exact_x @ pair[0].T @ pair[1].T
        leaves += own
        outputs.append(output)
    return outputs, list(torch.autograd.grad(outputs, leaves, [leaf(direction).detach() for direction in directions]))


def _assert_near(found: Sequence[Any], exact: Sequence[Tensor], magnitudes: Sequence[Tensor], bound: float) -> None:
    for values, expected, magnitude in zip(found, exact, magnitudes, strict=True):
        assert ((values.double() - expected).abs() <= bound * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_wide", [False, True])
def test_gradients_are_those_of_autograd_and_add_up(is_wide: bool, kind: str, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    modules, bound = _modules(dtype, generator), BOUNDS[dtype]
    pairs = [_pair(module, generator) for module in modules] if kind == "adapters" else []
    masters = [module.weight.detach().to(torch.float32, copy=True) for module in modules]
    trained = {"adapters": pairs, "masters": masters, "weights": [None] * 3}[kind]
    sums: list[list[Tensor]] = []
    for _ in range(2):
        x = torch.randn(2, 9, 24, generator=generator).to(dtype).requires_grad_()
        found = products(x, modules, trained, is_wide)  # type: ignore[arg-type]
        assert {output.dtype for output in found} == {torch.float32 if is_wide else dtype}
        directions = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in found]
        torch.autograd.backward(found, directions)
        outputs, gradients = _exact(x, modules, pairs, directions, positive=False)
        output_sizes, sizes = _exact(x, modules, pairs, directions, positive=True)
        _assert_near(found, outputs, output_sizes, BOUNDS[torch.float32] if is_wide and not pairs else bound)
        _assert_near([x.grad], gradients[:1], sizes[:1], bound)
        sums = [*sums, gradients[1:], sizes[1:]]
    exact, magnitude = ([one + other for one, other in zip(*sums[place::2], strict=True)] for place in (0, 1))
    own = []
    for place, module in enumerate(modules):
        if kind == "adapters":
            # A weight with an adapter gets no gradient.
            assert module.weight.grad is None
            module.weight.grad = exact[len(own)].float()
        own += [masters[place].grad if kind == "masters" else module.weight.grad]
        own += [] if module.bias is None else [module.bias.grad]
        own += [pairs[place].a_grad, pairs[place].b_grad] if kind == "adapters" else []
    assert all(grad is not None and grad.dtype == torch.float32 for grad in own)
    _assert_near(own, exact, magnitude, bound)


def test_a_frequent_token_s_embedding_adds_up_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (4096,), generator=generator)
    tokens[:2048] = 7
    weight = torch.randn(50, 16, generator=generator).bfloat16().requires_grad_()
    weight.grad_dtype = torch.float32
    found = embedding(tokens, weight)
    assert torch.equal(found, weight[tokens])
    direction = (torch.randn(4096, 16, generator=generator) + 0.2).bfloat16()
    found.backward(direction)
    exact = torch.zeros(50, 16, dtype=torch.float64).index_add_(0, tokens, direction.double())
    assert weight.grad is not None
    assert ((weight.grad - exact).norm(dim=1) / exact.norm(dim=1)).max() < 1e-5


def test_biases_get_their_gradients_from_autograd_and_weights_do_not() -> None:
    module = nn.Linear(4, 3)
    master = module.weight.detach().clone()
    (found,) = products(torch.ones(5, 4), [module], [master])
    found.sum().backward()
    torch.testing.assert_close(module.bias.grad, torch.full((3,), 5.0))
    assert module.weight.grad is None
    torch.testing.assert_close(master.grad, torch.full((3, 4), 5.0))


def test_stacked_adapters_add_float32_outputs_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    pairs = [_pair(nn.Linear(24, 16, bias=False, dtype=torch.bfloat16), generator) for _ in range(3)]
    names = ("a", "b", "a_cast", "b_cast", "a_grad", "b_grad")
    stacked = StackedPair(*(torch.stack([getattr(pair, name) for pair in pairs]) for name in names), SCALE, 5)
    x, output = (torch.randn(15, size, generator=generator) for size in (24, 16))
    expected = output.clone()
    stacked.add_wide_output(output, stacked.project(x.bfloat16()))
    for place, pair in enumerate(pairs):
        rows = slice(5 * place, 5 * place + 5)
        pair.add_wide_output(expected[rows], pair.project(x[rows].bfloat16()))
    torch.testing.assert_close(output, expected)
