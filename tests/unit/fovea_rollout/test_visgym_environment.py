"""VisGym's tickets, with the games of the examples and one with unusual answers."""

import io
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from PIL import Image

from examples.picture_games import MAZE, TILES, Maze
from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.environments.records import Record, environment_of, parse_record
from fovea_rollout.environments.visgym_environment import (
    WORDS,
    VisgymEnvironment,
    read_tagged,
    read_word,
    visgym_environment,
    with_seeds,
)
from fovea_rollout.loop.player_cloning import ScriptedPlayer
from fovea_rollout.messages import Message, Picture, parse_message
from fovea_rollout.policies.policy import SamplingSettings
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from fovea_rollout.templates.template import ChatTemplate
from tests.unit.fovea_rollout.chat_templates import tokenizer
from tests.unit.fovea_rollout.scripted import ScriptedPolicy

TAGS = "<observation>a wall</observation>\n<justification>go on</justification>\n<action>{}</action>"


def ticket(name: str = MAZE, **columns: Any) -> Record:
    prompt = [{"role": "user", "content": "placeholder"}]
    return parse_record({"prompt": prompt, "env_class": "visgym", "visgym_env_id": name, **columns})


def played(record: Record) -> VisgymEnvironment:
    environment = environment_of(record)
    assert isinstance(environment, VisgymEnvironment)
    return environment


def only(step: Step) -> Message:
    (message,) = step.messages
    return parse_message(message)


def frame_of(message: Message) -> Any:
    (picture,) = message.pictures
    return np.asarray(Image.open(io.BytesIO(picture.data)))


def best_word(message: Message) -> str:
    way = Maze.seen_in(frame_of(message)).best_way()
    return "stop" if way is None else next(word for word, action in WORDS.items() if action == ("move", way))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>left</action>", "('move', 2)"),
        ("It is there.\n<action> LEFT \n</action> Good.", "('move', 2)"),
        ("<Action>go right!</Action>", "('move', 0)"),
        ("<action>left</action> no, <action>up</action>", "('move', 1)"),
        ("So: <action>stop", "('stop', 'stop')"),
        ("<action>left or right</action>", None),
        ("<action>upwards</action>", None),
        ("<action></action>", None),
        ("left", None),
        ("", None),
    ],
)
def test_words_are_read_forgivingly(text: str, action: str | None) -> None:
    assert read_word(text).action == action


@pytest.mark.parametrize(
    ("text", "action", "is_formatted"),
    [
        (TAGS.format("('move', 0)"), "('move', 0)", True),
        (TAGS.format(" (move,0) "), "('move', 0)", True),
        (TAGS.format('("swap", ((0, 0), (1, 1)))'), "('swap', ((0, 0), (1, 1)))", True),
        (TAGS.format("('reorder', [3, 1, 2])"), "('reorder', [3, 1, 2])", True),
        ("<action>('move', 0)</action>", "('move', 0)", False),
        (TAGS.format("('move', 0)") + "!", "('move', 0)", False),
        (TAGS.format("('move', 0"), None, False),
        (TAGS.format("('move',)"), None, False),
        (TAGS.format("(0, 'move')"), None, False),
        (TAGS.format("left"), None, False),
        (TAGS.format("__import__('os').abort()"), None, False),
        (TAGS.format("('move', abort())"), None, False),
        (TAGS.format("(" * 1500), None, False),
        (TAGS.format("('move', " + "-" * 1900 + "1)"), None, False),
        (TAGS.format("('move', " + "9" * 100_000 + ")"), None, False),
        ("", None, False),
    ],
)
def test_pairs_are_read_as_literals(text: str, action: str | None, is_formatted: bool) -> None:
    move = read_tagged(text)
    assert (move.action, move.is_formatted) == (action, is_formatted)


def test_every_answer_brings_a_new_frame_and_the_end_a_reward() -> None:
    environment = played(ticket(seed=3, visgym_kwargs={"longest": 3}))
    (message,) = environment.reset()
    assert message.parts[0].startswith("Go to the red square.")  # type: ignore[union-attr]
    assert "<action>left</action>" in message.text
    steps = []
    while (word := best_word(message)) != "stop":
        steps.append(environment.step(Answer(f"I go {word}. <action>{word}</action>")))
        before, message = message, only(steps[-1])
        assert message.text == "You moved."
        assert (frame_of(message) != frame_of(before)).any()
    steps.append(environment.step(Answer("<action>stop</action>")))
    assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert [step.is_done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1].metrics == {"is_valid": 1.0, "is_formatted": 1.0, "success": 1.0}
    environment.close()


