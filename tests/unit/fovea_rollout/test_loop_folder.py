"""Figures in a loop's folder; tests/e2e/fovea_rollout/test_resumed_loop.py tests the resumption."""

from fovea_rollout.evaluation import Evaluation
from fovea_rollout.loop.loop_folder import figures_of
from fovea_rollout.loop.step_report import step_report
from fovea_rollout.loop.training_batch import TrainingBatch
from fovea_rollout.trajectory import Failure
from tests.unit.fovea_rollout.rollouts import FourTokenPictures, rollout, turn

BROKEN = Failure("reset", "OSError: no display")


def test_unknown_figures_are_left_out() -> None:
    groups = [[rollout(failure=BROKEN)]]
    figures = figures_of(step_report(0, groups, TrainingBatch([]), [], {"rollout": 1.5}, FourTokenPictures(), 0.25))
    assert figures == {
        "signal_share": 0.0, "lag": 0, "sampled_tokens": 0, "trained_tokens": 0, "failed_rollouts": 1,
        "cancelled_groups": 0, "rate_share": 0.25, "seconds/rollout": 1.5,
    }  # fmt: skip


def test_an_evaluation_and_the_environments_own() -> None:
    groups = [[rollout(turn([1], [2], [-1.0], 0.5, hits=1.0))]]
    seen = Evaluation(0.75, {"hits": 0.5}, (("held-out-1/2", BROKEN),), ())
    figures = figures_of(step_report(0, groups, TrainingBatch([]), [], {}, FourTokenPictures(), 1.0, seen))
    assert (figures["reward"], figures["hits"]) == (0.5, 1.0)
    assert (figures["held_out_reward"], figures["held_out/hits"], figures["held_out/failed_rollouts"]) == (0.75, 0.5, 1)
