"""Pauses double, and end at the deadline."""

from fovea.runtime.backoff import Backoff


async def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=0.001, longest_s=0.004)
    pauses = []
    for _ in range(4):
        pauses.append(backoff.next_s)
        await backoff.pause()
    assert pauses == [0.001, 0.002, 0.004, 0.004]
    assert not backoff.is_over
    backoff.reset()
    assert backoff.next_s == 0.001


async def test_no_pause_goes_beyond_the_deadline() -> None:
    backoff = Backoff(deadline_s=0.01, first_s=3600.0, longest_s=3600.0)
    await backoff.pause()
    while not backoff.is_over:  # a timer may fire a clock's tick early
        await backoff.pause()
    assert backoff.left_s == 0.0


def test_a_deadline_in_the_past() -> None:
    backoff = Backoff(deadline_s=-1.0)
    assert (backoff.is_over, backoff.left_s) == (True, 0.0)
