"""Reinforcement learning on an environment of the `verifiers` library, with three pictures and a rubric.

`make environments` installs the library beside .venv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from examples.experiment import Experiment, read_arguments
from examples.signals import BAR, LENGTH, QUESTION, WAYS, draw_signals, random_way, show
from fovea_rollout import LoopSettings, RolloutSettings, SamplingSettings, VerifiersEnvironment, run, verifiers_sources


def load_environment(rng: np.random.Generator, count: int) -> Any:
    """Makes an environment from a dataset, a class and a rubric, as the library's environments are."""
    import verifiers as vf  # type: ignore[import-not-found]
    from datasets import Dataset  # type: ignore[import-not-found]

    class Signals(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            turn = sum(message["role"] == "assistant" for message in messages)
            return [_asked(state["answer"].split()[turn])]

    async def share_right(completion: Any, answer: str) -> float:
        said = [message["content"].strip() for message in completion if message["role"] == "assistant"]
        return float(sum(one == WAYS[colour] for one, colour in zip(said, answer.split(), strict=False)) / LENGTH)

    games = [draw_signals(rng) for _ in range(count)]
    rows = Dataset.from_list([{"prompt": [_asked(game[0])], "answer": " ".join(game)} for game in games])
    return Signals(dataset=rows, max_turns=LENGTH, rubric=vf.Rubric(funcs=[share_right]))


def _asked(colour: str) -> dict[str, Any]:
    shown = {"type": "image_url", "image_url": {"url": show(colour).data_uri}}
    return {"role": "user", "content": [shown, {"type": "text", "text": QUESTION}]}


def draw_sources(rng: np.random.Generator, count: int) -> list[Callable[[], VerifiersEnvironment]]:
    """Draws games; each is one source of rollouts."""
    return verifiers_sources(load_environment(rng, count))


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    rng = np.random.default_rng(arguments.seed)
    held_out, train = draw_sources(rng, arguments.held_out), draw_sources(rng, 400)
    rollout = RolloutSettings(SamplingSettings(max_tokens=4, seed=arguments.seed))
    experiment = await Experiment.begin("rl_verifiers", arguments, rollout)
    settings = LoopSettings(
        arguments.steps,
        arguments.groups,
        learning_rate=2e-3,  # an answer is two tokens, which have no form to lose
        substeps=1,  # with twice the rate
        schedule="constant",  # the model learns until the last of the thirty steps
        rollout=rollout,
        seed=arguments.seed,
    )
    await experiment.run(train, held_out, lambda _: random_way(rng), settings, BAR)


if __name__ == "__main__":
    run(main(read_arguments(__doc__, steps=30, warm_up=30)))
