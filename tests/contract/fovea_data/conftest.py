"""A gateway with fake services and the tiny model's vocabulary. Pictures take as many tokens as 512 x 384 pixels."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import fovea_tinyvlm
from tests.contract.gateway import fakes
from tests.contract.gateway.conftest import Stand, certificates, running

__all__ = ["certificates"]


@pytest.fixture
async def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    """A running stand; the client can load the tokenizer of its model."""
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    monkeypatch.setattr(fakes, "IMAGE_TOKENS", 192)
    async with running(Stand(tmp_path / "gateway"), model=str(fovea_tinyvlm.ensure())) as stand:
        yield stand
