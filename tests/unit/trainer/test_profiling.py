"""The device times of a profile."""

from fovea_trainer.rank_worker import HostTime, busy_lines, host_lines


def test_overlaps_count_once_and_gaps_are_named() -> None:
    kernels = [(0.0, 4000.0, "a"), (1000.0, 3000.0, "b"), (6000.0, 9000.0, "c"), (9500.0, 10000.0, "d")]
    first, longest, shorter = busy_lines(kernels)
    assert first == "busy 7.5 of 10.0 ms, 75.0%; longest gaps:"
    assert longest.split() == "2.00 ms at 4.0 ms, between a and c".split()
    assert shorter.split() == "0.50 ms at 9.0 ms, between c and d".split()


def test_commands_are_told_by_the_clock_of_the_gaps() -> None:
    kernels = [(5000.0, 6000.0, "a"), (9000.0, 9500.0, "b")]
    host = [HostTime("ForwardBackward", 1000.0, 2000.0, 6500.0), HostTime("OptimStep", 7000.0, 7100.0, 9100.0)]
    assert host_lines(kernels, host) == [
        "ForwardBackward queued at -4.0 ms, started at -3.0, first on the device at 0.0, done at 1.5",
        "OptimStep queued at 2.0 ms, started at 2.1, first on the device at 4.0, done at 4.1",
    ]


def test_nothing_on_a_gpu() -> None:
    assert busy_lines([]) == ["nothing ran on a GPU"]
    assert host_lines([], [HostTime("OptimStep", 0.0, 1.0, 2.0)]) == []
