"""The parts of `make real` with a gateway and fake services: requests, results and counts, but no learning."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import fovea_tinyvlm
from fovea_real.job import Reinforcement, Server, reinforce
from fovea_real.lessons import HELD_OUT_SUMS
from tests.contract.gateway import fakes
from tests.contract.gateway.conftest import KEY, Stand, certificates, running

__all__ = ["certificates"]


@pytest.fixture
async def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    """A running stand with a text-only model; the client can load its tokenizer."""
    monkeypatch.setattr(fakes, "VOCABULARY_SIZE", 1280)
    async with running(Stand(tmp_path / "gateway"), model=str(fovea_tinyvlm.ensure("qwen3"))) as stand:
        yield stand


async def test_reinforcement_measures_before_and_after_and_reports_each_step(stand: Stand) -> None:
    said: list[str] = []
    server = Server(stand.url, KEY, fakes.MODEL)
    # In a thread with its own loop, because the gateway runs in this one.
    found = await asyncio.to_thread(lambda: asyncio.run(reinforce(server, 0, Reinforcement(steps=2), said.append)))
    assert len(found.first) == len(found.last) == len(found.held_out) == HELD_OUT_SUMS
    assert len(found.rewards) == 2
    assert [line.split()[:2] for line in said if line.startswith("step")] == [["step", "0"], ["step", "1"]]
    assert found.score([f"\\boxed{{{one.left + one.right}}}" for one in found.held_out]) == 1.0
