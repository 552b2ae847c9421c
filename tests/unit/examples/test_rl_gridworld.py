"""The room: starts differ, and rewards per step lead to the goal on a shortest path."""

from functools import cache

import pytest

from examples.rl_gridworld import MAX_STEPS, make_environment
from fovea_rollout.environments.environment import Answer


@cache
def play(seed: int, words: tuple[str, ...], *, by_steps: bool = False) -> tuple[float, float]:
    """Plays a walk; returns the reward of its last step and whether it succeeded. Extra words are ignored."""
    environment = make_environment(seed, by_steps=by_steps)
    environment.reset()
    for word in words:
        step = environment.step(Answer(word))
        if step.is_done:
            break
    environment.close()
    return step.reward, step.metrics.get("success", 0.0)


def test_starts_differ_and_the_same_seed_gives_the_same() -> None:
    digests = []
    for seed in (*range(12), 0):
        (message,) = make_environment(seed).reset()
        digests.append(message.pictures[0].digest)
    assert len(set(digests)) > 5
    assert digests[0] == digests[-1]


@pytest.mark.slow
def test_from_every_start_some_step_brings_nearer_by_one_and_none_by_more() -> None:
    """So the total step reward is the distance of the start in actions, and the longest path is allowed."""
    longest = 0
    for seed in range(60):
        lengths = set()
        for order in (("left", "right", "top"), ("top", "right", "left")):
            earned, is_there = walk_greedily(seed, order)
            assert is_there
            lengths.add(earned)
        assert len(lengths) == 1, "every greedy walk must be a shortest path"
        longest = max(longest, *lengths)
    assert longest == MAX_STEPS


def walk_greedily(seed: int, order: tuple[str, ...]) -> tuple[int, bool]:
    """Always takes the first word that comes nearer; returns the number of steps and whether they end at the goal."""
    taken: tuple[str, ...] = ()
    while len(taken) < MAX_STEPS:
        rewards = {word: play(seed, (*taken, word), by_steps=True) for word in order}
        assert max(reward for reward, _ in rewards.values()) == 1.0
        taken = (*taken, next(word for word in order if rewards[word][0] == 1.0))
        if rewards[taken[-1]][1]:
            return len(taken), True
    return len(taken), False


def test_only_the_goal_is_rewarded_where_it_is_measured() -> None:
    rewards = {play(seed, ("top",)) for seed in range(60)}
    assert rewards == {(0.0, 0.0), (1.0, 1.0)}
