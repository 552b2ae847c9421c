"""Groups of rollouts as one batch of datums with advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import tinker

from fovea.rollout.advantages import ESTIMATORS, Estimator, Rewards, groups_with_signal
from fovea.rollout.datums import TrainingDatum, training_datums
from fovea.rollout.penalty import base_logprobs, kl_penalty
from fovea.rollout.policy import Policy
from fovea.rollout.trajectory import Trajectory

Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True)
class TrainingBatch:
    """What one step trains on.

    Attributes:
        data: In the order of groups and trajectories; a trajectory has a datum a segment.
        masks: For each datum bool [N]: which targets were sampled.
        base_kl: Distance to the base model in nats a token; None if it was not asked for.
    """

    data: list[TrainingDatum]
    masks: list[npt.NDArray[np.bool_]]
    base_kl: float | None = None

    def logprobs(self) -> list[npt.NDArray[np.float64]]:
        """The sampler's, a datum float64 [N]."""
        return [_column(datum, "logprobs") for datum in self.data]

    def split(self, count: int, seed: Sequence[int]) -> list[TrainingBatch]:
        """At most `count` parts of nearly one size, in which the seed puts each datum somewhere."""
        order = np.random.default_rng(seed).permutation(len(self.data)) if count > 1 else np.arange(len(self.data))
        return [
            TrainingBatch([self.data[i] for i in part], [self.masks[i] for i in part], self.base_kl)
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
        return TrainingBatch(data, self.masks, penalty.kl)


def rewards_of(groups: Groups) -> Rewards:
    """Total rewards, float64 [groups, size]; NaN where a rollout failed or did not get to its first turn."""
    return np.array(
        [[one.reward if one.end != "failed" and one.turns else np.nan for one in group] for group in groups],
        dtype=np.float64,
    ).reshape(len(groups), len(groups[0]) if groups else 0)


async def training_batch(groups: Groups, estimator: Estimator, *, filter_groups: bool, policy: Policy) -> TrainingBatch:
    """Makes datums of all rollouts that did not fail.

    Args:
        groups: All of one size.
        filter_groups: Leaves out groups in which all rewards are the same: they have no gradient.
        policy: Says how many tokens pictures take.
    """
    rewards = rewards_of(groups)
    advantages = ESTIMATORS[estimator](rewards)
    is_kept = groups_with_signal(rewards) if filter_groups else np.ones(len(groups), bool)
    data: list[TrainingDatum] = []
    masks: list[npt.NDArray[np.bool_]] = []
    for index in np.flatnonzero(is_kept):
        for trajectory, advantage in zip(groups[index], advantages[index], strict=True):
            if np.isnan(advantage):
                continue
            # Advantages of 1 are the loss mask; the mask is asked for first since an advantage may be 0.
            for datum in await training_datums(trajectory, [1.0] * len(trajectory.turns), policy):
                masks.append(_column(datum, "advantages") != 0.0)
                data.append(_with_advantages(datum, masks[-1] * advantage))
    return TrainingBatch(data, masks)


def _column(datum: TrainingDatum, name: str) -> npt.NDArray[np.float64]:
    return np.asarray(datum.datum.loss_fn_inputs[name].to_numpy(), dtype=np.float64)


def _with_advantages(datum: TrainingDatum, advantages: npt.NDArray[np.float64]) -> TrainingDatum:
    inputs = dict(datum.datum.loss_fn_inputs)
    inputs["advantages"] = tinker.TensorData.from_numpy(advantages.astype(np.float32))
    return replace(datum, datum=replace(datum.datum, loss_fn_inputs=inputs))
