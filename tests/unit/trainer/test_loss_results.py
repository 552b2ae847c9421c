"""The gap counts positions with an advantage, for losses with sampled log-probabilities, token by token."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fovea.wire.errors import InvalidInput
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.loss_results import MicroBatchResult, RankResult, expert_loads, mean_logprob_gap


def datum(index: int, **inputs: list[float]) -> Datum:
    given = {name: np.array(values, np.float32) for name, values in inputs.items()}
    return dataclasses.replace(Datum.blank(3), index=index, inputs=given)


def own(*rows: list[float]) -> dict[int, npt.NDArray[np.float32]]:
    return {index: np.array(row, np.float32) for index, row in enumerate(rows)}


def test_only_positions_that_count_are_compared() -> None:
    one = datum(0, logprobs=[-9.0, -1.0, -2.0], advantages=[0.0, 1.0, -1.0], weights=[1.0, 1.0, 1.0])
    two = datum(1, logprobs=[-1.0, -1.0, -1.0], advantages=[1.0, 1.0, 1.0], weights=[1.0, 0.0, 0.0])
    gap = mean_logprob_gap([one, two], own([-1.0, -1.5, -1.75], [-1.75, -50.0, -50.0]))
    assert gap == pytest.approx((0.5 + 0.25 + 0.75) / 3)


@pytest.mark.parametrize(
    "inputs",
    [
        {"weights": [1.0, 1.0, 1.0]},
        {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0], "weights": [1.0, 1.0]},
        {"logprobs": [-1.0, -1.0, -1.0], "advantages": [0.0, 0.0, 0.0], "weights": [1.0, 1.0, 1.0]},
    ],
    ids=["no policy gradient", "a traced loss with shapes of its own", "no advantage"],
)
def test_without_sampled_logprobs_there_is_no_gap(inputs: dict[str, list[float]]) -> None:
    assert mean_logprob_gap([datum(0, **inputs)], own([-1.0, -1.0, -1.0])) is None


def test_how_evenly_experts_are_loaded() -> None:
    found = expert_loads([0, 2], [[[3, 1], [2, 2]], [], [[3, 1], [3, 1]]])
    assert found == {"expert_load/layer_00:mean": 1.5, "expert_load/layer_02:mean": 1.25, "expert_load:max": 1.5}
    assert expert_loads([], [[], []]) == {}


@pytest.mark.parametrize(
    ("logprob", "said"),
    [
        (np.nan, r"loss is nan: the log-probabilities of model 'm' at step 7 are not finite, so it has diverged"),
        (-1.0, r"loss is nan: values in its loss_inputs are too large.* check its loss_inputs"),
    ],
    ids=["diverged", "loss_inputs"],
)
def test_a_loss_that_is_not_finite_blames_what_is_not(logprob: float, said: str) -> None:
    result = RankResult()
    row = torch.tensor([-1.0, logprob, -1.0])
    result.add(MicroBatchResult((datum(3),), [row], torch.tensor([torch.nan]), {}), "ppo", "model 'm' at step 7")
    with pytest.raises(InvalidInput, match=said):
        result.check()
