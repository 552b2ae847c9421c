"""Groups as datums: dropped rollouts, and the positions of advantages."""

from dataclasses import replace

import numpy as np
import pytest

from fovea_rollout.loop.training_batch import returns_of, rewards_of, training_batch
from fovea_rollout.messages import Picture
from fovea_rollout.trajectory import Failure, Trajectory, Turn
from tests.unit.fovea_rollout.rollouts import FourTokenPictures, rollout, turn

PICTURE = Picture.of_pixels(np.zeros((4, 4, 3), np.uint8))
BROKEN = Failure("step", "ValueError: no")


def one(reward: float, *, is_broken: bool = False):
    """Returns two turns: 1, picture -> 5 6; then 7 -> 8. A sampled 0 with probability 1 must not
    look like a prompt's.
    """
    first = turn([1, PICTURE], [5, 0], [-0.5, 0.0])
    second = turn([1, PICTURE, 5, 0, 7], [8], [-1.5], reward=reward)
    return rollout(first, second, failure=BROKEN if is_broken else None)


async def test_advantages_land_on_sampled_tokens_only() -> None:
    batch = await training_batch([[one(1.0), one(0.0)]], "dr_grpo", filter_groups=True, policy=FourTokenPictures())
    # Targets: 4 placeholders, 5, 0, 7, 8.
    mask = [False] * 4 + [True, True, False, True]
    assert [found.tolist() for found in batch.masks] == [mask, mask]
    for datum, advantage in zip(batch.data, (0.5, -0.5), strict=True):
        inputs = datum.datum.loss_fn_inputs
        assert inputs["advantages"].tolist() == [advantage * counts for counts in mask]
        assert inputs["target_tokens"].tolist() == [0, 0, 0, 0, 5, 0, 0, 8]
        assert inputs["advantages"].dtype == inputs["logprobs"].dtype == "float32"
    assert batch.logprobs()[0].tolist() == [0, 0, 0, 0, -0.5, 0, 0, -1.5]


async def test_experts_are_those_of_the_turn_that_met_a_token_first() -> None:
    def met(turn_: Turn, number: int, count: int) -> Turn:
        experts = np.full((count, 3, 3), number, np.uint8)
        return replace(turn_, sampled=replace(turn_.sampled, experts=experts))

    # 1, picture -> 5 0; then 7 -> 8: of the nine tokens the last is no input, and the first turn read all except 0, 7.
    first, second = one(1.0).turns
    played = rollout(met(first, 1, 6), met(second, 2, 8))
    half = rollout(met(first, 1, 6), second)
    batch = await training_batch([[played, half]], "dr_grpo", filter_groups=False, policy=FourTokenPictures())
    inputs, others = (datum.datum.loss_fn_inputs for datum in batch.data)
    found = inputs["routed_experts"].to_numpy()
    assert (found.shape, found.dtype) == ((8, 2), np.int64)
    assert len(inputs["target_tokens"].tolist()) == 8
    unpacked = found.view(np.uint8)[:, :9]
    assert unpacked.tolist() == [[1] * 9] * 6 + [[2] * 9] * 2
    assert "routed_experts" not in others


async def test_failures_and_groups_without_signal_are_left_out() -> None:
    unstarted = rollout()
    groups = [
        [one(1.0), one(9.0, is_broken=True), one(0.0)],
        [one(1.0), one(1.0), one(1.0)],
        [one(1.0), one(0.0, is_broken=True), unstarted],
    ]
    np.testing.assert_array_equal(rewards_of(groups), [[1, np.nan, 0], [1, 1, 1], [1, np.nan, np.nan]])
    batch = await training_batch(groups, "rloo", filter_groups=True, policy=FourTokenPictures())
    assert [datum.datum.loss_fn_inputs["advantages"].tolist()[-1] for datum in batch.data] == [1.0, -1.0]
    everything = await training_batch(groups, "rloo", filter_groups=False, policy=FourTokenPictures())
    assert [datum.datum.loss_fn_inputs["advantages"].tolist()[-1] for datum in everything.data] == [1, -1, 0, 0, 0, 0]
    assert all(mask.sum() == 3 for mask in everything.masks), "an advantage of 0 must not become a loss mask of 0"


