"""A Fovea of its own: behind a wrong server clients cannot end their sessions, and leave models behind."""

from collections.abc import Iterator

import pytest

import tinyvlm
from tests.e2e.stack import Stack, running_stack


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """Fovea with the tiny Qwen3-VL, for this folder alone."""
    with running_stack(tinyvlm.ensure()) as stack:
        yield stack
