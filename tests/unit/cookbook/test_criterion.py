"""Criteria judge logged figures, and never pass without any."""

import math

import pytest

from cookbook.criterion import Criterion, Falls, Reaches, Rises, Stays


def rows(*values: float) -> list[dict[str, float]]:
    return [{"step": step, "m": value} for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("criterion", "good", "bad"),
    [
        (Falls("m", to=0.5), (4.0, 3.0, 2.0), (4.0, 1.0, 2.1)),
        (Falls("m", to=0.5), (4.0, 9.0, 0.0), (4.0, 1.0, math.nan)),
        (Rises("m", by=0.2), (0.1, 0.3, 0.4), (0.1, 0.9, 0.2, 0.3)),
        (Rises("m", by=0.2), (0.1, 0.0, 0.9), (0.1, 0.3, math.nan)),
        (Reaches("m", bar=0.9), (0.0, 1.0, 0.9), (0.95, 1.0, 0.89)),
        (Reaches("m", bar=0.9), (math.nan, 0.0, 1.0), (1.0, 1.0, math.nan)),
        (Stays("m", below=0.1), (0.1, -0.1, 0.0), (0.0, -0.2, 0.0)),
        (Stays("m", below=0.1), (0.0, 0.0, 0.0), (0.0, math.nan, 0.0)),
    ],
)
def test_a_criterion_tells_good_from_bad(criterion: Criterion, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    assert criterion.judge(rows(*good)).ok
    assert not criterion.judge(rows(*bad)).ok


@pytest.mark.parametrize(
    "criterion", [Falls("m", to=2.0), Reaches("m", 0.5), Rises("m", by=-9.0), Stays("m", below=9.0)]
)
def test_two_steps_are_too_few(criterion: Criterion) -> None:
    verdict = criterion.judge([*rows(1.0, 1.0), {"step": 2, "other": 1.0}])
    assert not verdict.ok
    assert verdict.detail == "m was logged 2 times, too few"


def test_a_verdict_tells_the_figures() -> None:
    verdict = Falls("m", to=0.5).judge(rows(4.0, 3.0, 1.0))
    assert (verdict.steps, verdict.first, verdict.last) == (3, 4.0, 1.0)
    assert verdict.detail == "m 4 to 1, must fall to 0.5 of it"
