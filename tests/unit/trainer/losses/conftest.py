"""One process that evaluates traced losses, for the files whose losses may take memory."""

from collections.abc import Iterator

import pytest

from fovea_trainer.losses import Sandbox


@pytest.fixture(scope="session")
def roomy() -> Iterator[Sandbox]:
    """As in a trainer with its defaults, but for the time: this machine may be busy."""
    made = Sandbox(timeout_s=60.0, memory_mib=1024)
    yield made
    made.close()
