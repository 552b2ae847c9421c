"""Evaluation of a policy on environments that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fovea_rollout.environments.records import Source, environment_factory
from fovea_rollout.policies.policy import Policy
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from fovea_rollout.templates.template import ChatTemplate
from fovea_rollout.trajectory import Failure, Trajectory, failures_of, mean_metrics, reward_mean


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
        reward_mean: Mean reward of the rollouts that did not fail; NaN if all failed.
        metrics: The environments' metrics, averaged over the rollouts that did not fail.
        failures: Pairs of conversation and failure.
        trajectories: One per source, in the same order.
    """

    reward_mean: float
    metrics: Mapping[str, float]
    failures: tuple[tuple[str, Failure], ...]
    trajectories: tuple[Trajectory, ...]


async def evaluate(
    policy: Policy,
    template: ChatTemplate,
    sources: Sequence[Source],
    settings: RolloutSettings,
    *,
    concurrency: int = 256,
    progress: bool | None = False,
    name: str = "evaluation",
) -> Evaluation:
    """Plays one episode per source. For the greedy policy, pass settings with temperature 0.

    Args:
        concurrency: The most episodes that run at once.
        progress: As in `run_rollouts`. Leave it off inside `train`, which shows its own lines on the terminal.
        name: Prefix of the conversations' ids.
    """
    trajectories = await run_rollouts(
        policy,
        template,
        [environment_factory(source) for source in sources],
        settings,
        concurrency=concurrency,
        progress=progress,
        name=name,
    )
    return Evaluation(
        reward_mean(trajectories), mean_metrics(trajectories), failures_of(trajectories), tuple(trajectories)
    )
