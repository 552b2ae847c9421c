"""Reinforcement learning on VisGym tickets: free reasoning, tagged answers with pairs, and nested pairs.

The warm-up clones a player that describes its picture correctly. Half of the time it takes the best action, and
otherwise a random possible one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from examples.experiment import Experiment, read_arguments
from examples.picture_games import MAZE, TILES, WAYS, Maze, Pixels, Tiles
from fovea_rollout import Chunk, LoopSettings, Picture, RolloutSettings, SamplingSettings, run
from fovea_rollout.environments.records import parse_record
from fovea_rollout.environments.visgym_environment import FORMAT_SHARE, TASK_SHARE, WORDS, Answering, visgym_environment

SKILL = 0.5
"""Share of the best action among the actions of the cloned player."""
SOLVED = 0.7
"""Share of games that the model should solve. Without looking, the best fixed way solves 0.13 of the mazes, and the
best fixed swaps solve 0.11 of the tiles. A model that sees all that the player says, but has no memory, solves 0.90 of
the mazes."""
_NAMES = {action: word for word, action in WORDS.items()}


@dataclass(frozen=True)
class Game:
    """A game, a format of answers, and the player to clone.

    Attributes:
        environment: `visgym_env_id` of the tickets.
        answering: Format of answers.
        max_turns: The most answers.
        max_tokens: The most tokens of an answer.
        write: Writes the player's answer to a frame, with random numbers of the generator.
    """

    environment: str
    answering: Answering
    max_turns: int
    max_tokens: int
    write: Callable[[Pixels, np.random.Generator], str]

    @property
    def bar(self) -> float:
        """Reward of a model that solves the share `SOLVED` with well-formed answers only."""
        return SOLVED if self.answering == "instruct" else TASK_SHARE * SOLVED + FORMAT_SHARE


def _move(maze: Maze, rng: np.random.Generator) -> tuple[str, Any]:
    way = maze.best_way()
    if rng.random() > SKILL:
        # Only possible moves: a clone of a player that walks into walls would do so until its turns are over.
        choices = [None, *(way for way in WAYS if maze.is_open(maze.agent, way))]
        way = choices[rng.integers(len(choices))]
    return ("stop", "stop") if way is None else ("move", way)


def _seen(maze: Maze) -> str:
    (row, column), (goal_row, goal_column) = maze.agent, maze.goal
    open_ways = " ".join(_NAMES["move", way] for way in WAYS if maze.is_open(maze.agent, way))
    return f"At {row} {column}, red at {goal_row} {goal_column}, open {open_ways}."


def _reasoned(frame: Pixels, rng: np.random.Generator) -> str:
    maze = Maze.seen_in(frame)
    return f"{_seen(maze)} <action>{_NAMES[_move(maze, rng)]}</action>"


def _tagged(frame: Pixels, rng: np.random.Generator) -> str:
    maze = Maze.seen_in(frame)
    action = _move(maze, rng)
    return _in_tags(_seen(maze), _NAMES[action], action)


def _nested(frame: Pixels, rng: np.random.Generator) -> str:
    tiles = Tiles.seen_in(frame)
    best = tiles.best_swap()
    if rng.random() > SKILL:
        one, other = (divmod(int(place), 2) for place in rng.choice(4, 2, replace=False))
        best = None if rng.random() < 0.2 else (one, other)
    action = ("stop", "stop") if best is None else ("swap", best)
    return _in_tags(" ".join(tiles.tiles), "order" if best is None else "swap", action)


def _in_tags(seen: str, why: str, action: tuple[str, Any]) -> str:
    return f"<observation>{seen}</observation><justification>{why}</justification><action>{action!r}</action>"


GAMES = {
    "reasoned": Game(MAZE, "instruct", 8, 48, _reasoned),
    "tagged": Game(MAZE, "tagged", 8, 96, _tagged),
    "nested": Game(TILES, "tagged", 4, 80, _nested),
}


def draw_sources(rng: np.random.Generator, count: int, game: Game) -> list[Callable[[], Any]]:
    """Draws tickets with seeds; each is one source of rollouts."""
    make = partial(visgym_environment, answering=game.answering, asks=False)
    tickets = [
        parse_record(
            {
                "prompt": [{"role": "user", "content": "placeholder"}],
                "env_class": "visgym",
                "visgym_env_id": game.environment,
                "max_turns": game.max_turns,
                "seed": int(seed),
            }
        )
        for seed in rng.integers(2**31, size=count)
    ]
    return [partial(make, ticket.columns) for ticket in tickets]


def last_frame(prompt: Sequence[Chunk]) -> Pixels:
    """Returns the newest picture of a prompt, uint8 [height, width, 3]."""
    return next(chunk for chunk in reversed(prompt) if isinstance(chunk, Picture)).pixels


async def main(arguments: argparse.Namespace) -> None:
    """Runs the example."""
    game, rng = GAMES[arguments.answers], np.random.default_rng(arguments.seed)
    held_out, train = draw_sources(rng, arguments.held_out, game), draw_sources(rng, 1000, game)
    rollout = RolloutSettings(SamplingSettings(game.max_tokens, seed=arguments.seed), game.max_turns)
    experiment = await Experiment.begin(f"rl_visgym_{arguments.answers}", arguments, rollout)
    settings = LoopSettings(
        arguments.steps,
        arguments.groups,
        rollout=rollout,
        target_kl=0.001,  # a rollout has about 200 tokens; with three times this KL the model sometimes lost the form
        seed=arguments.seed,
    )
    await experiment.run(train, held_out, lambda prompt: game.write(last_frame(prompt), rng), settings, game.bar)


if __name__ == "__main__":
    run(main(read_arguments(__doc__, steps=60, warm_up=800, answers=tuple(GAMES))))
