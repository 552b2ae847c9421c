"""The report of one training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fovea_rollout.evaluation import Evaluation
from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.advantages import groups_with_signal
from fovea_rollout.loop.training_batch import Groups, TrainingBatch, TrainingDatum, rewards_of
from fovea_rollout.policies.policy import Policy
from fovea_rollout.trajectory import Failure, Trajectory, failures_of, mean_metrics, reward_mean

_NO_SIGNAL = " (no answer was rewarded: without the right format in any answer, begin with warm_up)"


@dataclass(frozen=True)
class Agreement:
    """The distance between the sampler's and the trainer's log-probabilities of the sampled tokens.

    Attributes:
        kl: mean(r - 1 - log r) with r = p_trainer / p_sampler, in nats per token: an estimate of KL(sampler || trainer)
            that is never negative (https://joschu.net/blog/kl-approx.html). On-policy it contains only rounding.
        largest_log_ratio: max |log r|. On-policy every r is 1.
    """

    kl: float
    largest_log_ratio: float


@dataclass(frozen=True)
class StepReport:
    """The report of one step of a training loop.

    Attributes:
        step: Number of the step, from 0: the version of the weights before it. Lines, messages, `metrics.jsonl`,
            `state.json` and the live page name the version after it, `step + 1`.
        reward_mean: Mean reward of the rollouts that did not fail; NaN if all failed.
        signal_share: Share of groups in which rewards differ.
        lag: step - version of the oldest weights that sampled the training data; 0 is on-policy.
        sampled_tokens: Number of tokens that all rollouts sampled.
        trained_tokens: Number of sampled tokens that were trained on.
        agreement: Agreement of sampler and trainer on the first substep, before weights change. None if nothing was
            trained on, for instance because no group had a signal; the weights then do not change.
        moved_kl: KL between the sampling weights and the weights at the start of a substep, on the substep's tokens, as
            in `Agreement`. It measures how far the earlier substeps moved the model. The largest value of all substeps
            after the first; None with one substep.
        rate_share: Share of the settings' learning rate that the step used.
        base_kl: Distance of sampler and base model in nats per token; None without a KL penalty.
        metrics: The environments' metrics, averaged over rollouts, and the trainer's, as `trainer/...`, averaged over
            the substeps that have them.
        seconds: Seconds by part: `rollout` (waiting for groups), `batch` (with the base model's scores), `train`,
            `publish`, and `evaluate` if there was an evaluation.
        failures: Pairs of conversation and failure. These rollouts are left out, unless only `close` failed.
        trajectories: All trajectories of the step, by group.
        data: The datums that were trained on, with the versions of the weights that sampled them.
        policy: A policy that samples with the weights after the step, for evaluations by the caller.
        evaluation: Evaluation of these weights on the held-out sources; None after most steps.
        cancelled_groups: Number of groups that were cancelled because they would have exceeded `max_lag`, and that are
            played again.
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
    trajectories: tuple[tuple[Trajectory, ...], ...] = field(repr=False)
    data: tuple[TrainingDatum, ...] = field(repr=False)
    policy: Policy = field(repr=False)
    evaluation: Evaluation | None = field(default=None, repr=False)
    cancelled_groups: int = 0

    def __str__(self) -> str:
        """Returns the step in one line, for `on_step=print`."""
        played = [one for group in self.trajectories for one in group]
        ended, failed = (sum(one.is_scored for one in played), sum(one.end == "failed" for one in played))
        of_ended = f" (mean of {ended} of {len(played)} rollouts)" if failed else ""
        parts = [f"step {self.step + 1}: reward {self.reward_mean:.3f}{of_ended}"]
        if self.evaluation is not None:
            parts.append(f"held out {self.evaluation.reward_mean:.3f}")
        kl = "nothing to train on" if self.agreement is None else f"kl {self.agreement.kl:.1e}"
        best = max((one.reward for one in played if one.is_scored), default=0.0)
        is_unrewarded = not self.signal_share and not failed and best <= 0
        parts += [f"signal {self.signal_share:.0%}{_NO_SIGNAL if is_unrewarded else ''}", f"lag {self.lag}", kl]
        parts.append(f"{sum(self.seconds.values()):.0f} s")
        if self.failures:
            first = self.failures[0][1]
            count = f"{len(self.failures)} of {len(played)} rollouts"
            parts.append(f"{count} failed, the first in {first.stage}: {first.error}")
        return " ".join(", ".join(parts).split())


def step_report(
    step: int,
    groups: Groups,
    batch: TrainingBatch,
    outputs: Sequence[tuple[TrainingBatch, tinker.ForwardBackwardOutput]],
    seconds: Mapping[str, float],
    policy: Policy,
    rate_share: float,
    evaluation: Evaluation | None = None,
    cancelled_groups: int = 0,
) -> StepReport:
    """Makes the report of a step.

    Args:
        step: Number of the step, from 0.
        groups: All trajectories of the step.
        batch: The datums that were trained on.
        outputs: The batch of each substep, and the result of its forward_backward.
        seconds: Seconds by part.
        policy: A policy that samples with the weights after the step.
        rate_share: Share of the learning rate that the step used.
        evaluation: Evaluation after the step, if there was one.
        cancelled_groups: Number of groups that were cancelled while the step waited.
    """
    rewards = rewards_of(groups)
    trajectories = [trajectory for group in groups for trajectory in group]
    metrics = mean_metrics(trajectories)
    for name in {name: None for _, output in outputs for name in output.metrics}:
        values = [output.metrics[name] for _, output in outputs if name in output.metrics]
        metrics[f"trainer/{name}"] = float(np.mean(values))
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
        cancelled_groups=cancelled_groups,
    )


def _agreement(batch: TrainingBatch, output: tinker.ForwardBackwardOutput) -> Agreement:
    differences = [
        (row["logprobs"].to_numpy().astype(np.float64) - ours)[mask]
        for row, ours, mask in zip(output.loss_fn_outputs, batch.logprobs(), batch.masks, strict=True)
    ]
    log_ratio = np.concatenate(differences)
    return Agreement(float(np.mean(np.expm1(log_ratio) - log_ratio)), float(np.abs(log_ratio).max()))
