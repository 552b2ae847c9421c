"""The warm-up trains only on rollouts that its player finished. The loop stops if all rollouts of a step fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tinker

from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_rollout import Answer, LoopSettings, Message, Step, WarmUpSettings, connect, train, warm_up
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL
from tests.unit.fovea_rollout.scripted import LetterTemplate, ScriptedPolicy, ids_of


class Asking:
    """Asks one question. A broken environment fails when it is answered."""

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


async def test_a_loop_stops_at_the_first_step_of_which_all_rollouts_fail(tmp_path: Path) -> None:
    template: Any = LetterTemplate()
    settings = LoopSettings(3, 1, 2, learning_rate=1e-3, kl_coefficient=0.0)

    def use() -> None:
        with connect(stand.url, KEY) as service:
            training = service.create_lora_training_client(base_model=MODEL).result()
            sources = [lambda: Asking("bad?", is_broken=True)]
            asyncio.run(train(training, template, sources, settings, print, progress=False))

    async with running(Stand(tmp_path)) as stand:
        said = r"all 2 rollouts of step 1 failed, the first in stage 'step': OSError: the simulator is gone"
        with pytest.raises(FailedPrecondition, match=said) as stopped:
            await asyncio.to_thread(use)
        traceback, last = stopped.value.__notes__
        assert "in step\n" in traceback, "of the environment"
        assert last == str(stopped.value)
        assert stand.trainer.of("ForwardBackward") == []
