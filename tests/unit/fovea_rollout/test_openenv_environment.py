"""OpenEnv: a client of its protocol, and its own client and server where they are installed (`make environments`)."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.rl_openenv import serving
from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.openenv_environment import OpenEnvEnvironment, observation_message
from fovea_rollout.messages import Picture
from fovea_rollout.policies.policy import SamplingSettings
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from fovea_rollout.trajectory import Trajectory
from tests.unit.fovea_rollout.scripted import LetterTemplate, ScriptedPolicy

SETTINGS = RolloutSettings(SamplingSettings(max_tokens=8), max_turns=4)
PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


@dataclass
class Result:
    observation: Any
    reward: float | None = None
    done: bool = False


class Countdown:
    """Counts down from the number given to reset; the reward is 1 for each `down`."""

    def __init__(self) -> None:
        self.closed = 0

    async def reset(self, start: int) -> Result:
        self._left = start
        return Result({"left": start}, done=start == 0)

    async def step(self, action: dict[str, str]) -> Result:
        is_down = action["word"] == "down"
        self._left -= is_down
        return Result({"left": self._left}, float(is_down) if is_down else None, self._left == 0)

    async def close(self) -> None:
        self.closed += 1


async def play(client: Any, script: str, **options: Any) -> Trajectory:
    def make() -> OpenEnvEnvironment:
        return OpenEnvEnvironment(client, lambda answer: {"word": answer.text}, reset=options)

    (trajectory,) = await run_rollouts(ScriptedPolicy(lambda _: script), LetterTemplate(), [make], SETTINGS)
    return trajectory


async def test_an_episode_goes_on_until_the_server_says_done() -> None:
    client = Countdown()
    trajectory = await play(client, "down|", start=2)
    assert trajectory.end == "done"
    assert [turn.reward for turn in trajectory.turns] == [1.0, 1.0]
    assert [turn.new_messages[0].text for turn in trajectory.turns] == ["2", "1"]
    assert trajectory.turns[-1].metrics == {"steps": 2.0}
    assert client.closed == 1


async def test_no_reward_is_none_of_it() -> None:
    trajectory = await play(Countdown(), "up|", start=2)
    assert trajectory.end == "max_turns"
    assert trajectory.reward == 0.0


async def test_an_episode_that_is_done_at_reset_fails_and_is_closed() -> None:
    client = Countdown()
    trajectory = await play(client, "down|", start=0)
    assert trajectory.failure is not None
    assert trajectory.failure.stage == "reset"
    assert client.closed == 1


def test_a_client_that_blocks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="sync"):
        OpenEnvEnvironment(SimpleNamespace(step=lambda action: None), lambda answer: answer)  # type: ignore[arg-type]


def test_a_text_alone_stands_as_it_is_and_several_are_named() -> None:
    assert observation_message({"text": "You win", "hint": "", "legal": []}).text == "You win"
    assert observation_message({"board": "X.", "legal": [1]}).text == "board: X.\nlegal: [1]"
    assert observation_message("bare").text == "bare"


@pytest.mark.parametrize(
    "screen",
    [PIXELS, PIXELS.tolist(), Picture.of_pixels(PIXELS).data, Picture.of_pixels(PIXELS).data_uri],
    ids=["array", "lists", "file", "uri"],
)
def test_a_picture_in_any_form_is_a_picture(screen: Any) -> None:
    message = observation_message({"screen": screen, "text": "Where to?"})
    assert message.parts == (Picture.of_pixels(PIXELS), "Where to?")


def test_numbers_that_are_no_pixels_are_text() -> None:
    assert observation_message({"position": [[[0, 1, 999]]]}).text == "[[[0, 1, 999]]]"


@pytest.mark.parametrize("observation", [{}, {"text": ""}, {"screen": "data:image/png;base64,AAAA"}])
def test_nothing_to_show_and_broken_pictures_are_refused(observation: Any) -> None:
    with pytest.raises(InvalidInput):
        observation_message(observation)


def colour_app() -> Any:
    """A real OpenEnv server: the answer is the colour of a square, which changes with every turn; three squares."""
    env_server = pytest.importorskip("openenv.core.env_server", reason="OpenEnv is installed in a separate environment")
    http_server = pytest.importorskip("openenv.core.env_server.http_server")

    class Name(env_server.Action):  # type: ignore[name-defined, misc]
        word: str

    class Square(env_server.Observation):  # type: ignore[name-defined, misc]
        screen: str
        question: str = "Which colour?"

    class Colours(env_server.Environment):  # type: ignore[name-defined, misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Square:
            self._turn, self._first = 0, seed or 0
            return self._square(None)

        def step(self, action: Name, timeout_s: float | None = None, **_: Any) -> Square:
            is_right = action.word == ("red", "green", "blue")[self._channel]
            self._turn += 1
            return self._square(float(is_right))

        @property
        def state(self) -> Any:
            return env_server.State(step_count=self._turn)

        @property
        def _channel(self) -> int:
            return (self._first + self._turn) % 3

        def _square(self, reward: float | None) -> Square:
            pixels = np.zeros((32, 32, 3), np.uint8)
            pixels[..., self._channel] = 255
            return Square(screen=Picture.of_pixels(pixels).data_uri, reward=reward, done=self._turn == 3)

    return http_server.HTTPEnvServer, Colours, Name, Square


async def test_a_real_server_is_played_over_its_websocket_pictures_included() -> None:
    server_class, colours, name, square = colour_app()
    from fastapi import FastAPI
    from openenv.core import GenericEnvClient  # type: ignore[import-not-found]

    app = FastAPI()
    server_class(colours, name, square, max_concurrent_envs=8).register_routes(app)
    seen: list[int] = []

    def to_action(seed: int) -> Any:
        return lambda answer: seen.append(seed) or {"word": answer.text}  # type: ignore[func-returns-value]

    with serving(app) as url:

        def source(seed: int) -> OpenEnvEnvironment:
            return OpenEnvEnvironment(GenericEnvClient(base_url=url), to_action(seed), reset={"seed": seed})

        factories = [lambda seed=seed: source(seed) for seed in range(6)]
        played = await run_rollouts(ScriptedPolicy(lambda _: "red|"), LetterTemplate(), factories, SETTINGS)
    assert [one.failure for one in played] == [None] * 6
    assert [one.end for one in played] == ["done"] * 6
    assert [[turn.reward for turn in one.turns] for one in played[:2]] == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert sorted(seen) == sorted([*range(6)] * 3)
    assert [one.prefix_breaks for one in played] == [0] * 6
    (picture,) = played[1].turns[0].new_messages[0].pictures
    assert picture.size == (32, 32)
