"""Advantages: how much better a rollout was than others of its group, which began at the same prompt.

All functions take float64 [groups, size] of total rewards, NaN where a trajectory failed, and return the same shape.
A failed trajectory is left out of its group's statistics and stays NaN. A group of one, or one in which all rewards
are the same, teaches nothing: its advantages are 0.
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
"""Rewards of a group that lie closer together are the same but for rounding."""


def group_centred(rewards: Rewards, *, by_std: bool) -> Rewards:
    """A_i = r_i - mean(r), divided by std(r) if `by_std`.

    With std (of the population) it is GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2; without it Dr. GRPO,
    https://arxiv.org/abs/2503.20783, which shows that the division favours prompts that are too easy or too hard.
    """
    found = _finite(rewards)
    centred = np.where(found, rewards - _mean(rewards, found), np.nan)
    if by_std:
        deviation = np.sqrt(_mean(centred**2, found))
        centred = centred / np.where(_differ(rewards, found), deviation, 1.0)
    return np.where(found & ~_differ(rewards, found), 0.0, centred)


def leave_one_out(rewards: Rewards) -> Rewards:
    """A_i = r_i - mean of the others' rewards: RLOO, https://arxiv.org/abs/2402.14740, equation 8.

    Equals the centred reward times n / (n - 1), n being how many of the group did not fail.
    """
    count = np.maximum(_finite(rewards).sum(axis=1, keepdims=True), 2)
    return np.asarray(group_centred(rewards, by_std=False) * (count / (count - 1)))


def groups_with_signal(rewards: Rewards) -> npt.NDArray[np.bool_]:
    """bool [groups]: whether rewards differ. The rest has no gradient; DAPO's dynamic sampling filters it out:
    https://arxiv.org/abs/2503.14476, section 3.2."""
    return np.asarray(_differ(rewards, _finite(rewards))[:, 0])


ESTIMATORS: dict[Estimator, Callable[[Rewards], Rewards]] = {
    "grpo": lambda rewards: group_centred(rewards, by_std=True),
    "dr_grpo": lambda rewards: group_centred(rewards, by_std=False),
    "rloo": leave_one_out,
}
"""By the names of the papers."""


def _finite(rewards: Rewards) -> npt.NDArray[np.bool_]:
    if rewards.ndim != 2:
        raise InvalidInput(f"rewards has shape {rewards.shape}; it must be [groups, size]", field="rewards")
    if np.isinf(rewards).any():
        group, place = np.argwhere(np.isinf(rewards))[0]
        raise InvalidInput(f"rewards[{group}][{place}] is infinite; it must be a number", field="rewards")
    return ~np.isnan(rewards)


def _mean(values: Rewards, found: npt.NDArray[np.bool_]) -> Rewards:
    """[groups, 1]: over what was found, 0 where nothing was."""
    total = np.where(found, values, 0.0).sum(axis=1, keepdims=True)
    return np.asarray(total / np.maximum(found.sum(axis=1, keepdims=True), 1))


def _differ(rewards: Rewards, found: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[groups, 1]: whether the largest and the smallest are apart."""
    largest = np.where(found, rewards, -np.inf).max(axis=1, initial=-np.inf, keepdims=True)
    smallest = np.where(found, rewards, np.inf).min(axis=1, initial=np.inf, keepdims=True)
    return np.asarray(largest - smallest > SAME)
