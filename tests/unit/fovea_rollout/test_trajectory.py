"""Growth of segments, and the start of new ones."""

import pytest

from fovea_rollout.environments.environment import Answer
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import Chunk, Sampled, Tokens, WeightVersions
from fovea_rollout.trajectory import Segment, Trajectory, Turn, after_prefix

RED, SAME_RED, BLUE = Picture(b"red", "png"), Picture(b"red", "png"), Picture(b"blue", "png")


def tokens(*ids: int) -> Tokens:
    return Tokens(ids)


def turn(prompt: tuple[Chunk, ...], ids: tuple[int, ...], version: int = 0) -> Turn:
    sampled = Sampled(ids, tuple(-float(i) for i in ids), "stop", WeightVersions(version, version + 1))
    return Turn(prompt, (Message("user", ("x",)),), sampled, Answer("x"), 1.0, {})


@pytest.mark.parametrize(
    ("prompt", "prefix", "expected"),
    [
        ((tokens(1, 2, 3),), (tokens(1, 2),), (tokens(3),)),
        ((tokens(1), tokens(2, 3)), (tokens(1, 2), tokens()), (tokens(3),)),
        ((tokens(1, 2),), (tokens(1, 2),), ()),
        ((tokens(1, 2),), (), (tokens(1, 2),)),
        ((tokens(), tokens(1, 2)), (tokens(1),), (tokens(2),)),
        ((tokens(1), RED, tokens(2)), (tokens(1), SAME_RED), (tokens(2),)),
        ((tokens(1), tokens(), RED, tokens(2)), (tokens(1), RED), (tokens(2),)),
        ((tokens(1), RED), (tokens(1), BLUE), None),
        ((tokens(1), RED), (tokens(1, 2),), None),
        ((tokens(1),), (tokens(1), RED), None),
        ((tokens(1),), (tokens(1, 2),), None),
        ((tokens(1, 3, 3),), (tokens(1, 2),), None),
        ((), (tokens(1),), None),
    ],
)
def test_after_prefix(prompt: tuple[Chunk, ...], prefix: tuple[Chunk, ...], expected: tuple[Chunk, ...] | None) -> None:
    assert after_prefix(prompt, prefix) == expected


def test_a_segment_grows_by_what_is_new() -> None:
    trajectory = Trajectory("c")
    trajectory.append(turn((tokens(1), RED, tokens(2)), (3, 4)), is_append_only=True)
    trajectory.append(turn((tokens(1), SAME_RED, tokens(2, 3, 4, 9), BLUE), (5,), 1), is_append_only=True)
    (segment,) = trajectory.segments
    assert segment == Segment(
        (tokens(1), RED, tokens(2), tokens(3, 4), tokens(9), BLUE, tokens(5)), {3: (-3.0, -4.0), 6: (-5.0,)}, (0, 1)
    )
    assert segment.pictures == (RED, BLUE)
    assert (trajectory.prefix_breaks, trajectory.rewrites, trajectory.reward) == (0, 0, 2.0)
    assert trajectory.versions == WeightVersions(0, 2)


@pytest.mark.parametrize("is_append_only", [True, False])
def test_a_rewritten_history_begins_a_segment(is_append_only: bool) -> None:
    trajectory = Trajectory("c")
    trajectory.append(turn((tokens(1),), (2, 3)), is_append_only)
    trajectory.append(turn((tokens(1, 3, 9),), (4,)), is_append_only)
    assert trajectory.segments == [
        Segment((tokens(1), tokens(2, 3)), {1: (-2.0, -3.0)}, (0,)),
        Segment((tokens(1, 3, 9), tokens(4)), {1: (-4.0,)}, (1,)),
    ]
    assert (trajectory.prefix_breaks, trajectory.rewrites) == ((1, 0) if is_append_only else (0, 1))


def test_a_turn_without_tokens_has_no_loss() -> None:
    trajectory = Trajectory("c")
    trajectory.append(turn((tokens(1),), ()), is_append_only=True)
    trajectory.append(turn((tokens(1, 2),), (3,)), is_append_only=True)
    assert trajectory.segments == [Segment((tokens(1), tokens(2), tokens(3)), {2: (-3.0,)}, (1,))]


def test_nothing_sampled_has_no_versions() -> None:
    assert Trajectory("c").versions is None
