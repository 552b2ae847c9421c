"""The puzzle with the zoom tool: its pictures, and the scores of players with more or less information."""

import io

import numpy as np
import pytest
from PIL import Image

from examples.rl_zoom import COLOURS, MAX_TURNS, PLACES, Puzzle, RandomPlayer, ZoomEnvironment, draw_puzzle, zoom_call
from fovea_rollout.environments.environment import Step, read_answer
from fovea_rollout.messages import Picture


def shown(picture: Picture) -> set[tuple[int, ...]]:
    """Returns the colours of a picture."""
    with Image.open(io.BytesIO(picture.data)) as image:
        return {tuple(int(value) for value in pixel) for pixel in np.asarray(image).reshape(-1, 3)}


async def say(environment: ZoomEnvironment, *texts: str) -> Step:
    for text in texts:
        step = await environment.step(read_answer(text, is_cut=False))
    return step


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("colour", COLOURS)
def test_only_the_right_zoom_shows_the_seal(place: str, colour: str) -> None:
    puzzle = Puzzle(place, colour)
    for zoomed in (None, *PLACES):
        assert (COLOURS[colour] in shown(puzzle.draw(zoomed))) == (zoomed == place)
    assert puzzle.draw() == Puzzle(place, next(other for other in COLOURS if other != colour)).draw()


async def test_looking_and_zooming_gives_the_right_answer() -> None:
    step = await say(ZoomEnvironment(Puzzle("top", "blue")), zoom_call("left"), zoom_call("top"))
    (message,) = step.messages
    (picture,) = message.pictures  # type: ignore[union-attr]
    assert COLOURS["blue"] in shown(picture)
    assert (step.is_done, step.reward, step.metrics["is_found"]) == (False, 0.0, 1.0)
    assert (await say(ZoomEnvironment(Puzzle("top", "blue")), zoom_call("top"), "blue\n")).reward == 1.0


@pytest.mark.parametrize("call", [zoom_call("centre"), "<tool_call>zoom</tool_call>"])
async def test_a_wrong_call_costs_its_turn_and_gets_an_explanation(call: str) -> None:
    environment = ZoomEnvironment(Puzzle("top", "blue"))
    step = await say(environment, call)
    (message,) = step.messages
    assert not message.pictures  # type: ignore[union-attr]
    step = await say(environment, *[call] * (MAX_TURNS - 1))
    assert (step.is_done, step.reward) == (True, 0.0)


async def test_the_random_player_is_right_by_chance() -> None:
    rng = np.random.default_rng(0)
    player, rewards = RandomPlayer(rng), []
    for _ in range(300):
        environment = ZoomEnvironment(draw_puzzle(rng))
        prompt = [picture for message in await environment.reset() for picture in message.pictures]
        step = Step()
        while not step.is_done:
            step = await say(environment, player.answer(prompt))
            prompt += [picture for message in step.messages for picture in message.pictures]  # type: ignore[union-attr]
        rewards.append(step.reward)
    assert 0.15 < np.mean(rewards) < 0.35
