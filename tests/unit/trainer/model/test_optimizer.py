"""Steps against torch.optim.AdamW, with every hyperparameter changing between them."""

import math

import pytest
import torch

from fovea.wire.errors import InvalidInput
from fovea_services.trainer.model import optimizer
from fovea_services.trainer.model.optimizer import Adam, AdamW, clip_factor

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


def _ready(gradient: list[float], moment: float = 0.0) -> tuple[torch.Tensor, AdamW]:
    weights = torch.ones(len(gradient))
    ready = AdamW([weights])
    ready.load([{name: torch.full_like(weights, moment) for name in optimizer.MOMENTS}], 3)
    weights.grad = torch.tensor(gradient)
    return weights, ready


@pytest.mark.parametrize(
    ("adam", "gradient"),
    [
        (Adam(), [1.0, 0.0]),
        (Adam(learning_rate=1e10, eps=1e10), [1.0, -3e18]),
        (Adam(beta1=0.0, beta2=0.0), [0.0, 1e10]),
    ],
)
def test_ordinary_steps_need_no_trial(adam: Adam, gradient: list[float]) -> None:
    _, ready = _ready(gradient)
    assert ready.cannot_overflow(adam, torch.tensor(gradient).norm().item())


@pytest.mark.parametrize(
    ("adam", "gradient", "moment"),
    [
        (Adam(beta1=0.0, beta2=0.0, eps=0.0), [1.0, 0.0], 0.0),
        (Adam(eps=1e-46), [0.0, 1.0], 0.0),
        (Adam(learning_rate=9e37, weight_decay=1.0), [1.0, 1.0], 9.0),
        (Adam(learning_rate=1e20, weight_decay=1e20), [1.0, 1.0], 0.0),
        (Adam(learning_rate=1e38, beta1=1 - 1e-16), [1.0, 1.0], 0.0),
        (Adam(), [1.0, 1.0], math.nan),
    ],
)
def test_a_step_that_would_not_stay_finite_is_found_and_changes_nothing(
    adam: Adam, gradient: list[float], moment: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "_TRIAL_ELEMENTS", 1)
    weights, ready = _ready(gradient, moment)
    assert not ready.cannot_overflow(adam, torch.tensor(gradient).norm().item())
    assert not ready.stays_finite(adam)
    assert weights.tolist() == [1.0, 1.0]
    try:
        ready.step(adam)
    except RuntimeError as error:
        assert "overflow" in str(error)  # noqa: PT017 - torch's own refusal on a CPU
    else:
        assert not weights.isfinite().all(), "what was foreseen"


def test_a_step_without_eps_may_be_sound() -> None:
    weights, ready = _ready([1.0, -2.0], 0.5)
    adam = Adam(eps=0.0)
    assert not ready.cannot_overflow(adam, 2.3)
    assert ready.stays_finite(adam)
    assert weights.tolist() == [1.0, 1.0]
