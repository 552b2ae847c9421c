"""Real gymnasium environments, played with words."""

import io
import random
from typing import Any

import gymnasium
import minigrid  # noqa: F401  (registers its environments)
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.environments.gymnasium_environment import GymnasiumEnvironment, Rules, enlarged
from fovea_rollout.messages import Message, parse_message
from fovea_rollout.policies.policy import SamplingSettings
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from tests.unit.fovea_rollout.scripted import LetterTemplate, ScriptedPolicy

LAKE = ["SFF", "FHF", "FFG"]
ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
RULES = Rules("Where to?", ACTIONS)


def draw_lake() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("FrozenLake-v1", desc=LAKE, is_slippery=False, render_mode="rgb_array")


def make_environment(**rules: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(draw_lake(), Rules("Where to?", ACTIONS, **rules), seed=0)


def pixels_of(message: Message) -> npt.NDArray:
    (picture,) = message.pictures
    return np.asarray(Image.open(io.BytesIO(picture.data)))


def only(step: Step) -> Message:
    (message,) = step.messages
    return parse_message(message)


def test_every_turn_shows_what_the_environment_draws() -> None:
    environment, other = make_environment(), draw_lake()
    other.reset(seed=0)
    (message,) = environment.reset()
    for word in ("right", "Right", " down\n"):
        assert message.role == "user"
        assert message.text == "Where to?"
        np.testing.assert_array_equal(pixels_of(message), other.render())
        step = environment.step(Answer(word))
        other.step(ACTIONS[word.strip().lower()])
        assert step.reward == 0.0
        assert not step.is_done
        message = only(step)
    step = environment.step(Answer("down"))
    assert step.is_done
    assert step.reward == 1.0
    assert step.metrics == {"is_valid": 1.0, "steps": 4.0, "success": 1.0}
    environment.close()


def test_a_discount_makes_late_rewards_smaller() -> None:
    environment = make_environment(discount=0.5)
    environment.reset()
    assert [environment.step(Answer(word)).reward for word in ("right", "right", "down", "down")] == [0, 0, 0, 0.125]


def test_a_hole_ends_it_without_success() -> None:
    environment = make_environment()
    environment.reset()
    environment.step(Answer("right"))
    step = environment.step(Answer("down"))
    assert step.is_done
    assert step.metrics["success"] == 0.0


def test_an_answer_that_is_no_action_gets_feedback_and_leaves_the_frame() -> None:
    environment = make_environment(invalid_reward=-0.1)
    environment.reset()
    step = environment.step(Answer("nowhere"))
    assert step.reward == -0.1
    assert step.metrics == {"is_valid": 0.0, "steps": 1.0}
    assert only(step).text == "Answer with one of: left, down, right, up."
    assert not only(step).pictures
    step = environment.step(Answer("down"))
    other = draw_lake()
    other.reset(seed=0)
    other.step(ACTIONS["down"])
    np.testing.assert_array_equal(pixels_of(only(step)), other.render())


def test_an_answer_that_is_no_action_can_end_it() -> None:
    environment = make_environment(invalid_reward=-1.0, invalid_feedback=None)
    environment.reset()
    step = environment.step(Answer(""))
    assert step.is_done
    assert step.reward == -1.0
    assert step.metrics["success"] == 0.0


def test_max_steps_ends_it_whatever_is_answered() -> None:
    environment = make_environment(max_steps=2)
    environment.reset()
    assert not environment.step(Answer("nowhere")).is_done
    assert environment.step(Answer("left")).is_done


def test_the_environment_may_truncate_by_itself() -> None:
    lake = gymnasium.wrappers.TimeLimit(draw_lake(), max_episode_steps=1)
    environment = GymnasiumEnvironment(lake, RULES, seed=0)
    environment.reset()
    assert environment.step(Answer("left")).is_done


def test_a_minigrid_is_the_same_for_the_same_seed() -> None:
    rules = Rules("What next?", {"left": 0, "right": 1, "forward": 2}, least_side=300)
    pictures = []
    for seed in (1, 1, 2):
        grid = gymnasium.make("MiniGrid-Empty-Random-6x6-v0", render_mode="rgb_array", tile_size=8)
        environment = GymnasiumEnvironment(grid, rules, seed)
        (message,) = environment.reset()
        assert pixels_of(message).shape == (336, 336, 3)
        pictures.append(message.pictures[0].digest)
        assert only(environment.step(Answer("forward"))).pictures
        environment.close()
    assert pictures[0] == pictures[1] != pictures[2]


def test_frames_grow_by_integer_factors() -> None:
    frame = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    grown = enlarged(frame, 5)
    assert grown.shape == (6, 9, 3)
    for y in range(6):
        for x in range(9):
            assert (grown[y, x] == frame[y // 3, x // 3]).all()
    assert enlarged(frame, 2).shape == enlarged(frame, 0).shape == (2, 3, 3)


@pytest.mark.parametrize(
    "frame", [None, np.zeros((2, 2, 3)), np.zeros((2, 2), np.uint8), np.zeros((0, 2, 3), np.uint8)]
)
def test_other_frames_are_refused(frame: Any) -> None:
    with pytest.raises(InvalidInput, match=r"uint8 \[height, width, 3\]"):
        enlarged(frame, 0)


def test_another_render_mode_is_refused() -> None:
    with pytest.raises(InvalidInput, match="render_mode='rgb_array'"):
        GymnasiumEnvironment(gymnasium.make("FrozenLake-v1"), RULES)


@pytest.mark.parametrize(
    ("rules", "named"),
    [({"actions": {}}, "actions"), ({"actions": {"Left": 0}}, "'left'"), ({"max_steps": -1}, "max_steps")],
)
def test_rules_say_what_is_wrong(rules: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        Rules("Where to?", **{"actions": ACTIONS, **rules})


async def test_many_play_at_once() -> None:
    template: Any = LetterTemplate()
    walker = random.Random(0)
    policy = ScriptedPolicy(lambda _: walker.choice(list(ACTIONS)) + "|")
    settings = RolloutSettings(SamplingSettings(max_tokens=8), max_turns=6)
    played = await run_rollouts(policy, template, [make_environment] * 64, settings, progress=False)
    assert [one.failure for one in played] == [None] * 64
    assert all(len(turn.new_messages[0].pictures) == 1 for one in played for turn in one.turns)
