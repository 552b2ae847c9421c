"""Many episodes: order, concurrency, isolation, and the progress line."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from fovea.wire.errors import InvalidInput
from fovea_rollout.environments.environment import Answer, Step
from fovea_rollout.messages import Message
from fovea_rollout.policies.policy import SamplingSettings
from fovea_rollout.rollout import RolloutSettings, run_rollouts
from tests.unit.fovea_rollout.scripted import LetterTemplate, ScriptedPolicy

TEMPLATE: Any = LetterTemplate()
SETTINGS = RolloutSettings(SamplingSettings(max_tokens=4, seed=0), max_turns=3, deadline_s=4.0)


class Numbered:
    """Answers with its number; every 20th crashes in one of three ways."""

    closed = 0

    def __init__(self, number: int) -> None:
        self.fault = {0: "reset", 20: "step", 40: "hang"}.get(number % 60)
        self.number = number

    async def reset(self) -> list[Message]:
        if self.fault == "reset":
            raise RuntimeError(f"crash {self.number}")
        return [Message("user", (str(self.number),))]

    async def step(self, answer: Answer) -> Step:
        if self.fault == "step":
            raise RuntimeError(f"crash {self.number}")
        await asyncio.sleep(1000 if self.fault == "hang" else 0)
        return Step([Message("user", ("more",))], 1.0)

    async def close(self) -> None:
        Numbered.closed += 1


async def test_each_is_accounted_for_in_order() -> None:
    Numbered.closed = 0
    policy = ScriptedPolicy(lambda prompt: "ok|")
    factories = [lambda number=number: Numbered(number) for number in range(200)]
    trajectories = await run_rollouts(policy, TEMPLATE, factories, SETTINGS, concurrency=50, name="step-1")
    assert [t.conversation for t in trajectories] == [f"step-1/{i}" for i in range(200)]
    for number, trajectory in enumerate(trajectories):
        stage = {0: "reset", 20: "step", 40: "deadline"}.get(number % 60)
        assert (trajectory.failure.stage if trajectory.failure else None) == stage
        assert trajectory.end == ("failed" if stage else "max_turns")
        assert len(trajectory.turns) == (3 if stage is None else 0 if stage == "reset" else 1)
    assert Numbered.closed == 200
    assert policy.most_running <= 50
    assert len(set(policy.seeds)) == len(policy.seeds)


async def test_a_cancelled_batch_closes_what_it_has_begun() -> None:
    Numbered.closed = 0
    factories = [lambda: Numbered(40)] * 8
    settings = RolloutSettings(deadline_s=100.0)
    policy = ScriptedPolicy(lambda p: "ok|")
    task = asyncio.create_task(run_rollouts(policy, TEMPLATE, factories, settings, concurrency=4))
    async with asyncio.timeout(30):
        while len(policy.seeds) < 4:  # noqa: ASYNC110  they begin in threads
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Numbered.closed == 4


async def test_no_rollouts_and_no_room() -> None:
    policy = ScriptedPolicy(lambda p: "|")
    assert await run_rollouts(policy, TEMPLATE, [], SETTINGS) == []
    with pytest.raises(InvalidInput, match="concurrency is 0"):
        await run_rollouts(policy, TEMPLATE, [], SETTINGS, concurrency=0)


@pytest.mark.parametrize(("progress", "is_shown"), [(None, False), (False, False), (True, True)])
async def test_progress_is_shown_if_asked(
    progress: bool | None, is_shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    factories = [lambda: Numbered(1), lambda: Numbered(20)]
    await run_rollouts(ScriptedPolicy(lambda p: "ok|"), TEMPLATE, factories, SETTINGS, progress=progress)
    shown = capfd.readouterr().err
    assert ("2/2" in shown and "1 failed, 4 turns" in shown) == is_shown
    assert bool(shown) == is_shown


def test_an_environment_that_hangs_does_not_keep_the_program() -> None:
    program = """
import asyncio, threading
from fovea_rollout import rollout
from fovea_rollout.rollout import run_rollouts
from tests.unit.fovea_rollout.scripted import LetterTemplate, ScriptedPolicy
rollout._CLOSE_S = 0.1

class Hangs:
    def reset(self):
        threading.Event().wait()
    def close(self):
        pass

settings = rollout.RolloutSettings(deadline_s=0.1)
(trajectory,) = asyncio.run(run_rollouts(ScriptedPolicy(str), LetterTemplate(), [Hangs], settings))
print(trajectory.failure.stage)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["deadline"]
    assert "close rollout/0: CancelledError" in done.stderr, "the log must say that it was never closed"
    assert "Traceback" not in done.stderr
