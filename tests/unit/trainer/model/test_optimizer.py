"""Steps against torch.optim.AdamW, with every hyperparameter changing between them."""

import math

import pytest
import torch

from fovea.wire.errors import InvalidInput
from fovea_trainer.model import optimizer
from fovea_trainer.model.optimizer import Adam, AdamW, clip_factor

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


def test_an_empty_shard_changes_nothing() -> None:
    """A rank's part of a tensor with fewer rows than ranks, such as a tower's class token."""
    weights = [torch.zeros(0, 4), torch.ones(3)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    steps = AdamW(weights)
    assert steps.is_surely_in_bounds(STEPS[0], 1.0)
    assert steps.stays_in_bounds(STEPS[0])
    steps.step(STEPS[0])
    assert (weights[1] < 1).all()


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
        (Adam(learning_rate=100.0, eps=1e10), [1.0, -3e17]),
        (Adam(learning_rate=1e4, beta1=0.0, beta2=0.0), [0.0, 1e10]),
        (Adam(eps=1e-8, beta2=0.999), [1e-30, 1e17]),
    ],
)
def test_ordinary_steps_need_no_trial(adam: Adam, gradient: list[float]) -> None:
    _, ready = _ready(gradient)
    assert ready.is_surely_in_bounds(adam, torch.tensor(gradient).norm().item())
    assert ready.stays_in_bounds(adam)


@pytest.mark.parametrize(
    ("adam", "gradient", "moment"),
    [
        (Adam(beta1=0.0, beta2=0.0, eps=0.0), [1.0, 0.0], 0.0),
        (Adam(eps=1e-46), [0.0, 1.0], 0.0),
        (Adam(learning_rate=9e37, weight_decay=1.0), [1.0, 1.0], 9.0),
        (Adam(learning_rate=1e20, weight_decay=1e20), [1.0, 1.0], 0.0),
        (Adam(learning_rate=1e38, beta1=1 - 1e-16), [1.0, 1.0], 0.0),
        (Adam(), [1.0, 1.0], math.nan),
        (Adam(learning_rate=1e25), [1.0, 1.0], 0.0),
        (Adam(learning_rate=1e6), [0.0, 1.0], 0.0),
        (Adam(learning_rate=1e3, beta1=0.99, beta2=0.5), [0.0, 1e-3], 1e5),
        (Adam(learning_rate=1e5, weight_decay=1.0), [0.0, 0.0], 0.0),
        (Adam(), [1.0, 1e20], 0.0),
    ],
)
def test_a_step_to_weights_out_of_bounds_is_found_and_changes_nothing(
    adam: Adam, gradient: list[float], moment: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "_TRIAL_ELEMENTS", 1)
    weights, ready = _ready(gradient, moment)
    assert not ready.is_surely_in_bounds(adam, torch.tensor(gradient).norm().item())
    assert not ready.stays_in_bounds(adam)
    assert weights.tolist() == [1.0, 1.0]
    try:
        ready.step(adam)
    except RuntimeError as error:
        assert "overflow" in str(error)  # noqa: PT017 - torch's own refusal on a CPU
    else:
        moments = torch.stack([*ready.moments()[0].values()])
        assert not (weights.abs().max() <= optimizer.LARGEST_WEIGHT and moments.isfinite().all()), (
            "the predicted result"
        )


def test_a_step_without_eps_may_be_sound() -> None:
    weights, ready = _ready([1.0, -2.0], 0.5)
    adam = Adam(eps=0.0)
    assert not ready.is_surely_in_bounds(adam, 2.3)
    assert ready.stays_in_bounds(adam)
    assert weights.tolist() == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("hundreds", [40, pytest.param(100, marks=pytest.mark.long)])
def test_thousands_of_random_steps_end_as_foreseen(hundreds: int) -> None:
    """Hyperparameters, gradients and loaded states vary over many magnitudes."""
    draws, sure = torch.Generator().manual_seed(0), 0

    def spread(low: float, high: float, *shape: int) -> torch.Tensor:
        return 10 ** (low + (high - low) * torch.rand(*shape, generator=draws))

    for _ in range(hundreds):
        weights = torch.randn(8, generator=draws)
        stepping = AdamW([weights])
        moments = dict(zip(optimizer.MOMENTS, (spread(-12, 3, 8), spread(-30, 6, 8)), strict=True))
        stepping.load([moments], int(torch.randint(0, 50, (), generator=draws)))
        for _ in range(100):
            beta1, beta2 = 1 - spread(-3, -0.01, 2)
            rate, eps = float(spread(-6, 3, 1)), float(spread(-15, -3, 1))
            adam = Adam(rate, float(beta1), float(beta2), eps, float(spread(-9, -1, 1)) / rate)
            signs = torch.randint(-1, 2, (8,), generator=draws)
            weights.grad = signs * spread(-30, 10, 8)
            surely = bool(stepping.is_surely_in_bounds(adam, float(weights.grad.norm())))
            sure += surely
            stays = surely or bool(stepping.stays_in_bounds(adam))
            stepping.step(adam)
            finite = all(moment.isfinite().all() for moment in stepping.moments()[0].values())
            assert stays is bool(finite and weights.abs().max() <= optimizer.LARGEST_WEIGHT)
            if not stays:
                weights.copy_(torch.randn(8, generator=draws))
    assert sure > 25 * hundreds


@pytest.mark.slow
def test_ordinary_training_is_never_tried_on_copies() -> None:
    """The bound stays small during training and does not grow with the number of steps."""
    draws = torch.Generator().manual_seed(0)
    weights = torch.randn(8, generator=draws)
    stepping = AdamW([weights])
    for number in range(3000):
        adam = Adam(1e-2 if number % 2 else 1e-3, beta2=(0.95, 0.99, 0.999)[number % 3], eps=(1e-8, 1e-12)[number % 2])
        weights.grad = torch.randn(8, generator=draws) * 10 ** (number % 7 - 3)
        assert stepping.is_surely_in_bounds(adam, float(weights.grad.norm()))
        stepping.step(adam)
