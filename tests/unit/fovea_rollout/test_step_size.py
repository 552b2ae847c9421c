"""Adaptation of the learning rate to the size of past steps."""

import pytest

from fovea_rollout.loop.learning_rate import FIRST, StepSize


def test_it_begins_low_and_grows_while_steps_are_short() -> None:
    size = StepSize(target=0.004)
    assert size.share == FIRST
    size.observe(0.0)
    assert size.share == pytest.approx(FIRST * 1.2), "by at most a fifth per step"
    for _ in range(20):
        size.observe(0.001)
    assert size.share == 1.0, "never above the requested rate"


@pytest.mark.parametrize(("moved", "factor"), [(0.004, 1.0), (0.016, 0.5), (0.009, 2 / 3), (4.0, 1 / 3)])
def test_a_step_that_went_too_far_lowers_it_by_the_root(moved: float, factor: float) -> None:
    size = StepSize(target=0.004)
    size.observe(moved)
    assert size.share == pytest.approx(FIRST * factor)


def test_it_is_never_nothing() -> None:
    size = StepSize(target=0.004)
    for _ in range(20):
        size.observe(1.0)
    assert size.share == 0.01


@pytest.mark.parametrize("target", [None, 0.004])
def test_one_substep_tells_nothing(target: float | None) -> None:
    size = StepSize(target)
    before = size.share
    size.observe(None)
    assert size.share == before


def test_without_a_target_the_rate_stays() -> None:
    size = StepSize(None)
    size.observe(1.0)
    assert size.share == 1.0
