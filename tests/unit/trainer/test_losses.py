"""Losses against independent float64 formulas, value and gradient."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fovea.wire.errors import InvalidInput
from services.trainer.losses import LOSSES, loss_of

Arrays = dict[str, np.ndarray]
GENERATOR = np.random.default_rng(0)
SHAPE = (9, 2)
LOGPROBS = -GENERATOR.exponential(size=SHAPE)
INPUTS: Arrays = {
    "weights": GENERATOR.normal(size=SHAPE),
    "logprobs": LOGPROBS + GENERATOR.normal(scale=0.5, size=SHAPE),
    "advantages": GENERATOR.normal(size=SHAPE),
}


def _cross_entropy(logprobs: np.ndarray, given: Arrays) -> float:
    return float(-np.sum(given["weights"] * logprobs))


def _importance_sampling(logprobs: np.ndarray, given: Arrays) -> float:
    return float(-np.sum(given["weights"] * np.exp(logprobs - given["logprobs"]) * given["advantages"]))


REFERENCES: dict[str, Callable[[np.ndarray, Arrays], float]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
}


def test_every_loss_has_a_reference() -> None:
    assert set(REFERENCES) == set(LOSSES)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_value_and_gradient(name: str) -> None:
    loss = LOSSES[name]
    names = [given.name for given in loss.inputs]
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float32, requires_grad=True)
    given = {key: torch.tensor(INPUTS[key], dtype=torch.float32) for key in names}
    value = loss.compute(logprobs, given, loss.resolve_config({}))
    assert value.loss.item() == pytest.approx(REFERENCES[name](LOGPROBS, INPUTS), rel=1e-5)
    value.loss.backward()
    assert logprobs.grad is not None
    step = 1e-6
    for place in np.ndindex(SHAPE):
        moved = LOGPROBS.copy()
        moved[place] += step
        slope = (REFERENCES[name](moved, INPUTS) - REFERENCES[name](LOGPROBS, INPUTS)) / step
        assert logprobs.grad[place].item() == pytest.approx(slope, rel=1e-3, abs=1e-5)
    assert all(metric.count(":") == 1 for metric in value.metrics)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_filler_is_zero(name: str) -> None:
    loss = LOSSES[name]
    logprobs = torch.full((1, 1), -50.0, requires_grad=True)
    value = loss.compute(logprobs, {given.name: torch.zeros(1, 1) for given in loss.inputs}, loss.resolve_config({}))
    value.loss.backward()
    assert value.loss.item() == 0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


def test_positions_without_advantage_cannot_overflow() -> None:
    logprobs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    given = {
        "logprobs": torch.tensor([[-1.0], [-1e4]]),
        "advantages": torch.tensor([[2.0], [0.0]]),
        "weights": torch.ones(2, 1),
    }
    value = LOSSES["importance_sampling"].compute(logprobs, given, {})
    value.loss.backward()
    assert value.loss.item() == pytest.approx(-2.0)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInput, match="known: cross_entropy, importance_sampling"):
        loss_of("reinforce")
    with pytest.raises(InvalidInput, match=r"loss_config\.beta"):
        LOSSES["cross_entropy"].resolve_config({"beta": 1.0})
