"""Figures of a step's report."""

import math

import numpy as np
import pytest
import tinker

from fovea_rollout.evaluation import Evaluation
from fovea_rollout.loop.step_report import step_report
from fovea_rollout.loop.training_batch import TrainingBatch, training_batch
from fovea_rollout.policies.policy import WeightVersions
from fovea_rollout.trajectory import Failure
from tests.unit.fovea_rollout.rollouts import FourTokenPictures, rollout, turn

BROKEN = Failure("reset", "OSError: no display")


async def test_report() -> None:
    groups = [
        [
            rollout(turn([1], [2, 3], [-1.0, -2.0], 1.0, WeightVersions(2, 3), hits=1.0), conversation="a"),
            rollout(turn([1], [4], [-3.0], 0.0, WeightVersions(3, 3), hits=0.0, late=5.0), conversation="b"),
        ],
        [rollout(turn([1], [5], [-1.0], 0.5)), rollout(conversation="d", failure=BROKEN)],
    ]
    batch = await training_batch(groups, "grpo", filter_groups=True, policy=FourTokenPictures())
    of_trainer = [np.array([-1.0, -1.9], np.float32), np.array([-3.2], np.float32)]
    output = tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"logprobs": tinker.TensorData.from_numpy(row)} for row in of_trainer],
        metrics={"loss:sum": 3.0},
    )
    moved = [np.array([-1.0, -2.0], np.float32), np.array([-2.0], np.float32)]
    later = tinker.ForwardBackwardOutput(
        "ArrayRecord",
        [{"logprobs": tinker.TensorData.from_numpy(row)} for row in moved],
        {"loss:sum": 5.0, "late:sum": 2.0},
    )
    outputs = [(batch, output), (batch, later), (batch, output)]
    report = step_report(4, groups, batch, outputs, {"train": 1.5}, FourTokenPictures(), 0.25)
    log_ratio = np.array([0.0, 0.1, -0.2])
    assert report.agreement is not None
    assert report.agreement.kl == pytest.approx(np.mean(np.exp(log_ratio) - 1 - log_ratio), rel=1e-5)
    assert report.agreement.largest_log_ratio == pytest.approx(0.2, rel=1e-5)
    assert report.reward_mean == pytest.approx(0.5)
    assert (report.step, report.lag, report.signal_share) == (4, 2, 0.5)
    assert (report.sampled_tokens, report.trained_tokens) == (4, 3)
    assert report.failures == (("d", BROKEN),)
    assert report.metrics == {
        "hits": 0.5,
        "late": 5.0,
        "trainer/loss:sum": pytest.approx(11 / 3),
        "trainer/late:sum": 2.0,
    }
    assert report.moved_kl == pytest.approx((np.e - 2) / 3, rel=1e-5), "from the substep with the largest value"
    assert report.rate_share == 0.25
    assert report.seconds == {"train": 1.5}
    assert [datum.versions.oldest for datum in report.data] == [2, 3]


async def test_a_step_without_signal() -> None:
    groups = [[rollout(conversation="a", failure=BROKEN), rollout(conversation="b", failure=BROKEN)]]
    batch = await training_batch(groups, "grpo", filter_groups=True, policy=FourTokenPictures())
    report = step_report(0, groups, batch, [], {}, FourTokenPictures(), 1.0)
    assert math.isnan(report.reward_mean)
    assert (report.agreement, report.moved_kl, report.lag, report.signal_share) == (None, None, 0, 0.0)
    assert len(report.failures) == 2


def test_a_report_is_printed_in_one_line() -> None:
    groups = [[rollout(turn([1], [2], [-1.0], 0.5)), rollout(failure=Failure("step", "OSError: no\ndisplay"))]]
    seen = Evaluation(0.75, {}, (), ())
    seconds = {"rollout": 1.4, "train": 2.0}
    report = step_report(6, groups, TrainingBatch([]), [], seconds, FourTokenPictures(), 1.0, seen)
    assert str(report) == (
        "step 7: reward 0.500 (mean of 1 of 2 rollouts), held out 0.750, signal 0%, lag 0, nothing to train on, 3 s, "
        "1 of 2 rollouts failed, the first in step: OSError: no display"
    )
    assert len(repr(report)) < 1000, "without the tokens of all rollouts"


@pytest.mark.parametrize(
    ("rewards", "is_advised"), [((0.0, 0.0), True), ((-1.0, -1.0), True), ((1.0, 1.0), False), ((1.0, -1.0), False)]
)
def test_a_warm_up_is_advised_if_no_answer_was_rewarded(rewards: tuple[float, float], is_advised: bool) -> None:
    groups = [[rollout(turn([1], [token], [-1.0], reward)) for token in (2, 3)] for reward in rewards]
    report = step_report(0, groups, TrainingBatch([]), [], {}, FourTokenPictures(), 1.0)
    assert ("begin with warm_up" in str(report)) is is_advised
