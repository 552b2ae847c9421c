"""A beginning for reinforcement learning: a model clones a player, so that it answers in the form that is rewarded.

Of a player that answers at random it learns what an answer looks like, and nothing of what is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker

from fovea.wire.errors import InvalidInput
from fovea_rollout.default_rate import REINFORCING_RATE, learning_rate_of
from fovea_rollout.environment import Environment
from fovea_rollout.messages import Picture
from fovea_rollout.policy import Chunk, Policy, Sampled, SamplingSettings, WeightVersions
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from fovea_rollout.template import ChatTemplate
from fovea_rollout.training_batch import training_datums
from fovea_rollout.trajectory import Trajectory, reward_mean

_AHEAD = 2
"""Steps that are asked for and not done."""


@dataclass(frozen=True)
class WarmUpSettings:
    """How to clone.

    Attributes:
        steps: Optimizer steps.
        episodes: The most that the player plays; steps draw from them again and again.
        answers_per_step: About as many; fewer episodes where these have several.
        learning_rate: Of every step; None takes one by the model's width. A higher one soon makes a model blind that
            clones answers at random: they teach it that pictures do not matter.
        adam: Other fields of `tinker.AdamParams`.
        rollout: How the player plays.
        seed: Decides which episodes a step has.
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
    """A policy that is no model.

    Args:
        policy: Counts the tokens of pictures.
        tokenizer: Of the model that is to be taught.
        answer: Writes an answer to a prompt: from the pictures in it, or whatever they show.
    """

    def __init__(self, policy: Policy, tokenizer: Any, answer: Callable[[Sequence[Chunk]], str]) -> None:
        self._policy, self._tokenizer, self._answer = policy, tokenizer, answer

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        """See `Policy`. Log-probabilities are 0: whoever learns from these answers needs none."""
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
) -> float:
    """Trains a model on what a player says; an answer counts alike, whatever came of it.

    Args:
        player: Such as a `ScriptedPlayer`, or a teacher's `TinkerPolicy`.

    Returns:
        The mean reward of the player itself, which is where a perfect clone begins.

    Raises:
        InvalidInput: No episode could be played; the message has the first failure.
        tinker.TinkerError: What the server refuses.
    """
    most = min(settings.episodes, settings.answers_per_step * settings.steps)
    played = await run_rollouts(player, template, sources[:most], settings.rollout, name="cloned", progress=False)
    learnt = [trajectory for trajectory in played if trajectory.is_scored]
    data = [datum for trajectory in learnt for datum in await _datums(trajectory, player)]
    if not data:
        failure = next((one.failure for one in played if one.failure), None)
        raise InvalidInput(f"the player played no episode to learn from: {failure}", field="sources")
    answers = float(np.mean([len(trajectory.turns) for trajectory in learnt]))
    size = max(4, round(settings.answers_per_step / answers))
    rate = settings.learning_rate
    if rate is None:
        rate = await learning_rate_of(training_client, REINFORCING_RATE)
    rng = np.random.default_rng(settings.seed)
    asked: deque[Awaitable[object]] = deque()
    for _ in range(settings.steps):
        batch = [data[index] for index in rng.choice(len(data), size)]
        # The next step is asked for before the last one is waited for: the server need not wait for us in between.
        asked.append(training_client.forward_backward(batch, "cross_entropy"))
        asked.append(training_client.optim_step(tinker.AdamParams(learning_rate=rate, **settings.adam)))
        while len(asked) > 2 * _AHEAD:
            await asked.popleft()
    while asked:
        await asked.popleft()
    return reward_mean(played)


async def _datums(trajectory: Trajectory, player: Policy) -> list[tinker.Datum]:
    """For `cross_entropy`: weight 1 where the player spoke."""
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
