"""One process that evaluates traced losses, for files with losses that may take memory."""

from collections.abc import Iterator

import pytest

from fovea_trainer.losses import Sandbox


@pytest.fixture(scope="session")
def roomy() -> Iterator[Sandbox]:
    """A sandbox with a trainer's defaults but more time, because this machine may be busy."""
    made = Sandbox(timeout_s=60.0, memory_mib=1024)
    yield made
    made.close()
