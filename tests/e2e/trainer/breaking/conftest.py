"""Fixtures of the tests that break trainers."""

from collections.abc import AsyncIterator

import pytest

import fovea_tinyvlm
from tests.e2e.trainer.breaking.ground import Ground
from tests.e2e.trainer.image_service import ImageService


@pytest.fixture(scope="package")
async def shared_ground(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ground]:
    """One folder, and at most one trainer."""
    images = ImageService(fovea_tinyvlm.ensure("qwen3"), None)
    made = Ground(tmp_path_factory.mktemp("breaking") / "ground", images)
    made.folder.mkdir()
    try:
        yield made
        await made.stop()
    finally:
        made.end()
        images.close()


@pytest.fixture
async def ground(shared_ground: Ground) -> AsyncIterator[Ground]:
    """The shared folder and trainer, without models of other tests."""
    yield shared_ground
    await shared_ground.clear()
