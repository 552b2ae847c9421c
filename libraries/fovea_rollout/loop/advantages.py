"""Advantages of rollouts over the others of their group, which began at the same prompt.

All functions take total rewards as float64 [groups, size], with NaN for failed trajectories, and return the same shape.
A failed trajectory is left out of its group's statistics and stays NaN. If a group has one member, or if all of its
rewards are the same, its advantages are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from fovea.wire.errors import InvalidInput

Rewards = npt.NDArray[np.float64]
Estimator = Literal["grpo", "dr_grpo", "rloo"]

SAME = 1e-9
"""Rewards of a group that differ by no more than this are treated as equal: the difference is rounding."""


def group_centred(rewards: Rewards, *, by_std: bool) -> Rewards:
    """Returns A_i = r_i - mean(r), divided by the population's std(r) if `by_std`.

    With the division it is GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2). Without it, it is Dr. GRPO
    (https://arxiv.org/abs/2503.20783), which shows that the division favours prompts that are too easy or too hard.
    """
    found = _finite(rewards)
    centred = np.where(found, rewards - _mean(rewards, found), np.nan)
    if by_std:
        deviation = np.sqrt(_mean(centred**2, found))
        centred = centred / np.where(_differ(rewards, found), deviation, 1.0)
    return np.where(found & ~_differ(rewards, found), 0.0, centred)


def leave_one_out(rewards: Rewards) -> Rewards:
    """Returns A_i = r_i - mean of the others' rewards: RLOO, https://arxiv.org/abs/2402.14740, equation 8.

    It equals the centred reward times n / (n - 1), where n is the number of rollouts of the group that did not fail.
    """
    count = np.maximum(_finite(rewards).sum(axis=1, keepdims=True), 2)
    return np.asarray(group_centred(rewards, by_std=False) * (count / (count - 1)))


def groups_with_signal(rewards: Rewards) -> npt.NDArray[np.bool_]:
    """Returns bool [groups], true for groups with rewards that differ.

    The other groups have no gradient. DAPO's dynamic sampling filters them out (https://arxiv.org/abs/2503.14476,
    section 3.2).
    """
    return np.asarray(_differ(rewards, _finite(rewards))[:, 0])


ESTIMATORS: dict[Estimator, Callable[[Rewards], Rewards]] = {
    "grpo": lambda rewards: group_centred(rewards, by_std=True),
    "dr_grpo": lambda rewards: group_centred(rewards, by_std=False),
    "rloo": leave_one_out,
}
"""The estimators by the names that their papers give them."""


def _finite(rewards: Rewards) -> npt.NDArray[np.bool_]:
    if rewards.ndim != 2:
        raise InvalidInput(f"rewards has shape {rewards.shape}; it must be [groups, size]", field="rewards")
    if np.isinf(rewards).any():
        group, place = np.argwhere(np.isinf(rewards))[0]
        raise InvalidInput(f"rewards[{group}][{place}] is infinite; it must be a number", field="rewards")
    return ~np.isnan(rewards)


def _mean(values: Rewards, found: npt.NDArray[np.bool_]) -> Rewards:
    """Returns [groups, 1]: the mean of the values found in each group, 0 for a group without any."""
    total = np.where(found, values, 0.0).sum(axis=1, keepdims=True)
    return np.asarray(total / np.maximum(found.sum(axis=1, keepdims=True), 1))


def _differ(rewards: Rewards, found: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Returns bool [groups, 1]: whether the largest and the smallest value of a group differ by more than `SAME`."""
    largest = np.where(found, rewards, -np.inf).max(axis=1, initial=-np.inf, keepdims=True)
    smallest = np.where(found, rewards, np.inf).min(axis=1, initial=np.inf, keepdims=True)
    return np.asarray(largest - smallest > SAME)
