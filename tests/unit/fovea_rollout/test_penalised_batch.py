"""A rollout that the base model cannot score fails alone; training uses the rest of its group and batch."""

import math
from functools import partial
from typing import Any

import pytest
import tinker

from fovea.wire.errors import FoveaError
from fovea_rollout.loop.training_batch import TrainingBatch, penalised_batch, training_batch
from fovea_rollout.trajectory import Trajectory
from tests.unit.fovea_rollout.rollouts import FourTokenPictures, rollout, turn

REFUSED = ValueError("the prompt has one token more than the server takes")


class Base:
    """Scores each token with -1, except the answer of a rollout that says `bad`: it gets `last`, or an error."""

    def __init__(self, bad: int, last: float | Exception | None) -> None:
        self._bad, self._last = bad, last

    async def compute_logprobs(self, read: tinker.ModelInput) -> list[float | None]:
        """Returns one score per token; the first has none."""
        ids = read.to_ints()
        scores: list[float | None] = [None] + [-1.0] * (len(ids) - 1)
        if ids[-1] != self._bad:
            return scores
        if isinstance(self._last, Exception):
            raise self._last
        return [*scores[:-1], self._last]


def played() -> list[list[Trajectory]]:
    """Returns one group; the rollout that says 0 has a reward that would move the others' mean."""
    return [
        [
            rollout(turn([1, 2], [5, said], [-0.5, -0.5], reward=reward), conversation=f"group-0/{said}")
            for said, reward in ((0, 9.0), (7, 1.0), (8, 0.0))
        ]
    ]


async def penalised(groups: list[list[Trajectory]], base: Any) -> TrainingBatch:
    made = partial(training_batch, groups, "dr_grpo", filter_groups=False, policy=FourTokenPictures())
    return await penalised_batch(groups, made, base, 0.1)


@pytest.mark.parametrize("last", [REFUSED, None, math.nan, -math.inf])
async def test_a_rollout_that_the_base_cannot_score_is_left_out_alone(last: float | Exception | None) -> None:
    groups = played()
    batch = await penalised(groups, Base(0, last))
    assert [datum.conversation for datum in batch.data] == ["group-0/7", "group-0/8"]
    advantages = [datum.datum.loss_fn_inputs["advantages"].tolist() for datum in batch.data]
    assert advantages == [[0.0, 0.5, 0.5], [0.0, -0.5, -0.5]], "the failed one must not count in the group's mean"
    assert batch.base_kl == pytest.approx(0.5)
    broken, *others = groups[0]
    assert (broken.end, broken.is_scored) == ("failed", False)
    assert broken.failure is not None
    assert broken.failure.stage == "score"
    assert (str(REFUSED) if last is REFUSED else "it must be finite") in broken.failure.error
    assert [one.failure for one in others] == [None, None]


async def test_a_base_that_scores_nothing_is_an_error() -> None:
    class Nothing:
        async def compute_logprobs(self, read: tinker.ModelInput) -> list[float | None]:
            return []

    groups = played()
    with pytest.raises(FoveaError, match="has 3 targets, but the base model scored 0"):
        await penalised(groups, Nothing())
    assert [one.failure for one in groups[0]] == [None] * 3, "a wrong setting is not a rollout's fault"


async def test_a_batch_without_rollouts_has_no_penalty() -> None:
    batch = await penalised([[rollout(), rollout()]], Base(0, REFUSED))
    assert (batch.data, batch.base_kl) == ([], None)
