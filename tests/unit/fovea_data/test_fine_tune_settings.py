"""The steps that fine-tuning settings give, and the stored state."""

import dataclasses
import pathlib
from typing import Any

import pytest

from fovea.wire.errors import InvalidInput
from fovea_data import FineTuneSettings
from fovea_data.fine_tune_progress import FineTuneState


def test_a_state_keeps_the_best_loss_to_the_bit(tmp_path: pathlib.Path) -> None:
    state = FineTuneState.begin_or_resume(tmp_path / "state.json", {"model": "tiny"})
    state.step, state.weights, state.best_loss = 30, "tinker://a/sampler_weights/step-30", 0.1 + 0.2
    state.save(tmp_path / "state.json")
    assert FineTuneState.begin_or_resume(tmp_path / "state.json", {"model": "tiny"}) == state


def test_the_rate_rises_and_falls() -> None:
    settings = FineTuneSettings(warm_up=0.1)
    rates = [settings.rate_factor(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(rates[9], abs=0.03)
    assert sorted(rates[10:], reverse=True) == rates[10:]
    assert rates[-1] < 0.001


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 0}, {"batch_size": 0}, {"broken_rows": "keep"}, {"evaluate_every": 0}, {"patience": 0}, {"rank": -1},
        {"learning_rate": -1e-4}, {"learning_rate": float("nan")}, {"warm_up": 2.0}, {"grad_clip_norm": float("inf")},
    ],
)  # fmt: skip
def test_settings_that_are_wrong_are_named(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(InvalidInput, match=f"^{name} is"):
        dataclasses.replace(FineTuneSettings(), **change)
