"""Chunked log-probabilities against float64, and their gradients against autograd and finite differences."""

import pytest
import torch

from fovea_trainer.model.lora_linear import LoraPair, StackedPair
from fovea_trainer.model.target_logprobs import target_logprobs

T, K, D, V, R = 7, 3, 5, 11, 2
SCALE = 1.7


def _inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"hidden": (T, D), "weight": (V, D), "a": (R, D), "b": (V, R), "direction": (T, K)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def _reference(
    inputs: dict[str, torch.Tensor],
    targets: torch.Tensor,
    lora: bool,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    logits = inputs["hidden"] @ inputs["weight"].T
    if lora:
        logits = logits + SCALE * inputs["hidden"] @ inputs["a"].T @ inputs["b"].T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1).gather(1, targets)


def _pair(given: dict[str, torch.Tensor]) -> LoraPair:
    """Returns a pair that accumulates gradients in its leaves."""
    a, b = given["a"], given["b"]
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    return LoraPair(a, b, a.detach(), b.detach(), a.grad, b.grad, SCALE)


def _targets() -> torch.Tensor:
    targets = torch.randint(0, V, (T, K), generator=torch.Generator().manual_seed(5))
    targets[2] = 4  # the same target three times
    return targets


@pytest.mark.parametrize("chunk", [1, 3, T, 100])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.3])
def test_values_and_gradients(chunk: int, lora: bool, softcap: float | None, temperature: float) -> None:
    targets = _targets()
    exact = {name: tensor.requires_grad_() for name, tensor in _inputs(torch.float64).items()}
    expected = _reference(exact, targets, lora, softcap, temperature)
    (expected * exact["direction"].detach()).sum().backward()
    given = {name: tensor.requires_grad_() for name, tensor in _inputs().items()}
    pair = _pair(given) if lora else None
    found = target_logprobs(
        given["hidden"], given["weight"], pair, targets, chunk, softcap=softcap, temperature=temperature
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (found * given["direction"].detach()).sum().backward()
    for name in ("hidden", "weight", *(("a", "b") if lora else ())):
        torch.testing.assert_close(given[name].grad.double(), exact[name].grad, rtol=1e-4, atol=1e-5)


def _supports(targets: torch.Tensor) -> torch.Tensor:
    """Returns supports: rows of -1 are full; others contain the targets of their position and up to two further ids."""
    rows = torch.full((T, K + 2), -1, dtype=torch.int32)
    for place in (0, 2, 3, 5):
        ids = sorted({*targets[place].tolist(), *[(7, 9), (), (1,), (0, 10)][place % 4]})
        rows[place, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return rows


@pytest.mark.parametrize("chunk", [1, 3, T])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("takes_all", [False, True])
def test_a_support_renormalises_values_and_gradients(
    chunk: int, lora: bool, softcap: float | None, temperature: float, takes_all: bool
) -> None:
    """Compares with plain autograd of logit - logsumexp over each position's own ids, in float64."""
    targets = _targets()
    rows = _supports(targets)
    exact = {name: tensor.requires_grad_() for name, tensor in _inputs(torch.float64).items()}
    direction = exact["direction"].detach().clone()
    direction[3] = 0.0  # a position without gradient
    full = _reference(exact, targets, lora, softcap, temperature)
    every = torch.arange(V)[None].expand(T, V)
    logprobs = _reference(exact, every, lora, softcap, temperature)
    expected = torch.stack(
        [
            full[place] if row[0] < 0 else full[place] - logprobs[place, row[row >= 0].long()].logsumexp(0)
            for place, row in enumerate(rows)
        ]
    )
    (expected * direction).sum().backward()
    given = {name: tensor.requires_grad_() for name, tensor in _inputs().items()}
    pair = _pair(given) if lora else None
    found = target_logprobs(
        given["hidden"], given["weight"], pair, targets, chunk, softcap=softcap, temperature=temperature,
        takes_all=takes_all, support_TM=rows,
    )  # fmt: skip
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (found * direction.float()).sum().backward()
    for name in ("hidden", "weight", *(("a", "b") if lora else ())):
        torch.testing.assert_close(given[name].grad.double(), exact[name].grad, rtol=1e-4, atol=1e-5)


def test_a_support_of_the_target_alone_is_certain() -> None:
    inputs, targets = _inputs(), _targets()[:, :1]
    hidden = inputs["hidden"].requires_grad_()
    found = target_logprobs(hidden, inputs["weight"], None, targets, 2, support_TM=targets.int())
    found.sum().backward()
    assert not found.any()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_the_gradient_of_the_weight_adds_to_its_master() -> None:
    inputs, targets = _inputs(), _targets()
    weight = inputs["weight"].requires_grad_()
    (target_logprobs(inputs["hidden"], weight, None, targets, 3) * inputs["direction"]).sum().backward()
    assert weight.grad is not None
    expected, weight.grad = weight.grad, None
    master = weight.detach().clone()
    for _ in range(2):
        (target_logprobs(inputs["hidden"], weight, master, targets, 3) * inputs["direction"]).sum().backward()
    assert weight.grad is None
    assert master.grad is not None
    torch.testing.assert_close(master.grad, 2 * expected)


def test_gradient_by_finite_differences() -> None:
    inputs, targets, step = _inputs(torch.float64), _targets(), 1e-6
    given = {name: tensor.float().requires_grad_() for name, tensor in inputs.items()}
    pair = _pair(given)
    found = target_logprobs(given["hidden"], given["weight"], pair, targets, 3)
    (found * given["direction"].detach()).sum().backward()
    for name in ("hidden", "a", "b"):
        for place in [(0, 0), (1, 1)]:
            moved = {key: tensor.clone() for key, tensor in inputs.items()}
            moved[name][place] += step
            rise = ((_reference(moved, targets, True) - _reference(inputs, targets, True)) * inputs["direction"]).sum()
            assert given[name].grad[place].item() == pytest.approx(rise.item() / step, rel=1e-3, abs=1e-4)


def test_positions_without_gradient_are_skipped_exactly() -> None:
    inputs, targets = _inputs(), _targets()
    hidden = inputs["hidden"].requires_grad_()
    found = target_logprobs(hidden, inputs["weight"], None, targets, 2)
    weights = torch.zeros(T, K)
    weights[4, 1] = 1.0
    (found * weights).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[4].any()
    assert not hidden.grad[[0, 1, 2, 3, 5, 6]].any()


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.full((2, D), 1e4)
    found = target_logprobs(hidden, _inputs()["weight"], None, torch.zeros(2, 1, dtype=torch.int64), 2)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("head", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [2, 3, 8, 9, 100])
def test_stacked_adapters_give_what_each_gives_alone(chunk: int, head: torch.dtype) -> None:
    """Chunks hold rows of one adapter or several, and the logits are as wide as the weights or wider."""
    generator, rows, count = torch.Generator().manual_seed(1), 4, 3
    hidden, weight, direction = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((rows * count, D), (V, D), (rows * count, 1))
    )
    factors = [torch.randn(count, *shape, generator=generator) for shape in ((R, D), (V, R))]
    targets = torch.randint(0, V, (rows * count, 1), generator=generator)
    tensors = [*factors, *(one.bfloat16() for one in factors), *(torch.zeros_like(one) for one in factors)]
    tensors[0].requires_grad_()
    stacked = StackedPair(*tensors, scale=SCALE, rows=rows)  # type: ignore[misc]
    found = target_logprobs(hidden, weight, stacked, targets, chunk, head, takes_all=True)
    (found * direction).sum().backward()
    for slot in range(count):
        own, part = slice(slot * rows, (slot + 1) * rows), [one[slot].detach().clone() for one in tensors]
        part[4:] = [torch.zeros_like(one) for one in part[4:]]
        part[0].requires_grad_()
        alone = target_logprobs(
            hidden[own],
            weight,
            LoraPair(*part, scale=SCALE),
            targets[own],
            chunk,
            head,
            takes_all=True,  # type: ignore[misc]
        )
        (alone * direction[own]).sum().backward()
        tolerance = {"atol": 2e-2, "rtol": 2e-2} if head == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(found[own], alone, **tolerance)
        torch.testing.assert_close(stacked.a_grad[slot], part[4], atol=5e-2, rtol=2e-2)
        torch.testing.assert_close(stacked.b_grad[slot], part[5], atol=5e-2, rtol=2e-2)
