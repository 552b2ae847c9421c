"""The scorer of the vision-language model before a gateway with fake services: pictures go in, tokens come back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import fovea_tinyvlm
from fovea_real.architecture import Tower
from fovea_real.asking import QUESTIONS, ask_fovea, questions, scores
from fovea_real.pretraining import Recipe
from tests.contract.gateway import fakes
from tests.contract.gateway.conftest import KEY, Stand, certificates, running

__all__ = ["certificates"]


@pytest.fixture
async def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    """A running stand that serves a vision model under its path, as `fovea up` does."""
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    model = str(fovea_tinyvlm.ensure("qwen3_vl"))
    async with running(Stand(tmp_path / "gateway"), model=model, model_name=model) as stand:
        yield stand


async def test_each_question_is_asked_with_its_picture_and_scored(stand: Stand) -> None:
    asked = questions(Recipe(tower=Tower(side=64)), 4)
    assert len(asked) == 4 * QUESTIONS
    assert [one.question.kind for one in asked[::QUESTIONS]] == ["caption"] * 4
    await asyncio.to_thread(ask_fovea, stand.url, stand.overrides["model_name"], asked)
    assert all(one.tokens for one in asked)
    assert 0.0 <= scores(asked)["captions"] < 0.5  # the fake sampler draws tokens at random
