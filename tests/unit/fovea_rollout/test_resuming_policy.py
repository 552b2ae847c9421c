"""Turns of several requests: no token is lost or repeated when weights change or a sampler stops between requests."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fovea.wire.errors import InvalidInput
from fovea_rollout.messages import Picture
from fovea_rollout.policies.policy import (
    Chunk,
    Portion,
    Sampled,
    SamplingSettings,
    Tokens,
    WeightVersions,
    derived_seed,
)
from fovea_rollout.policies.resuming_policy import ResumingPolicy
from tests.unit.fovea_rollout.scripted import END, PICTURE_TOKENS, ids_of, text_of

PROMPT = (Tokens(ids_of("say:")), Picture(b"red", "png"), Tokens(ids_of("a:")))
NUMBERS = "one two three four five"


def letters(ids: Sequence[int]) -> str:
    return text_of([Tokens(tuple(ids))])


class Speaker:
    """Samples a text from the end of the prompt like a server: a request ends at its length or at its own stop text.

    Attributes:
        seeds: The seed of each request.
        heard: The text after the first prompt, for each request.
        on_request: Called before each request.
    """

    def __init__(self, text: str, version: int, on_request: Callable[[], None] = lambda: None) -> None:
        self.text, self.version, self.on_request = text, version, on_request
        self.seeds: list[int | None] = []
        self.heard: list[str] = []

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        said = text_of(prompt).removeprefix(text_of(PROMPT))
        self.heard.append(said)
        self.seeds.append(settings.seed)
        own, reason = "", "length"
        for letter in self.text[len(said) :]:
            own += letter
            if letter == "|" or any(stop in own for stop in settings.stop):
                reason = "stop"
                break
            if len(own) == settings.max_tokens:
                break
        self.on_request()
        ids = tuple(END if letter == "|" else ord(letter) for letter in own)
        logprobs = tuple(-float(len(said) + place) for place in range(len(ids)))
        rows = len(text_of(prompt)) + len(ids) - 1
        experts = np.full((rows, 1, 1), self.version)
        bounds = WeightVersions(self.version, self.version)
        return Sampled(ids, logprobs, reason, bounds, experts, f"v{self.version}:{len(said)}")  # type: ignore[arg-type]

    async def token_count(self, picture: Picture) -> int:
        return PICTURE_TOKENS + self.version


async def test_a_turn_continues_with_newer_weights() -> None:
    newer = Speaker(NUMBERS.upper() + "|", 7)
    policy = ResumingPolicy(Speaker("", 0), 5, letters)
    policy.move(Speaker(NUMBERS + "|", 4, on_request=lambda: policy.move(newer)))
    sampled = await policy.sample(PROMPT, SamplingSettings(max_tokens=100, seed=3), (END,), "c")
    assert letters(sampled.ids) == "one t" + NUMBERS.upper()[5:] + "|", "no token may be lost or repeated"
    assert sampled.logprobs == tuple(-float(place) for place in range(24))
    assert newer.heard == ["one t", "one tWO TH", "one tWO THREE F", "one tWO THREE FOUR F"]
    assert (sampled.stop_reason, sampled.versions, sampled.sequence_id) == ("stop", WeightVersions(4, 7), "")
    assert sampled.portions == (
        Portion(5, WeightVersions(4, 4), "v4:0"),
        *(Portion(count, WeightVersions(7, 7), f"v7:{place}") for place, count in ((5, 5), (10, 5), (15, 5), (20, 4))),
    )
    assert sampled.experts is not None
    read = len(text_of(PROMPT))
    assert sampled.experts.ravel().tolist() == [4] * (read + 4) + [7] * 19, (
        "versions of the request that first read each token"
    )
    assert newer.seeds == [derived_seed(3, place) for place in (5, 10, 15, 20)], "a request must never repeat a seed"
    assert await policy.token_count(PROMPT[1]) == PICTURE_TOKENS + 7  # type: ignore[arg-type]


async def test_a_turn_of_one_request_is_as_its_policy_gave_it() -> None:
    speaker = Speaker("hi|", 1)
    direct = await speaker.sample(PROMPT, SamplingSettings(seed=3), (END,), "c")
    sampled = await ResumingPolicy(speaker, 256, letters).sample(PROMPT, SamplingSettings(seed=3), (END,), "c")
    assert (sampled, sampled.portions, sampled.resumed) == (direct, direct.portions, ())
    assert direct.portions == (Portion(3, WeightVersions(1, 1), "v1:0"),)
    assert speaker.seeds == [3, 3]


@pytest.mark.parametrize("most", [1, 4, 5, 6, 10, 23])
async def test_the_length_of_a_turn_is_that_of_its_settings(most: int) -> None:
    policy = ResumingPolicy(Speaker(NUMBERS + "|", 0), 5, letters)
    sampled = await policy.sample(PROMPT, SamplingSettings(max_tokens=most), (END,), "c")
    assert (letters(sampled.ids), sampled.stop_reason) == (NUMBERS[:most], "length")
    assert sum(one.count for one in sampled.portions) == most


@pytest.mark.parametrize("portion", range(1, 25))
@pytest.mark.parametrize("stop", [("three",), ("thr", "four"), ("five",), ("o", "one")])
async def test_a_stop_text_ends_a_turn_wherever_a_request_ends(portion: int, stop: tuple[str, ...]) -> None:
    whole = await Speaker(NUMBERS + "|", 0).sample(PROMPT, SamplingSettings(stop=stop), (END,), "c")
    policy = ResumingPolicy(Speaker(NUMBERS + "|", 0), portion, letters)
    sampled = await policy.sample(PROMPT, SamplingSettings(stop=stop), (END,), "c")
    assert (sampled.ids, sampled.logprobs, sampled.stop_reason) == (whole.ids, whole.logprobs, "stop")
    assert sum(one.count for one in sampled.portions) == len(whole.ids)
    assert sampled.experts is not None
    assert whole.experts is not None
    assert sampled.experts.shape == whole.experts.shape


def test_a_portion_has_at_least_one_token() -> None:
    with pytest.raises(InvalidInput, match="portion is 0; it must be 1 or more"):
        ResumingPolicy(Speaker("", 0), 0, letters)
