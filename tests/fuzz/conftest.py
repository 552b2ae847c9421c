"""Reports the number of inputs and their total time."""

import time
from collections.abc import Iterator

import pytest

from tests.fuzz import mutations


@pytest.fixture(scope="package", autouse=True)
def told() -> Iterator[None]:
    """Prints the count at the end, with `-s`."""
    start = time.monotonic()
    yield
    print(f"\nabout {mutations.INPUTS} fuzzed inputs in {time.monotonic() - start:.0f} s")
