"""The warm-up trains on the rollouts that its player finished, and on no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tinker

from fovea.wire.errors import InvalidInput
from fovea_rollout import Answer, Message, Step, WarmUpSettings, warm_up
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.unit.fovea_rollout.scripted import LetterTemplate, ScriptedPolicy, ids_of


class Asking:
    """One question; an environment that is broken fails when it is answered."""

    def __init__(self, question: str, *, is_broken: bool) -> None:
        self._question, self._is_broken = question, is_broken

    def reset(self) -> list[Message]:
        return [Message("user", (self._question,))]

    def step(self, answer: Answer) -> Step:
        if self._is_broken:
            raise OSError("the simulator is gone")
        return Step(reward=0.5, is_done=True)

    def close(self) -> None:
        pass


async def test_turns_of_failed_rollouts_are_not_cloned(tmp_path: Path) -> None:
    template: Any = LetterTemplate()
    settings = WarmUpSettings(steps=3, learning_rate=1e-3)
    player = ScriptedPolicy(lambda _: "yes|")

    def use(*broken: bool) -> float:
        sources = [lambda bad=bad: Asking("bad?" if bad else "right?", is_broken=bad) for bad in broken]
        with tinker.ServiceClient(base_url=stand.url, api_key=KEY) as service:
            training = service.create_lora_training_client(base_model=MODEL).result()
            return asyncio.run(warm_up(training, template, sources, player, settings))

    async with running(Stand(tmp_path)) as stand:
        assert await asyncio.to_thread(use, True, False) == 0.5
        datums = [datum for _, batch in stand.trainer.of("ForwardBackward") for datum in batch]
        whole = len(ids_of("u:right?|a:yes|")) - 1
        assert {len(datum.input.tokens) // 4 for datum in datums} == {whole}
        with pytest.raises(InvalidInput, match=r"all episodes of the player failed; .*the simulator is gone"):
            await asyncio.to_thread(use, True, True)
