"""The room: starts differ, the goal can be reached in time, and earlier is better."""

from itertools import product

from examples.rl_gridworld import MAX_STEPS, RULES, make_environment
from fovea.rollout.environment import Answer


def play(seed: int, words: tuple[str, ...]) -> tuple[float, float]:
    """Reward and success of a walk; the words may be more than it takes."""
    environment = make_environment(seed)
    environment.reset()
    for word in words:
        step = environment.step(Answer(word))
        if step.is_done:
            break
    environment.close()
    return step.reward, step.metrics["success"]


def test_starts_differ_and_the_same_seed_gives_the_same() -> None:
    digests = []
    for seed in (*range(12), 0):
        (message,) = make_environment(seed).reset()
        digests.append(message.pictures[0].digest)
    assert len(set(digests)) > 5
    assert digests[0] == digests[-1]


def test_the_goal_is_reached_in_time_from_every_start_and_earlier_is_better() -> None:
    turns = ((), ("left",), ("right",), ("left", "left"))
    for seed in range(8):
        rewards = set()
        for first, ahead, second in product(turns, (0, 1, 2), ("left", "right")):
            walk = (*first, *["top"] * ahead, second, *["top"] * MAX_STEPS)[:MAX_STEPS]
            reward, success = play(seed, walk)
            assert success == (reward > 0)
            rewards.add(reward)
        best = max(rewards)
        assert 0.1 <= round(best, 6) < 1.0


def test_the_words_are_the_three_moves() -> None:
    assert list(RULES.actions.values()) == [0, 1, 2]
