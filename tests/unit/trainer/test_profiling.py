"""What a profile says of the device's time."""

from fovea_services.trainer.rank_worker import busy_lines


def test_overlaps_count_once_and_gaps_are_named() -> None:
    kernels = [(0.0, 4000.0, "a"), (1000.0, 3000.0, "b"), (6000.0, 9000.0, "c"), (9500.0, 10000.0, "d")]
    first, longest, shorter = busy_lines(kernels)
    assert first == "busy 7.5 of 10.0 ms, 75.0%; longest gaps:"
    assert longest.split() == "2.00 ms at 4.0 ms, between a and c".split()
    assert shorter.split() == "0.50 ms at 9.0 ms, between c and d".split()


def test_nothing_on_a_gpu() -> None:
    assert busy_lines([]) == ["nothing ran on a GPU"]
