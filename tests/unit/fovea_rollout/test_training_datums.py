"""Trajectories as training examples: targets, masks and lengths, position by position."""

import numpy as np
import pytest
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer
from fovea_rollout.loop.training_batch import training_datums
from fovea_rollout.messages import Message, Picture
from fovea_rollout.policies.policy import Chunk, Portion, Sampled, Tokens, WeightVersions
from fovea_rollout.trajectory import Trajectory, Turn
from tests.unit.fovea_rollout.scripted import PICTURE_TOKENS, ScriptedPolicy

RED = Picture(b"red", "png")
POLICY = ScriptedPolicy(lambda _: "|")


def trajectory(*turns: tuple[tuple[Chunk, ...], tuple[int, ...]], is_append_only: bool = True) -> Trajectory:
    made = Trajectory("c")
    for index, (prompt, ids) in enumerate(turns):
        logprobs = tuple(-0.5 - i for i in ids)
        sampled = Sampled(ids, logprobs, "stop", WeightVersions(index, index))
        made.append(Turn(prompt, (Message("user", ("x",)),), sampled, Answer("x"), 1.0, {}), is_append_only)
    return made


async def test_targets_are_shifted_and_the_mask_is_what_was_sampled() -> None:
    first = (Tokens((1, 2)), RED, Tokens((3,)))
    second = (*first, Tokens((4, 5, 6)), RED, Tokens((7,)))
    (made,) = await training_datums(trajectory((first, (4, 5)), (second, (8, 9))), [2.0, -1.0], POLICY)
    chunks = made.datum.model_input.chunks
    kinds = [list(chunk.tokens) if chunk.type == "encoded_text" else chunk.expected_tokens for chunk in chunks]
    assert kinds == [[1, 2], 4, [3], [4, 5], [6], 4, [7], [8]]
    assert chunks[1].data is RED.data, "pictures must be sent by reference"
    inputs = {name: column.to_numpy() for name, column in made.datum.loss_fn_inputs.items()}
    assert made.datum.model_input.length == len(inputs["target_tokens"]) == 2 * PICTURE_TOKENS + 8
    targets = [0, *[0] * 4, 0, 4, 5, 0, *[0] * 4, 0, 8, 9]
    assert inputs["target_tokens"].tolist() == targets
    assert inputs["advantages"].tolist() == [0, *[0] * 4, 0, 2, 2, 0, *[0] * 4, 0, -1, -1]
    assert inputs["logprobs"].tolist() == [-0.5 - i if i else 0 for i in targets]
    assert {name: column.dtype for name, column in inputs.items()} == {
        "target_tokens": np.int64, "logprobs": np.float32, "advantages": np.float32,
    }  # fmt: skip
    assert (made.turns, made.versions, made.pictures) == ((0, 1), WeightVersions(0, 1), (RED.digest,) * 2)


def resumed(ids: tuple[int, ...], *portions: tuple[int, int, str]) -> Sampled:
    """Returns a turn of several requests, each with its number of tokens, its version and its sequence."""
    made = tuple(Portion(count, WeightVersions(version, version), name) for count, version, name in portions)
    bounds = WeightVersions(portions[0][1], portions[-1][1])
    return Sampled(ids, (-1.0,) * len(ids), "stop", bounds, resumed=made)


def turns(*each: tuple[tuple[Chunk, ...], Sampled]) -> Trajectory:
    made = Trajectory("c")
    for prompt, sampled in each:
        made.append(Turn(prompt, (Message("user", ("x",)),), sampled, Answer("x"), 1.0, {}), True)
    return made


