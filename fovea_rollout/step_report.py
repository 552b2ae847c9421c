"""What one training step did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tinker

from fovea_rollout.advantages import groups_with_signal
from fovea_rollout.evaluation import Evaluation
from fovea_rollout.policy import Policy
from fovea_rollout.training_batch import Groups, TrainingBatch, TrainingDatum, rewards_of
from fovea_rollout.trajectory import Failure, Trajectory, failures_of, mean_metrics, reward_mean


@dataclass(frozen=True)
class Agreement:
    """How far the sampler's log-probabilities of the sampled tokens are from the trainer's, before weights change.

    Attributes:
        kl: mean(r - 1 - log r), r = p_trainer / p_sampler: an estimate of KL(sampler || trainer) that is never
            negative (http://joschu.net/blog/kl-approx.html), in nats per token. On-policy it is rounding alone.
        largest_log_ratio: max |log r|; on-policy every r is 1.
    """

    kl: float
    largest_log_ratio: float


@dataclass(frozen=True)
class StepReport:
    """One step of a loop.

    Attributes:
        step: From 0.
        reward_mean: Mean reward of the rollouts that did not fail; NaN if all did.
        signal_share: Share of groups in which rewards differ.
        lag: step - version of the oldest weights that sampled what was trained on; 0 is on-policy.
        sampled_tokens: Tokens that all rollouts sampled.
        trained_tokens: Sampled tokens that were trained on.
        agreement: Of sampler and trainer on the first substep. None if nothing was trained on, since no group had a
            signal; the weights stay.
        moved_kl: Of the weights that a substep met from those that sampled, on its tokens, as in `Agreement`: the
            largest of all substeps but the first, which says how far those before it went. None with one substep.
        rate_share: Of the settings' learning rate, what the step had.
        base_kl: Distance of sampler and base model in nats per token, if there is a KL penalty.
        metrics: The environments' own, averaged over rollouts; the trainer's, over substeps, as `trainer/...`.
        seconds: By part: `rollout` (waiting for groups), `batch` (with the base's scores), `train`, `publish`, and
            `evaluate` if there was an evaluation.
        failures: (conversation, what went wrong); those rollouts are left out.
        trajectories: All of the step, by group.
        data: What was trained on; each datum says which weights sampled it.
        policy: Samples with the weights after the step, for an evaluation of your own.
        evaluation: Of these weights on held-out sources; None after most steps.
    """

    step: int
    reward_mean: float
    signal_share: float
    lag: int
    sampled_tokens: int
    trained_tokens: int
    agreement: Agreement | None
    moved_kl: float | None
    rate_share: float
    base_kl: float | None
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    failures: tuple[tuple[str, Failure], ...]
    trajectories: tuple[tuple[Trajectory, ...], ...]
    data: tuple[TrainingDatum, ...]
    policy: Policy
    evaluation: Evaluation | None = None


def step_report(
    step: int,
    groups: Groups,
    batch: TrainingBatch,
    outputs: Sequence[tuple[TrainingBatch, tinker.ForwardBackwardOutput]],
    seconds: Mapping[str, float],
    policy: Policy,
    rate_share: float,
    evaluation: Evaluation | None = None,
) -> StepReport:
    """Puts a report together.

    Args:
        outputs: For each substep what it trained on and what forward_backward returned.
    """
    rewards = rewards_of(groups)
    trajectories = [trajectory for group in groups for trajectory in group]
    metrics = mean_metrics(trajectories)
    for name in outputs[0][1].metrics if outputs else ():
        metrics[f"trainer/{name}"] = float(np.mean([output.metrics[name] for _, output in outputs]))
    return StepReport(
        step=step,
        reward_mean=reward_mean(trajectories),
        signal_share=float(groups_with_signal(rewards).mean()),
        lag=max((step - datum.versions.oldest for datum in batch.data), default=0),
        sampled_tokens=sum(len(turn.sampled.ids) for one in trajectories for turn in one.turns),
        trained_tokens=sum(int(mask.sum()) for mask in batch.masks),
        agreement=_agreement(*outputs[0]) if outputs else None,
        moved_kl=max((_agreement(*output).kl for output in outputs[1:]), default=None),
        rate_share=rate_share,
        base_kl=batch.base_kl,
        metrics=metrics,
        seconds=dict(seconds),
        failures=failures_of(trajectories),
        trajectories=tuple(tuple(group) for group in groups),
        data=tuple(batch.data),
        policy=policy,
        evaluation=evaluation,
    )


def _agreement(batch: TrainingBatch, output: tinker.ForwardBackwardOutput) -> Agreement:
    differences = [
        (row["logprobs"].to_numpy().astype(np.float64) - ours)[mask]
        for row, ours, mask in zip(output.loss_fn_outputs, batch.logprobs(), batch.masks, strict=True)
    ]
    log_ratio = np.concatenate(differences)
    return Agreement(float(np.mean(np.expm1(log_ratio) - log_ratio)), float(np.abs(log_ratio).max()))
