"""Jumps of the wall clock, forwards and backwards, against a monotonic clock."""

from fovea.runtime.durable import ExpiryClock

DAY_S = 86400.0
YEAR_S = 365 * DAY_S


class Clocks:
    """Two clocks that tests set."""

    def __init__(self) -> None:
        self.wall_s, self.steady_s = 1.8e9, 5.0
        self.expiry = ExpiryClock(lambda: self.wall_s, lambda: self.steady_s)

    def passes(self, seconds: float) -> float:
        """Advances the clocks; returns the present time."""
        self.wall_s += seconds
        self.steady_s += seconds
        return self.expiry.now()


def test_time_goes_on() -> None:
    clocks = Clocks()
    assert [clocks.passes(seconds) for seconds in (0, 30, DAY_S)] == [1.8e9, 1.8e9 + 30, 1.8e9 + 30 + DAY_S]


def test_slow_corrections_are_followed_however_far_they_lead() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.wall_s += 40
        clocks.passes(30)
    assert clocks.passes(0) == clocks.wall_s


def test_a_jump_ahead_makes_nothing_older() -> None:
    clocks = Clocks()
    clocks.wall_s += YEAR_S
    assert clocks.passes(30) == 1.8e9 + 30
    assert clocks.passes(DAY_S - 60) == 1.8e9 + DAY_S - 30
    clocks.wall_s -= YEAR_S
    assert clocks.passes(30) == 1.8e9 + DAY_S


def test_a_jump_that_lasts_for_a_day_is_believed() -> None:
    clocks = Clocks()
    clocks.wall_s += YEAR_S
    clocks.passes(1)
    assert clocks.passes(DAY_S + 1) == clocks.wall_s


def test_a_jump_back_makes_everything_younger_until_it_is_caught_up() -> None:
    clocks = Clocks()
    clocks.wall_s -= YEAR_S
    assert clocks.passes(30) == clocks.wall_s
    clocks.wall_s += YEAR_S
    assert clocks.passes(30) == 1.8e9 + 60
