"""Golden test: two turns about coloured squares, token by token, for an appending and a stripping template."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import Chunk, Sampled, SamplingSettings, WeightVersions
from fovea_rollout.rollout import RolloutSettings, run_rollout
from fovea_rollout.templates.template import ChatTemplate
from fovea_rollout.trajectory import Segment, Trajectory
from tests.unit.fovea_rollout.chat_templates import flat, square, tokenizer, user

RED, BLUE = square(255, 0, 0), square(0, 0, 255)
PICTURE = "<|vision_start|> <|image_pad|> <|vision_end|>"
FIRST_QUESTION = f"<|im_start|> user Ċ {PICTURE} Which Ġcolour Ġis Ġit ? <|im_end|> Ċ <|im_start|> a ss istant Ċ"
SECOND_QUESTION = f"<|im_start|> user Ċ {PICTURE} A nd Ġn ow ? <|im_end|> Ċ <|im_start|> a ss istant Ċ"

# Letter by letter, unlike any tokenizer: a prompt with `red` as one token would have been re-tokenized.
PLAIN_TURNS = ("r e d <|im_end|>", "b l u e <|im_end|>")
THINKING_TURNS = (
    "<think> Ċ I Ġsee Ġred . Ċ </think> Ċ Ċ r e d <|im_end|>",
    "<think> Ċ I Ġsee Ġblue . Ċ </think> Ċ Ċ b l u e <|im_end|>",
)


class ColourSquares:
    """Shows a red square and then a blue one; a correct colour has reward 1."""

    def __init__(self) -> None:
        self._colours = ["red", "blue"]

    async def reset(self) -> Sequence[Message]:
        return [user(RED, "Which colour is it?")]

    async def step(self, answer: Answer) -> Step:
        reward = float(answer.text == self._colours.pop(0))
        return Step([user(BLUE, "And now?")], reward, is_done=not self._colours)

    async def close(self) -> None:
        pass


class Script:
    """A policy that samples given tokens; a token's log-probability is minus its position."""

    def __init__(self, name: str, turns: Sequence[str]) -> None:
        self._name = name
        self._turns = list(turns)
        self.prompts: list[tuple[Chunk, ...]] = []

    async def sample(
        self, prompt: Sequence[Chunk], settings: SamplingSettings, stop_ids: Sequence[int], conversation: str
    ) -> Sampled:
        self.prompts.append(tuple(prompt))
        ids = tuple(ids_of(self._name, self._turns.pop(0)))
        assert ids[-1] in stop_ids
        return Sampled(ids, logprobs_of(ids), "stop", WeightVersions(3, 3))

    async def token_count(self, picture: Picture) -> int:
        return 4


def ids_of(name: str, tokens: str) -> list[int]:
    """Returns the ids of space-separated tokens."""
    ids: list[int] = tokenizer(name).convert_tokens_to_ids(tokens.split())
    assert None not in ids
    return ids


def logprobs_of(ids: Sequence[int]) -> tuple[float, ...]:
    return tuple(-float(place) for place in range(len(ids)))


async def play(name: str, turns: Sequence[str]) -> tuple[list[list[int]], Trajectory]:
    """Plays an episode; returns the flat prompts and the trajectory."""
    script = Script(name, turns)
    template = ChatTemplate(tokenizer(name))
    trajectory = await run_rollout(script, template, ColourSquares, RolloutSettings(), "squares")
    assert trajectory.failure is None
    assert trajectory.end == "done"
    assert [turn.reward for turn in trajectory.turns] == [1.0, 1.0]
    return [flat(name, prompt) for prompt in script.prompts], trajectory


def assert_segment(name: str, segment: Segment, tokens: Sequence[str], sampled: Sequence[bool]) -> None:
    """Checks that a segment consists of these runs of tokens, with loss on the sampled ones."""
    runs = [ids_of(name, run) for run in tokens]
    assert flat(name, segment.chunks) == [token for run in runs for token in run]
    loss: list[float | None] = []
    for place, chunk in enumerate(segment.chunks):
        loss += segment.sampled.get(place, (None,) * len(flat(name, [chunk])))
    expected: list[float | None] = []
    for run, is_sampled in zip(runs, sampled, strict=True):
        expected += logprobs_of(run) if is_sampled else (None,) * len(run)
    assert loss == expected


@pytest.mark.parametrize("name", ["tiny/qwen3_vl", "released/qwen3_vl_instruct"])
@pytest.mark.parametrize("turns", [PLAIN_TURNS, THINKING_TURNS], ids=["plain", "thinking"])
async def test_a_template_that_appends_gives_one_segment(name: str, turns: tuple[str, str]) -> None:
    prompts, trajectory = await play(name, turns)
    runs = [FIRST_QUESTION, turns[0], f"Ċ {SECOND_QUESTION}", turns[1]]
    assert prompts == [ids_of(name, FIRST_QUESTION), ids_of(name, " ".join(runs[:3]))]
    (segment,) = trajectory.segments
    assert_segment(name, segment, runs, [False, True, False, True])
    assert segment.pictures == (RED, BLUE)
    assert (trajectory.prefix_breaks, trajectory.rewrites) == (0, 0)


async def test_a_template_that_strips_thinking_gives_a_segment_a_turn() -> None:
    name = "released/qwen3_vl_thinking"
    written = [turn.removeprefix("<think> Ċ ") for turn in THINKING_TURNS]
    prompts, trajectory = await play(name, written)
    first = f"{FIRST_QUESTION} <think> Ċ"
    second = f"{FIRST_QUESTION} r e d <|im_end|> Ċ {SECOND_QUESTION} <think> Ċ"
    assert prompts == [ids_of(name, first), ids_of(name, second)]
    assert len(trajectory.segments) == 2
    assert_segment(name, trajectory.segments[0], [first, written[0]], [False, True])
    assert_segment(name, trajectory.segments[1], [second, written[1]], [False, True])
    assert [segment.pictures for segment in trajectory.segments] == [(RED,), (RED, BLUE)]
    assert trajectory.segments[1].pictures[0] is RED
    assert (trajectory.prefix_breaks, trajectory.rewrites) == (0, 1)