def test_an_answer_without_an_action_costs_a_turn_and_shows_the_same_frame() -> None:
    environment = played(ticket(seed=3, max_turns=2))
    (first,) = environment.reset()
    step = environment.step(Answer("left"))
    assert only(step).text.startswith("There is no action in the answer.")
    assert only(step).pictures[0] is first.pictures[0]
    assert step.metrics == {"is_valid": 0.0, "is_formatted": 0.0}
    last = environment.step(Answer("<action>left</action>"))
    assert (last.is_done, last.reward, last.metrics["success"]) == (True, 0.0, 0.0)


def test_a_tagged_answer_is_rewarded_for_task_and_format() -> None:
    rewards = []
    for texts in (["('stop', 'stop')"], ["?", "('stop', 'stop')"]):
        environment = visgym_environment(ticket(TILES, seed=1).columns, answering="tagged")
        environment.reset()
        game: Any = environment._env.unwrapped
        for one, other in iter(game.best_swap, None):
            step = environment.step(Answer(TAGS.format(f"('swap', ({one}, {other}))")))
            assert only(step).text == "Swapped."
        for text in texts:
            step = environment.step(Answer(TAGS.format(text)))
        swaps = environment._answers - len(texts)
        rewards.append((step.reward, 0.8 + 0.2 * (swaps + 1) / (swaps + len(texts))))
    assert [paid for paid, _ in rewards] == pytest.approx([due for _, due in rewards])
    assert rewards[0][0] == 1.0


class Odd(gymnasium.Env[int, str]):
    """Describes no action, rewards every step, and is truncated by a limit."""

    render_mode = "rgb_array"
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (4, 8, 3)) -> None:
        self._shape, self.actions = tuple(shape), list[str]()

    def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: str) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return 0, 0.5, False, len(self.actions) == 2, {}

    def render(self) -> Any:
        return np.zeros(self._shape, np.uint8)

    def get_prompt(self) -> str:
        return "Do."


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register("odd/one", Odd)
    gymnasium.register("odd/speechless", "gymnasium.envs.toy_text:FrozenLakeEnv")
    yield
    for name in ("odd/one", "odd/speechless"):
        gymnasium.registry.pop(name)


def test_only_the_step_that_ends_it_is_rewarded() -> None:
    environment = played(ticket("odd/one"))
    environment.reset()
    first, second = (environment.step(Answer("<action>up</action>")) for _ in range(2))
    assert (only(first).text, first.reward) == ("Action executed.", 0.0)
    assert (second.reward, second.is_done) == (0.5, True)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"visgym_env_id": 3}, "visgym_env_id is 3; it must be a registered id"),
        ({"visgym_env_id": "nothing/here"}, "gymnasium cannot make visgym_env_id 'nothing/here'"),
        ({"visgym_env_id": "no.module:here"}, "gymnasium cannot make visgym_env_id 'no.module:here'"),
        ({"visgym_kwargs": {"colour": 3}}, "cannot make visgym_env_id .*colour"),
        ({"visgym_kwargs": "size=3"}, "visgym_kwargs is 'size=3'; it must be an object"),
        ({"seed": "7"}, "seed is '7'; it must be a whole number"),
        ({"max_turns": True}, "max_turns is True; it must be a whole number"),
        ({"max_turns": 0}, "max_turns is 0; it must be 1 or more"),
        ({"visgym_env_id": "odd/speechless"}, r"has no get_prompt\(\)"),
    ],
)
def test_a_bad_ticket_is_refused_by_field(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        environment_of(parse_record(dict(ticket().columns, prompt=[{"role": "user", "content": "x"}]) | columns))


def test_a_frame_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"render\(\) returned uint8 \(4, 8\)"):
        played(ticket("odd/one", visgym_kwargs={"shape": (4, 8)})).reset()


def test_tickets_without_a_seed_get_one_each() -> None:
    tickets = [ticket(), ticket(seed=5), ticket()]
    first, second, third = with_seeds(tickets, 0)
    assert second == tickets[1]
    assert first.extra["seed"] != third.extra["seed"]
    assert [first, second, third] == with_seeds(tickets, 0)
    frames = [frame_of(played(first).reset()[0]).tolist() for _ in range(2)]
    assert frames[0] == frames[1]


async def test_a_whole_rollout_only_appends_and_has_a_picture_more_each_turn() -> None:
    name = "tiny/qwen3_vl"
    player = ScriptedPlayer(ScriptedPolicy(lambda _: ""), tokenizer(name), lambda _: "So <action>up</action>")
    (trajectory,) = await run_rollouts(
        player,
        ChatTemplate(tokenizer(name)),
        [lambda: played(ticket(seed=2, max_turns=4))],
        RolloutSettings(SamplingSettings(max_tokens=40), max_turns=10),
    )
    assert trajectory.failure is None
    assert trajectory.prefix_breaks == 0
    pictures = [sum(isinstance(chunk, Picture) for chunk in turn.prompt) for turn in trajectory.turns]
    assert pictures == [1, 2, 3, 4]
