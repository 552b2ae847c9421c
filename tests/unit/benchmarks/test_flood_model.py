"""In a model of a flood the quiet tenant has what issue 16 promises, and the total throughput
equals the flood's alone.
"""

import pytest

from benchmarks.figure import quantile
from benchmarks.flood_model import DEVICES, Device, measure

H200, _, TWO_CORES = DEVICES


@pytest.mark.parametrize(("device", "beside", "samples"), [(H200, 64, 16), (TWO_CORES, 16, 1)])
def test_a_single_sample_takes_at_most_twice_as_long_beside_a_flood(device: Device, beside: int, samples: int) -> None:
    found = measure(device, beside, samples)
    assert quantile(found.beside, 0.99) <= 2 * quantile(found.alone, 0.99)
    assert found.share >= 0.45
    assert found.total >= 0.97 * found.flood_alone, "no place is held back while both have many requests"
