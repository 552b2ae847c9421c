"""Reinforcement learning on a local OpenEnv server: a picture each turn, over the server's WebSocket.

`make environments` installs OpenEnv beside .venv.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import uvicorn

from examples.experiment import Experiment, read_arguments
from examples.signals import BAR, LENGTH, QUESTION, WAYS, draw_signals, random_way, show
from fovea_rollout import LoopSettings, OpenEnvEnvironment, RolloutSettings, SamplingSettings, run

SESSIONS = 512
"""The most episodes that run at once."""


def signals_app() -> Any:
    """Returns the server. A seed determines a game, and each right answer earns a third of the reward."""
    from fastapi import FastAPI
    from openenv.core import env_server  # type: ignore[import-not-found]
    from openenv.core.env_server.http_server import HTTPEnvServer  # type: ignore[import-not-found]

    class Way(env_server.Action):  # type: ignore[misc]
        way: str

    class Signal(env_server.Observation):  # type: ignore[misc]
        screen: str
        question: str = QUESTION

    class Signals(env_server.Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Signal:
            self._turn, self._game = 0, draw_signals(np.random.default_rng(seed))
            return self._signal(None)

        def step(self, action: Way, timeout_s: float | None = None, **_: Any) -> Signal:
            is_right = action.way == WAYS[self._game[self._turn]]
            self._turn += 1
            return self._signal(is_right / LENGTH)

        @property
        def state(self) -> Any:
            return env_server.State(step_count=self._turn)

        def _signal(self, reward: float | None) -> Signal:
            is_over = self._turn == LENGTH
            colour = self._game[min(self._turn, LENGTH - 1)]
            return Signal(screen=show(colour).data_uri, reward=reward, done=is_over)

    app = FastAPI()
    HTTPEnvServer(Signals, Way, Signal, max_concurrent_envs=SESSIONS).register_routes(app)
    return app


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Runs a server in a thread, on a free port of this machine; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the OpenEnv server did not start")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def draw_sources(rng: np.random.Generator, count: int, url: str) -> list[partial[OpenEnvEnvironment]]:
    """Draws seeds of games; each is one source of rollouts."""
    return [partial(_episode, url, int(seed)) for seed in rng.integers(2**31, size=count)]


def _episode(url: str, seed: int) -> OpenEnvEnvironment:
    from openenv.core import GenericEnvClient

    client = GenericEnvClient(base_url=url)
    return OpenEnvEnvironment(client, lambda answer: {"way": answer.text.strip()}, reset={"seed": seed})


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    rng = np.random.default_rng(arguments.seed)
    rollout = RolloutSettings(SamplingSettings(max_tokens=4, seed=arguments.seed))
    with serving(signals_app()) as url:
        held_out, train = draw_sources(rng, arguments.held_out, url), draw_sources(rng, 400, url)
        experiment = await Experiment.begin("rl_openenv", arguments, rollout)
        settings = LoopSettings(
            arguments.steps,
            arguments.groups,
            learning_rate=2e-3,  # an answer is two tokens, which have no form to lose
            substeps=1,  # with twice the rate
            schedule="constant",  # the model learns until the last of the thirty steps
            discount=0.0,  # the server rewards each answer at once
            rollout=rollout,
            seed=arguments.seed,
        )
        await experiment.run(train, held_out, lambda _: random_way(rng), settings, BAR)


if __name__ == "__main__":
    run(main(read_arguments(__doc__, steps=30, warm_up=30)))
