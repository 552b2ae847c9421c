"""A warm-up for reinforcement learning: the model clones a player, so that it answers in the form that is rewarded.

From a player that answers at random, the model learns the form of an answer, but not which answer is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Environment
from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.learning_rate import REINFORCING_RATE, learning_rate_of
from fovea_rollout.loop.loop_progress import WarmUpProgress
from fovea_rollout.loop.training_batch import training_datums
from fovea_rollout.messages import Picture
from fovea_rollout.policies.policy import Chunk, Policy, Sampled, SamplingSettings, Settings, WeightVersions
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from fovea_rollout.stopping import ending_with_a_line
from fovea_rollout.templates.template import ChatTemplate
from fovea_rollout.trajectory import Trajectory, reward_mean

_AHEAD = 2
"""The most steps that are submitted and not finished."""


@dataclass(frozen=True)
class WarmUpSettings(Settings):
    """Settings of the warm-up.

    Attributes:
        steps: Number of optimizer steps.
        episodes: The most episodes that the player plays. Steps draw from them with replacement.
        answers_per_step: Approximate number of answers in a step. If episodes have several answers, a step has fewer
            episodes.
        learning_rate: Rate of every step; None computes it from the model's width. At a higher rate, a model that
            clones random answers soon becomes blind, because they teach it that pictures do not matter.
        adam: Other fields of `tinker.AdamParams`.
        rollout: Settings of the player's rollouts.
        seed: Seed of the draws of episodes.
    """

    steps: int = 100
    episodes: int = 400
    answers_per_step: int = 32
    learning_rate: float | None = None
    adam: Mapping[str, float] = field(default_factory=lambda: {"grad_clip_norm": 1.0})
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "episodes", "answers_per_step"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be 1 or more", field=name)


class ScriptedPlayer:
    """A policy that a function plays instead of a model.

    Args:
        policy: Counts the tokens of pictures.
        tokenizer: Tokenizer of the model that will clone the player.
        answer: Writes an answer to a prompt: the whole conversation as `Tokens` (ids, for `tokenizer.decode`) and
            `Picture` chunks, in order.
    """

    def __init__(self, policy: Policy, tokenizer: Any, answer: Callable[[Sequence[Chunk]], str]) -> None:
        self._policy, self._tokenizer, self._answer = policy, tokenizer, answer

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`. All log-probabilities are 0, because cloning does not use them."""
        ids = (*self._tokenizer.encode(self._answer(prompt), add_special_tokens=False), stop_ids[0])
        return Sampled(ids, (0.0,) * len(ids), "stop", WeightVersions(0, 0))

    async def token_count(self, picture: Picture) -> int:
        """See `Policy`."""
        return await self._policy.token_count(picture)


async def warm_up(
    training_client: tinker.TrainingClient,
    template: ChatTemplate,
    sources: Sequence[Callable[[], Environment]],
    player: Policy,
    settings: WarmUpSettings,
    *,
    progress: bool | None = None,
) -> float:
    """Trains a model on a player's answers. All answers count the same, whatever their reward.

    Rollouts that fail are left out.

    Args:
        training_client: Client of the model to train.
        template: The model's chat template.
        sources: Environment factories to play.
        player: The policy to clone, such as a `ScriptedPlayer` or a teacher's `TinkerPolicy`.
        settings: Settings of the warm-up.
        progress: Whether to show the episodes and then the steps; see `ProgressLines` for None.

    Returns:
        The mean reward of the player, which is also the reward of a perfect clone.

    Raises:
        InvalidInput: All episodes failed. The message contains the first failure.
        Stopped: The user pressed Ctrl-C. It is a KeyboardInterrupt, and ends a program with one line.
        tinker.TinkerError: The server refuses a request, or the API key.
    """
    with ending_with_a_line(lambda: "stopped: a warm-up saves nothing, so the next one begins again"):
        return await _warm_up(training_client, template, sources, player, settings, progress)


async def _warm_up(
    training_client: tinker.TrainingClient,
    template: ChatTemplate,
    sources: Sequence[Callable[[], Environment]],
    player: Policy,
    settings: WarmUpSettings,
    progress: bool | None,
) -> float:
    most = min(settings.episodes, settings.answers_per_step * settings.steps)
    played = await run_rollouts(player, template, sources[:most], settings.rollout, name="cloned", progress=progress)
    learnt = [trajectory for trajectory in played if trajectory.is_scored]
    data = [datum for trajectory in learnt for datum in await _datums(trajectory, player)]
    if not data:
        failure = next((one.failure for one in played if one.failure), None)
        raise InvalidInput(f"all episodes of the player failed; the first failure: {failure}", field="sources")
    answers = float(np.mean([len(trajectory.turns) for trajectory in learnt]))
    size = max(4, round(settings.answers_per_step / answers))
    rate = settings.learning_rate
    if rate is None:
        rate = await learning_rate_of(training_client, REINFORCING_RATE)
    rng = np.random.default_rng(settings.seed)
    asked: deque[Awaitable[object]] = deque()
    with WarmUpProgress(settings.steps, progress) as shown:
        for _ in range(settings.steps):
            batch = [data[index] for index in rng.choice(len(data), size)]
            # The next step is submitted before the last one is awaited, so that the server never waits for the client.
            asked.append(training_client.forward_backward(batch, "cross_entropy"))
            asked.append(training_client.optim_step(tinker.AdamParams(learning_rate=rate, **settings.adam)))
            while len(asked) > 2 * _AHEAD:
                await asked.popleft()
                await asked.popleft()
                shown.count_step()
        while asked:
            await asked.popleft()
    return reward_mean(played)


async def _datums(trajectory: Trajectory, player: Policy) -> list[tinker.Datum]:
    """Returns datums for `cross_entropy`, with weight 1 for the player's tokens."""
    return [
        tinker.Datum(
            model_input=one.datum.model_input,
            loss_fn_inputs={
                "target_tokens": one.datum.loss_fn_inputs["target_tokens"],
                "weights": one.datum.loss_fn_inputs["advantages"],
            },
        )
        for one in await training_datums(trajectory, [1.0] * len(trajectory.turns), player)
    ]
