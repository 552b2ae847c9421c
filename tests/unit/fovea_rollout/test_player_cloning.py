"""The rollouts that the warm-up clones."""

import itertools
from typing import Any

from fovea_rollout.loop.player_cloning import ScriptedPlayer
from fovea_rollout.messages import Picture
from fovea_rollout.policies.policy import SamplingSettings
from tests.unit.fovea_rollout.scripted import END, PICTURE_TOKENS, ScriptedPolicy, ids_of


class Letters:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(ids_of(text))


async def test_it_says_what_was_drawn_and_ends_its_turn() -> None:
    answers = itertools.count(1)
    tokenizer: Any = Letters()
    player = ScriptedPlayer(ScriptedPolicy(lambda _: "|"), tokenizer, lambda prompt: f"{len(prompt)}{next(answers)}")
    for expected in ("01", "02"):
        sampled = await player.sample([], SamplingSettings(), [END], "one")
        assert sampled.ids == (*ids_of(expected), END)
        assert len(sampled.logprobs) == len(sampled.ids)
        assert sampled.stop_reason == "stop"
    assert await player.token_count(Picture(b"", "png")) == PICTURE_TOKENS
