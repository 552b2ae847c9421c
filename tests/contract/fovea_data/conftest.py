"""A gateway before fakes of the tiny model's vocabulary, whose pictures are as many tokens as 512 x 384 pixels are."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import fovea_tinyvlm
from tests.contract.gateway import fakes
from tests.contract.gateway.conftest import Stand, certificates, running

__all__ = ["certificates"]


@pytest.fixture
async def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    """A running stand, of whose model the client finds the tokenizer."""
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    monkeypatch.setattr(fakes, "IMAGE_TOKENS", 192)
    async with running(Stand(tmp_path / "gateway"), model=str(fovea_tinyvlm.ensure())) as stand:
        yield stand