async def test_each_token_has_the_version_and_the_sequence_that_sampled_it() -> None:
    first = (Tokens((1, 2)), RED, Tokens((3,)))
    second = (*first, Tokens((4, 5, 6)), Tokens((7,)))
    whole = Sampled((8, 9), (-1.0, -1.0), "stop", WeightVersions(3, 4), sequence_id="c")
    played = turns((first, resumed((4, 5, 6), (2, 1, "a"), (1, 2, "b"))), (second, whole))
    (made,) = await training_datums(played, [1.0, 1.0], POLICY)
    unsampled = [-1, -1]
    assert made.token_versions.tolist() == [
        *[unsampled] * 6, [1, 1], [1, 1], [2, 2], unsampled, [3, 4], [3, 4],
    ]  # fmt: skip
    assert made.versions == WeightVersions(1, 4)
    assert made.datum.model_input_spans == [
        PromptProvenanceSpan(sequence_id="a", length=7),
        SampledProvenanceSpan(sequence_id="a", length=2),
        SampledProvenanceSpan(sequence_id="b", length=1),
        PromptProvenanceSpan(sequence_id="c", offset=10, length=1),
        SampledProvenanceSpan(sequence_id="c", length=1),
    ]
    assert made.datum.loss_fn_input_spans == [
        PromptProvenanceSpan(sequence_id="a", offset=1, length=6),
        SampledProvenanceSpan(sequence_id="a", length=2),
        SampledProvenanceSpan(sequence_id="b", length=1),
        PromptProvenanceSpan(sequence_id="c", offset=10, length=1),
        SampledProvenanceSpan(sequence_id="c", length=2),
    ]


async def test_spans_without_tokens_are_left_out() -> None:
    (made,) = await training_datums(turns(((Tokens((1,)),), resumed((2, 3), (1, 0, "a"), (1, 0, "b")))), [1.0], POLICY)
    assert made.datum.model_input_spans == [
        PromptProvenanceSpan(sequence_id="a", length=1),
        SampledProvenanceSpan(sequence_id="a", length=1),
    ]
    assert made.datum.loss_fn_input_spans == [
        SampledProvenanceSpan(sequence_id="a", length=1),
        SampledProvenanceSpan(sequence_id="b", length=1),
    ]


async def test_no_provenance_if_the_server_did_not_name_every_sequence() -> None:
    (made,) = await training_datums(turns(((Tokens((1,)),), resumed((2, 3), (1, 0, "a"), (1, 0, "")))), [1.0], POLICY)
    assert made.datum.model_input_spans is made.datum.loss_fn_input_spans is None


async def test_a_segment_each_where_the_history_was_rewritten() -> None:
    rollout = trajectory(((Tokens((1,)),), (2, 3)), ((Tokens((1, 3, 9)),), (4,)), is_append_only=False)
    first, second = await training_datums(rollout, [[1.0, 2.0], 3.0], POLICY)
    assert [list(c.tokens) for c in first.datum.model_input.chunks] == [[1], [2]]
    assert first.datum.loss_fn_inputs["advantages"].tolist() == [1.0, 2.0]
    assert [list(c.tokens) for c in second.datum.model_input.chunks] == [[1, 3, 9]]
    assert second.datum.loss_fn_inputs["target_tokens"].tolist() == [0, 0, 4]
    assert second.versions == WeightVersions(1, 1)


async def test_unsampled_tokens_at_the_end_are_cut_off() -> None:
    rollout = trajectory(((Tokens((1,)),), (2,)), ((Tokens((1, 2, 7)), RED), ()))
    (made,) = await training_datums(rollout, [1.0, 1.0], POLICY)
    assert [list(c.tokens) for c in made.datum.model_input.chunks] == [[1]]
    assert made.turns == (0,)


@pytest.mark.parametrize(
    ("advantages", "words"),
    [([1.0], "1 rows, but the rollout has 2 turns"), ([1.0, [1.0, 2.0, 3.0]], r"advantages\[1\] has shape \(3,\)")],
)
async def test_advantages_of_another_shape_are_refused(advantages: list, words: str) -> None:
    rollout = trajectory(((Tokens((1,)),), (2,)), ((Tokens((1, 2)),), (3, 4)))
    with pytest.raises(InvalidInput, match=words):
        await training_datums(rollout, advantages, POLICY)


async def test_nothing_sampled_gives_no_datum() -> None:
    assert await training_datums(Trajectory("c"), [], POLICY) == []
