"""Curves keep the visible shape in bounded memory, for any length of training."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea_gateway.live.live_routes import to_text
from fovea_gateway.live.live_state import summed
from fovea_gateway.live.step_curves import (
    BUCKETS,
    MOST_METRICS,
    MOST_SERIES,
    REWARD_BINS,
    REWARD_ROWS,
    RewardHistogram,
    StepCurves,
    SystemHistory,
)  # fmt: skip

NUMBERS = st.floats(-1e6, 1e6)


def _filled(steps: int) -> StepCurves:
    curves = StepCurves()
    for step in range(1, steps + 1):
        curves.add(step, {"loss": float(step)})
    return curves


def test_few_steps_are_shown_as_they_were() -> None:
    assert _filled(5).points("loss", 100) == {"step": [1, 2, 3, 4, 5], "mean": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("steps", [BUCKETS - 1, BUCKETS, 10_000])
def test_points_cover_all_steps_once_and_are_no_more_than_asked_for(steps: int) -> None:
    curves = _filled(steps)
    found = curves.points("loss", 300)
    assert len(found["step"]) <= 300
    assert curves.means("loss", 300) == found["mean"]
    assert found["step"] == sorted(found["step"])
    # The mean of 1 .. n, each point weighted by its number of steps.
    widths = [high - low + 1 for low, high in zip(found["low"], found["high"], strict=True)]
    assert sum(widths) == steps
    total = sum(mean * width for mean, width in zip(found["mean"], widths, strict=True))
    assert total / steps == pytest.approx((steps + 1) / 2)


def test_a_spike_of_one_step_in_ten_thousand_is_seen() -> None:
    curves = StepCurves()
    for step in range(1, 10_001):
        curves.add(step, {"loss": 99.0 if step == 7_777 else 1.0})
    found = curves.points("loss", 100)
    place = found["high"].index(99.0)
    assert abs(found["step"][place] - 7_777) < 10_000 / 100 + curves.stride
    assert max(found["mean"]) < 3


def test_a_value_of_an_earlier_step_and_one_that_is_not_finite() -> None:
    curves = _filled(3)
    curves.add(2, {"reward": 0.5})
    curves.add(4, {"loss": math.nan})
    assert curves.points("reward", 10) == {"step": [2], "mean": [0.5]}
    assert curves.points("loss", 10)["step"] == [1, 2, 3]
    assert math.isnan(curves.last["loss"])


def test_metrics_are_bounded_by_number() -> None:
    curves = StepCurves()
    curves.add(1, {f"metric {number}": 1.0 for number in range(100)})
    assert len(curves.names) == MOST_METRICS


@given(st.lists(st.tuples(st.integers(0, 3000), NUMBERS), min_size=1, max_size=60))
def test_stored_curves_are_read_back_unchanged(values: list[tuple[int, float]]) -> None:
    curves = StepCurves()
    for step, value in values:
        curves.add(step, {"loss": value, "reward": -value})
    again = StepCurves.from_blob(curves.to_blob())
    assert again.points("loss", 50) == curves.points("loss", 50)
    assert again.points("reward", BUCKETS) == curves.points("reward", BUCKETS)
    assert (again.last, again.last_step, again.stride) == (curves.last, curves.last_step, curves.stride)


def test_a_loss_is_per_token_if_calls_report_token_counts() -> None:
    parts = [{"loss:sum": 6.0, "weights:sum": 2.0, "tokens:sum": 9.0}, {"loss:sum": 4.0, "weights:sum": 3.0}]
    assert summed(parts) == {"loss_per_token": 2.0, "tokens": 9.0}
    assert summed([{"loss:sum": 6.0, "ratio:max": 1.5}, {"loss:sum": 1.0, "ratio:max": 1.1}]) == {
        "loss_sum": 7.0,
        "ratio_max": 1.5,
    }


def test_numbers_that_would_overflow_a_sum_are_left_out() -> None:
    curves = StepCurves()
    for value in (1e308, 1e308, -1e308, 1e200, 2.0):
        curves.add(0, {"reward": value})
    assert curves.points("reward", 10) == {"step": [0.0], "mean": [5e199]}


@pytest.mark.parametrize("name", ["custom/a:mean", "custom/a:sum", "custom/a:max", "loss:sum"])
@pytest.mark.parametrize("values", [(1e308, 1e308), (math.inf, -math.inf), (math.nan, 1.0)])
def test_no_numbers_of_a_step_end_what_is_noted_of_others(name: str, values: tuple[float, float]) -> None:
    """A mean over two values of 1e308 raised OverflowError, which lost the results of other models."""
    found = summed([{name: value, "weights:sum": 1.0} for value in values])
    assert len(found) == 1
    curves = StepCurves()
    curves.add(1, found)
    points = [curves.points(one, 10) for one in curves.names]
    assert json.loads(to_text(points)) == points, "browsers must be able to parse it"


def test_a_run_continues_from_a_step_with_what_was_known_by_then() -> None:
    curves = StepCurves()
    for step in range(1, 3 * BUCKETS + 1):
        curves.add(step, {"loss": float(step)})
    assert curves.stride == 4
    resumed = curves.continued("tinker://a/weights/b", 1001)
    resumed.add(1002, {"loss": 7.0})
    again = StepCurves.from_blob(resumed.to_blob())
    assert (again.resumed, again.last_step, again.stride) == (("tinker://a/weights/b", 1001), 1002, 4)
    points = again.points("loss", BUCKETS)
    assert points["step"][-2:] == [997.5, 1001.0], "the part of a bucket before the step is not known separately"
    assert points["mean"][-2:] == [997.5, 7.0]


def test_a_run_of_which_nothing_is_known_continues_at_its_step() -> None:
    resumed = StepCurves().continued("tinker://a/weights/b", 5 * BUCKETS)
    resumed.add(5 * BUCKETS + 1, {"loss": 1.0})
    assert (resumed.last_step, resumed.points("loss", 9)["mean"]) == (5 * BUCKETS + 1, [1.0])


def test_the_history_of_the_services_is_a_ring_that_is_thinned_when_it_is_read() -> None:
    history = SystemHistory(period_s=10.0, columns=12)
    for number in range(15):
        history.add(1000.0 + 10 * number, {"queue|waiting": float(number)} | ({"push|m": 2.0} if number == 9 else {}))
    assert history.newest == {"at": 1140.0, "values": {"queue|waiting": 14.0}}
    whole = history.points(3600, 100)
    assert whole["at"] == [1030.0 + 10 * number for number in range(12)]
    assert whole["series"]["queue|waiting"]["mean"] == [float(number) for number in range(3, 15)]
    assert whole["series"]["push|m"]["mean"] == [None] * 6 + [2.0] + [None] * 5
    thinned = history.points(60, 3)
    assert thinned["period_s"] == 20.0
    assert (thinned["at"], thinned["series"]["queue|waiting"]) == (
        [1100.0, 1120.0, 1140.0],
        {"mean": [10.5, 12.5, 14.0], "high": [11.0, 13.0, 14.0]},
    )


def test_a_gap_in_the_history_stays_a_gap_and_old_names_make_room() -> None:
    history = SystemHistory(period_s=1.0, columns=4)
    history.add(10.0, {"a": 1.0})
    history.add(12.0, {"a": 3.0})
    assert history.points(4, 4)["series"]["a"]["mean"] == [None, 1.0, None, 3.0]
    history.add(100.0, {"a": 5.0})
    assert history.points(4, 4)["series"]["a"]["mean"] == [None, None, None, 5.0]
    for number in range(MOST_SERIES):
        history.add(101.0 + number / 100, {f"b{number}": 1.0})
    assert "a" not in history.points(4, 4)["series"]
    assert len(history.points(4, 4)["series"]) == MOST_SERIES


@given(st.lists(st.tuples(st.integers(0, 1000), st.lists(NUMBERS, min_size=1, max_size=4)), min_size=1, max_size=20))
def test_no_reward_is_lost_however_wide_they_spread(reports: list[tuple[int, list[float]]]) -> None:
    histogram = RewardHistogram()
    for step, rewards in reports:
        histogram.add(step, rewards)
    found = histogram.points()
    assert sum(map(sum, found["counts"])) == sum(len(rewards) for _, rewards in reports)
    everything = [reward for _, rewards in reports for reward in rewards]
    assert found["low"] <= min(everything)
    assert found["low"] + REWARD_BINS * found["width"] >= max(everything) * (1 - 1e-6) - 1e-6
    assert found["step"] == sorted({step // found["stride"] * found["stride"] for step, _ in reports})
    assert len(found["step"]) <= REWARD_ROWS
