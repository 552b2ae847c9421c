"""Advantages against the formulas of the papers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.wire.errors import InvalidInput
from fovea_rollout.loop.advantages import ESTIMATORS, group_centred, groups_with_signal, leave_one_out

NAN = float("nan")


def groups(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


def test_centred_with_and_without_std() -> None:
    rewards = groups([1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0])
    plain = group_centred(rewards, by_std=False)
    np.testing.assert_allclose(plain, [[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]])
    scaled = group_centred(rewards, by_std=True)
    np.testing.assert_allclose(scaled, plain / rewards.std(axis=1, keepdims=True))


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    row = [0.2, 1.0, -3.0, 0.5]
    others = [np.mean([other for j, other in enumerate(row) if j != i]) for i in range(4)]
    np.testing.assert_allclose(leave_one_out(groups(row))[0], np.array(row) - others)


@pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS)
def test_failed_ones_are_left_out_of_the_statistics(estimate) -> None:
    with_failure = estimate(groups([1.0, NAN, 0.0, 0.0]))
    np.testing.assert_allclose(with_failure[0, [0, 2, 3]], estimate(groups([1.0, 0.0, 0.0]))[0])
    assert np.isnan(with_failure[0, 1])


@pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.filterwarnings("error")
def test_groups_that_teach_nothing(estimate) -> None:
    assert estimate(groups([7.0])).tolist() == [[0.0]]
    assert estimate(groups([0.1, 0.1, 0.1])).tolist() == [[0.0, 0.0, 0.0]]
    assert estimate(groups([0.3, 0.1 + 0.2])).tolist() == [[0.0, 0.0]], "rounding must not count as signal"
    alone = estimate(groups([NAN, 2.0]))[0]
    assert np.isnan(alone[0])
    assert alone[1] == 0.0
    assert np.isnan(estimate(groups([NAN, NAN]))).all()
    assert estimate(np.empty((0, 4))).shape == (0, 4)
    assert estimate(np.empty((2, 0))).shape == (2, 0)


@pytest.mark.filterwarnings("error")
def test_which_groups_have_signal() -> None:
    rewards = groups([1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [NAN, NAN, NAN], [NAN, NAN, 1.0], [NAN, 0.0, 1.0])
    assert groups_with_signal(rewards).tolist() == [True, False, False, False, True]
    assert groups_with_signal(np.empty((2, 0))).tolist() == [False, False]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=5))
def test_advantages_of_a_group_add_up_to_nothing(rows: list[list[float]]) -> None:
    rewards = np.array(rows)
    for estimate in ESTIMATORS.values():
        np.testing.assert_allclose(estimate(rewards).sum(axis=1), 0.0, atol=1e-6)


def test_bad_rewards_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"shape \(3,\); it must be \[groups, size\]"):
        leave_one_out(np.zeros(3))
    with pytest.raises(InvalidInput, match=r"rewards\[0\]\[1\] is infinite"):
        groups_with_signal(groups([0.0, float("inf")]))
