"""The soak's memory check: a cache that fills is no leak, growth to the end is one."""

from chaos.soak import FULL, memory_lines


def test_what_filled_before_the_half_is_flat_and_a_leak_is_not() -> None:
    moments = [float(second) for second in range(0, 7200, 60)]
    samples = {
        "a cache": [(at_s, min(at_s, FULL * 7200.0)) for at_s in moments],
        "a leak": [(at_s, at_s / 3600) for at_s in moments],
    }
    cache, leak = memory_lines(samples, 7200.0)
    assert cache.split()[-4:] == ["3600", "MiB", "+0.0", "MiB/h"]
    assert leak.split()[-2:] == ["+1.0", "MiB/h"]
