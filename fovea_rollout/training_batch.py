"""Groups of rollouts as one batch of datums with advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import tinker

from fovea_rollout.advantages import ESTIMATORS, Estimator, Rewards, groups_with_signal
from fovea_rollout.datums import TrainingDatum, training_datums
from fovea_rollout.penalty import base_logprobs, kl_penalty
from fovea_rollout.policy import Policy
from fovea_rollout.trajectory import Trajectory

Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True)
class TrainingBatch:
    """What one step trains on.

    Attributes:
        data: In the order of groups and trajectories; a trajectory has a datum a segment.
        base_kl: Distance to the base model in nats a token; None if it was not asked for.
    """

    data: list[TrainingDatum]
    base_kl: float | None = None

    @property
    def masks(self) -> list[npt.NDArray[np.bool_]]:
        """For each datum bool [N]: which targets were sampled."""
        return [datum.mask for datum in self.data]

    def logprobs(self) -> list[npt.NDArray[np.float64]]:
        """The sampler's, a datum float64 [N]."""
        return [_column(datum, "logprobs") for datum in self.data]

    def split(self, count: int, seed: Sequence[int]) -> list[TrainingBatch]:
        """At most `count` parts of nearly one size, in which the seed puts each datum somewhere."""
        order = np.random.default_rng(seed).permutation(len(self.data)) if count > 1 else np.arange(len(self.data))
        return [
            TrainingBatch([self.data[i] for i in part], self.base_kl)
            for part in np.array_split(order, count)
            if part.size
        ]

    async def penalised(self, base: tinker.SamplingClient, coefficient: float) -> TrainingBatch:
        """With the KL penalty of `penalty.py` added to its advantages."""
        scores = await base_logprobs([datum.datum for datum in self.data], base)
        penalty = kl_penalty(self.logprobs(), scores, self.masks, coefficient)
        data = [
            _with_advantages(datum, _column(datum, "advantages") + term)
            for datum, term in zip(self.data, penalty.terms, strict=True)
        ]
        return TrainingBatch(data, penalty.kl)


def rewards_of(groups: Groups) -> Rewards:
    """Total rewards, float64 [groups, size]; NaN where a rollout failed or did not get to its first turn."""
    return np.array(
        [[one.reward if _counts(one) else np.nan for one in group] for group in groups], dtype=np.float64
    ).reshape(len(groups), len(groups[0]) if groups else 0)


def returns_of(group: Sequence[Trajectory], discount: float) -> Rewards:
    """What came of each turn: its reward, and later ones discounted. float64 [turns, size].

    A row compares the rollouts at one turn; NaN where a rollout failed or was over before.
    """
    returns = np.full((max((len(one.turns) for one in group), default=0), len(group)), np.nan)
    for place, trajectory in enumerate(group):
        following = 0.0
        for index in reversed(range(len(trajectory.turns) if _counts(trajectory) else 0)):
            following = trajectory.turns[index].reward + discount * following
            returns[index, place] = following
    return returns


async def training_batch(
    groups: Groups, estimator: Estimator, *, filter_groups: bool, policy: Policy, discount: float | None = None
) -> TrainingBatch:
    """Makes datums of all rollouts that did not fail.

    Args:
        groups: All of one size.
        filter_groups: Leaves out groups in which all rewards (with `discount`: all returns of each turn) are the
            same: they have no gradient.
        policy: Says how many tokens pictures take.
        discount: Of later rewards, 0 to 1: each turn gets the advantage of its own return among the group's rollouts
            at that turn. None: all turns of a rollout get the advantage of its total reward.
    """
    data: list[TrainingDatum] = []
    for group in groups:
        rewards = rewards_of([group]) if discount is None else returns_of(group, discount)
        if filter_groups and not groups_with_signal(rewards).any():
            continue
        advantages = ESTIMATORS[estimator](rewards)
        for place, trajectory in enumerate(group):
            if not _counts(trajectory):
                continue
            turns = len(trajectory.turns)
            rows = np.broadcast_to(advantages[:, place], turns) if discount is None else advantages[:turns, place]
            data += await training_datums(trajectory, rows.tolist(), policy)
    return TrainingBatch(data)


def _counts(trajectory: Trajectory) -> bool:
    return trajectory.end != "failed" and bool(trajectory.turns)


def _column(datum: TrainingDatum, name: str) -> npt.NDArray[np.float64]:
    return np.asarray(datum.datum.loss_fn_inputs[name].to_numpy(), dtype=np.float64)


def _with_advantages(datum: TrainingDatum, advantages: npt.NDArray[np.float64]) -> TrainingDatum:
    inputs = dict(datum.datum.loss_fn_inputs)
    inputs["advantages"] = tinker.TensorData.from_numpy(advantages.astype(np.float32))
    return replace(datum, datum=replace(datum.datum, loss_fn_inputs=inputs))