async def test_no_group_at_all() -> None:
    batch = await training_batch([], "grpo", filter_groups=True, policy=FourTokenPictures())
    assert batch.data == []


async def test_parts_have_every_datum_once() -> None:
    group = [one(float(reward)) for reward in range(5)]
    batch = await training_batch([group], "rloo", filter_groups=True, policy=FourTokenPictures())
    parts = batch.split(2, (0, 1))
    assert [len(part.data) for part in parts] == [3, 2]
    assert {id(datum) for part in parts for datum in part.data} == {id(datum) for datum in batch.data}
    assert all(len(part.masks) == len(part.data) for part in parts)
    assert len(batch.split(9, (0, 1))) == 5
    assert batch.split(1, (0, 1))[0].data == batch.data


async def test_turns_are_judged_by_what_came_of_them() -> None:
    """Rewards 0.25 then 1, 0.75 then 0, and 0.5 at the only turn; a broken rollout does not count."""

    def played(*rewards: float, is_broken: bool = False):
        turns = [turn([1, *[5, 7] * index], [5], [-1.0], reward=reward) for index, reward in enumerate(rewards)]
        return rollout(*turns, failure=BROKEN if is_broken else None)

    group = [played(0.25, 1.0), played(0.75, 0.0), played(0.5), played(9.0, 9.0, is_broken=True)]
    np.testing.assert_array_equal(returns_of(group, 0.5), [[0.75, 0.75, 0.5, np.nan], [1.0, 0.0, np.nan, np.nan]])
    batch = await training_batch([group], "dr_grpo", filter_groups=True, policy=FourTokenPictures(), discount=0.0)
    found = [datum.datum.loss_fn_inputs["advantages"].tolist() for datum in batch.data]
    # At the first turn 0.25, 0.75, 0.5 around 0.5; at the second 1 and 0 around 0.5.
    assert found == [[-0.25, 0.0, 0.5], [0.25, 0.0, -0.5], [0.0]]


async def test_a_group_is_left_out_if_no_turn_has_a_signal() -> None:
    same = [one(1.0), one(1.0)]
    batch = await training_batch([same], "grpo", filter_groups=True, policy=FourTokenPictures(), discount=0.9)
    assert batch.data == []


@pytest.mark.parametrize("discount", [None, 0.0])
async def test_a_rollout_of_which_no_datum_can_be_made_fails_alone(discount: float | None) -> None:
    def met(conversation: str, reward: float, width: int) -> Trajectory:
        found = [turn([1], [5], [-0.5]), turn([1, 5, 7], [8], [-0.5], reward=reward)]
        experts = [np.zeros((2, 1, 2), np.uint8), np.zeros((4, 1, width), np.uint8)]
        with_experts = [
            replace(one, sampled=replace(one.sampled, experts=rows)) for one, rows in zip(found, experts, strict=True)
        ]
        return rollout(*with_experts, conversation=conversation)

    group = [met("unequal", 9.0, 3), met("a", 1.0, 2), met("b", 0.0, 2)]
    batch = await training_batch([group], "dr_grpo", filter_groups=True, policy=FourTokenPictures(), discount=discount)
    assert [datum.conversation for datum in batch.data] == ["a", "b"]
    last = [datum.datum.loss_fn_inputs["advantages"].tolist()[-1] for datum in batch.data]
    assert last == [0.5, -0.5], "the failed one must not count in the group's mean"
    failure = group[0].failure
    assert failure is not None
    assert (failure.stage, group[0].is_scored) == ("batch", False)
    assert "dimension" in failure.error


async def test_a_server_that_counts_no_picture_is_an_error() -> None:
    class Silent(FourTokenPictures):
        async def token_count(self, picture: Picture) -> int:
            raise OSError("no answer")

    group = [replace(one(float(reward)), conversation=f"group-0/{reward}") for reward in range(2)]
    with pytest.raises(OSError, match="no answer"):
        await training_batch([group], "grpo", filter_groups=True, policy=Silent())
