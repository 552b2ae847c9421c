"""Reinforcement learning with a new picture each turn: a model learns to walk to the goal of a MiniGrid that it sees.

The pictures are the view of MiniGrid's agent, which is at the bottom and looks up. The goal is the green square.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, SupportsFloat

import gymnasium
import minigrid  # noqa: F401  (registers its environments)
import numpy as np

from examples.experiment import Experiment, read_arguments
from fovea_rollout import GymnasiumEnvironment, LoopSettings, RolloutSettings, Rules, SamplingSettings, run

MAX_STEPS = 6
"""The most actions of a shortest way: two turns and four steps."""
# Words in the tiny model's vocabulary, for turning left, turning right and going ahead.
RULES = Rules("Where is it?", {"left": 0, "right": 1, "top": 2}, max_steps=MAX_STEPS)
RIGHT, DOWN = 0, 1
BAR = 0.95
"""Share of episodes that should reach the goal, which is possible from every start."""


class Walk(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Rewards the goal with 1. In training, rewards each step with the decrease of the distance to it, in actions."""

    def __init__(self, env: gymnasium.Env[Any, Any], *, by_steps: bool) -> None:
        super().__init__(env)
        self._by_steps = by_steps

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Takes a step with another reward than MiniGrid's."""
        before = self._distance()
        seen, reward, is_terminated, is_truncated, info = self.env.step(action)
        earned = before - self._distance() if self._by_steps else float(float(reward) > 0)
        return seen, earned, is_terminated, is_truncated, info

    def _distance(self) -> int:
        """Returns the fewest actions to the goal, which is in the lower right corner of the empty room."""
        room: Any = self.env.unwrapped
        (x, y), facing = room.agent_pos, room.agent_dir
        right, down = room.width - 2 - x, room.height - 2 - y
        wanted = [way for way, squares in ((RIGHT, right), (DOWN, down)) if squares]
        turns = min((min((facing - way) % 4, (way - facing) % 4) for way in wanted), default=0)
        return int(right + down + turns + (len(wanted) == 2))


def make_environment(seed: int, *, by_steps: bool = False, max_steps: int = MAX_STEPS) -> GymnasiumEnvironment:
    """Makes a room of three by three squares. The seed determines the agent's position and direction."""
    room = gymnasium.make(
        "MiniGrid-Empty-Random-5x5-v0",
        render_mode="rgb_array",
        max_steps=MAX_STEPS,
        agent_pov=True,
        agent_view_size=5,
        highlight=False,
        tile_size=16,
    )
    return GymnasiumEnvironment(Walk(room, by_steps=by_steps), replace(RULES, max_steps=max_steps), seed)


def draw_sources(rng: np.random.Generator, count: int, **options: Any) -> list[Callable[[], GymnasiumEnvironment]]:
    """Draws starts; each is one source of rollouts."""
    return [partial(make_environment, int(seed), **options) for seed in rng.integers(2**31, size=count)]


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    rng = np.random.default_rng(arguments.seed)
    held_out, played = draw_sources(rng, arguments.held_out), draw_sources(rng, 400)
    rollout = RolloutSettings(SamplingSettings(max_tokens=2, seed=arguments.seed), max_turns=MAX_STEPS)
    experiment = await Experiment.begin("rl_gridworld", arguments, rollout)
    words = list(RULES.actions)
    await experiment.warm_up(played, lambda _: words[rng.integers(len(words))])
    await experiment.measure("before", held_out)
    settings = LoopSettings(
        steps=arguments.steps // 2,
        groups_per_step=arguments.groups,
        target_kl=0.03,  # an answer is one token, which has no form to lose
        kl_coefficient=0.2,  # the penalty counts once, as the reward does
        schedule="constant",  # these are single steps; training continues with whole walks
        discount=0.0,  # the reward of each step already tells its value
        rollout=rollout,
        seed=arguments.seed,
    )
    # First single steps, for which the rollouts of a group differ only in the answer, and then whole walks.
    await experiment.learn(draw_sources(rng, 1000, by_steps=True, max_steps=1), settings)
    walks = replace(
        settings,
        steps=arguments.steps - settings.steps,
        groups_per_step=arguments.groups * 3 // 8,
        schedule="linear",
    )
    await experiment.learn(draw_sources(rng, 1000, by_steps=True), walks)
    await experiment.measure("after", held_out)
    experiment.write(BAR)


if __name__ == "__main__":
    run(main(read_arguments(__doc__, steps=60, groups=32, warm_up=30, stages=2)))
