"""Reinforcement learning, a new picture each turn: a model learns to walk to the goal of a MiniGrid by looking at it.

The pictures are MiniGrid's own view of the agent: it stands at the bottom and looks up, the goal is the green square.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import minigrid  # noqa: F401  (registers its environments)
import numpy as np

from examples.experiment import Experiment, read_arguments
from fovea.rollout.gymnasium_environment import GymnasiumEnvironment, Rules
from fovea.rollout.loop import LoopSettings
from fovea.rollout.policy import SamplingSettings
from fovea.rollout.rollout import RolloutSettings

MAX_STEPS = 6
"""The longest of the shortest ways: two turns and four steps."""
# Words that the tiny model knows: turn left, turn right, go ahead.
RULES = Rules("Where is it?", {"left": 0, "right": 1, "top": 2}, max_steps=MAX_STEPS)


def make_environment(seed: int) -> Any:
    """A `GymnasiumEnvironment`: a room of three by three squares; the seed says where the agent stands and looks.

    The reward of the goal is 1 less 0.9 for the share of `MAX_STEPS` that it took.
    """
    room = gymnasium.make(
        "MiniGrid-Empty-Random-5x5-v0",
        render_mode="rgb_array",
        max_steps=MAX_STEPS,
        agent_pov=True,
        agent_view_size=5,
        highlight=False,
        tile_size=16,
    )
    return GymnasiumEnvironment(room, RULES, seed)


def draw_sources(rng: np.random.Generator, count: int) -> list[Callable[[], Any]]:
    """Starts; each is one source of rollouts."""
    return [partial(make_environment, int(seed)) for seed in rng.integers(2**31, size=count)]


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    rng = np.random.default_rng(arguments.seed)
    held_out, train = draw_sources(rng, arguments.held_out), draw_sources(rng, 1000)
    rollout = RolloutSettings(SamplingSettings(max_tokens=2, seed=arguments.seed), max_turns=MAX_STEPS)
    experiment = await Experiment.begin("rl_gridworld", arguments, rollout)
    words = list(RULES.actions)
    await experiment.warm_up(train, lambda: words[rng.integers(len(words))])
    await experiment.measure("before", held_out)
    settings = LoopSettings(
        steps=arguments.steps,
        groups_per_step=16,
        group_size=8,
        learning_rate=2e-3,
        estimator="dr_grpo",
        kl_coefficient=0.1,
        adam={"eps": 1e-8, "grad_clip_norm": 1.0},
        rollout=rollout,
        seed=arguments.seed,
    )
    await experiment.learn(train, settings)
    await experiment.measure("after", held_out)
    experiment.write()


if __name__ == "__main__":
    asyncio.run(main(read_arguments(__doc__, steps=100, warm_up=30)))
