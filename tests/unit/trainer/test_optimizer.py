"""Steps against torch.optim.AdamW, with every hyperparameter changing between them."""

import math

import pytest
import torch

from fovea.wire.errors import InvalidInput
from services.trainer.optimizer import Adam, AdamW, clip_factor

STEPS = [
    Adam(1e-2, 0.9, 0.95, 1e-8, 0.1, 0.0),
    Adam(3e-3, 0.8, 0.99, 1e-6, 0.0, 0.5),
    Adam(5e-2, 0.0, 0.9, 1e-12, 0.3, 100.0),
]


def test_three_steps_equal_torch() -> None:
    torch.manual_seed(0)
    start = torch.randn(13)
    ours, theirs = start.clone(), start.clone().requires_grad_()
    optimizer, reference = AdamW([ours]), torch.optim.AdamW([theirs])
    for number, adam in enumerate(STEPS):
        gradient = torch.randn(13, generator=torch.Generator().manual_seed(number))
        ours.grad = gradient * clip_factor(float(gradient.norm()), adam.grad_clip_norm)
        optimizer.step(adam)
        theirs.grad = gradient.clone()
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([theirs], adam.grad_clip_norm)
        for group in reference.param_groups:
            group.update(
                lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
            )
        reference.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_moments_carry_over() -> None:
    torch.manual_seed(1)
    first = torch.randn(4)
    optimizer = AdamW([first])
    first.grad = torch.ones(4)
    optimizer.step(STEPS[0])
    second = first.clone()
    resumed = AdamW([second])
    resumed.load([{name: moment.clone() for name, moment in optimizer.moments()[0].items()}], 1)
    for parameter, one in ((first, optimizer), (second, resumed)):
        parameter.grad = torch.full((4,), -2.0)
        one.step(STEPS[1])
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(("norm", "bound", "factor"), [(10.0, 0.0, 1.0), (10.0, 20.0, 1.0), (10.0, 1.0, 0.1)])
def test_clip_factor(norm: float, bound: float, factor: float) -> None:
    assert clip_factor(norm, bound) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_undefined_values_are_refused(field: str, value: float) -> None:
    values = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0, "grad_clip_norm": 0}
    with pytest.raises(InvalidInput, match=field):
        Adam(**{**values, field: value}).check()
