"""The drawn problems: rows in the recipe's format, correct answers, and a player that sees but guesses."""

import io
import pathlib

import numpy as np
from PIL import Image

from examples.rl_geometry3k import Player, diagonal, read_rectangle, sources_of, write_rows
from fovea_rollout.environments.environment import read_answer
from fovea_rollout.environments.geometry3k_environment import final_answer
from fovea_rollout.environments.math_grading import is_same_answer
from fovea_rollout.policies.policy import Chunk


def test_the_pictures_of_rows_match_their_answers(tmp_path: pathlib.Path) -> None:
    records = write_rows(tmp_path / "train.jsonl", np.random.default_rng(0), 40)
    answers = set()
    for index, record in enumerate(records):
        (picture,) = record.prompt[0].pictures
        assert picture.format == "jpeg"
        with Image.open(io.BytesIO(picture.data)) as image:
            width, height = read_rectangle(np.asarray(image))
        truth = record.reward_spec["ground_truth"]
        assert truth == diagonal(width, height) == record.extra["extra_info"]["answer"]
        assert record.extra["extra_info"]["index"] == index
        answers.add(truth)
    assert len(answers) == 6
    assert is_same_answer(diagonal(2, 2), "\\sqrt{8}")


async def test_the_player_is_right_by_chance(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(1)
    records = write_rows(tmp_path / "train.jsonl", rng, 200)
    player, right, calls = Player(rng), 0, 0
    for source in sources_of(records):
        environment = source()
        (message,) = environment.reset()
        prompt: list[Chunk] = list(message.pictures)
        answer = read_answer(player.answer(prompt), is_cut=False)
        assert " by " in answer.thinking
        step = environment.step(answer)
        calls += len(answer.tool_calls)
        right += step.reward == 1.0
        assert step.is_done == (step.reward == 1.0 or not answer.tool_calls)
        assert answer.tool_calls or final_answer(answer.text)
    assert 60 < calls < 140
    assert 10 < right < 60
