"""How good a policy is on environments that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fovea_rollout.policy import Policy
from fovea_rollout.records import Source, environment_factory
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from fovea_rollout.template import ChatTemplate
from fovea_rollout.trajectory import Failure, Trajectory, failures_of, mean_metrics, reward_mean


@dataclass(frozen=True)
class Evaluation:
    """What was seen.

    Attributes:
        reward_mean: Mean reward of the rollouts that did not fail; NaN if all did.
        metrics: The environments' own, averaged over rollouts.
        failures: (conversation, what went wrong).
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
    """Plays one episode per source; pass settings with temperature 0 for the greedy policy.

    Args:
        progress: As `run_rollouts` has it; leave it off within `train`, whose own lines are on the terminal then.
        name: Begins the conversations' ids.
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
