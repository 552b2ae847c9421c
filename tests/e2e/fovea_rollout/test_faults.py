"""Runs 128 rollouts while environments crash and one of two samplers is killed; each rollout must be accounted for."""

from __future__ import annotations

import asyncio
import pathlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from fovea_rollout import (
    Answer,
    ChatTemplate,
    Environment,
    Message,
    RolloutSettings,
    SamplingSettings,
    Step,
    TinkerPolicy,
    Trajectory,
    run_rollouts,
)
from tests.e2e.fovea_rollout.environments import Walking
from tests.e2e.fovea_rollout.two_samplers import TwoSamplers, running_beside
from tests.e2e.stack import API_KEY, Stack

ROLLOUTS = 128
TURNS = 3
DEADLINE_S = 25.0
"""Limit of rollouts that hang, which reach that point in half of it. Other rollouts have no short limit."""
FAULTS = ("make", "reset", "step", "hang")
STAGES = {"make": "make", "reset": "reset", "step": "step", "hang": "deadline"}


def fault_of(number: int) -> str | None:
    """Returns the fault of a rollout: one in twenty has one, each kind in turn."""
    return FAULTS[number // 20 % len(FAULTS)] if number % 20 == 7 else None


class Fragile(Walking):
    """Crashes or hangs before or in its second turn, depending on its number. Counts the steps of all instances."""

    def __init__(self, number: int, count: Callable[[], None]) -> None:
        super().__init__(number, TURNS)
        self._fault, self._count, self._number = fault_of(number), count, number
        self._crash("make")

    async def reset(self) -> Sequence[Message]:
        """Crashes or resets."""
        self._crash("reset")
        return await super().reset()

    async def step(self, answer: Answer) -> Step:
        """Crashes, hangs or steps."""
        self._count()
        if self._left < TURNS:
            self._crash("step")
            if self._fault == "hang":
                await asyncio.Event().wait()
        return await super().step(answer)

    def _crash(self, stage: str) -> None:
        if self._fault == stage:
            raise RuntimeError(f"environment {self._number} crashed in {stage}")


@pytest.fixture
def two(stack: Stack, tmp_path: pathlib.Path) -> Iterator[TwoSamplers]:
    """Two samplers behind one gateway."""
    with running_beside(stack, tmp_path) as two:
        yield two


@pytest.fixture
def sampling(stack: Stack, two: TwoSamplers) -> Iterator[tinker.SamplingClient]:
    """Samples from an adapter that both hold."""
    with tinker.ServiceClient(base_url=two.base_url, api_key=API_KEY) as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=8).result()
        yield training.save_weights_and_get_sampling_client().result()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_batch_outlives_environments_and_a_sampler(
    two: TwoSamplers, sampling: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase
) -> None:
    steps = 0
    is_killed = threading.Event()
    served = 0.0

    def count() -> None:
        nonlocal steps, served
        steps += 1
        if steps == ROLLOUTS:
            served = finished_requests(two)
            two.second.kill()
            is_killed.set()

    def factory(number: int) -> Callable[[], Environment]:
        return lambda: Fragile(number, count)

    async def play(name: str, numbers: Sequence[int], deadline_s: float) -> list[tuple[int, Trajectory]]:
        settings = RolloutSettings(SamplingSettings(max_tokens=12, seed=2), max_turns=TURNS, deadline_s=deadline_s)
        factories = [factory(number) for number in numbers]
        played = await run_rollouts(policy, template, factories, settings, name=name)
        assert [trajectory.conversation for trajectory in played] == [f"{name}/{i}" for i in range(len(numbers))]
        return list(zip(numbers, played, strict=True))

    policy, template = TinkerPolicy(sampling), ChatTemplate(tokenizer)
    hanging = [number for number in range(ROLLOUTS) if fault_of(number) == "hang"]
    others = [number for number in range(ROLLOUTS) if number not in hanging]
    batches = await asyncio.gather(play("hanging", hanging, DEADLINE_S), play("rollout", others, 600.0))
    trajectories = [pair for batch in batches for pair in batch]
    assert is_killed.is_set()
    assert served > 0, "the second sampler must have work when it is killed"
    assert len(trajectories) == ROLLOUTS
    for number, trajectory in trajectories:
        check(trajectory, fault_of(number))
    print(Counter((t.end, t.failure.stage if t.failure else "") for _, t in trajectories), "of the second:", served)


def check(trajectory: Trajectory, fault: str | None) -> None:
    """Checks that a rollout ended as its fault dictates and that its record says so."""
    turns = {None: TURNS, "make": 0, "reset": 0, "step": 2, "hang": 2}[fault]
    assert len(trajectory.turns) == turns, (trajectory.conversation, trajectory.failure)
    assert (trajectory.end, trajectory.prefix_breaks) == ("done" if fault is None else "failed", 0)
    if fault is None:
        assert trajectory.failure is None
        assert len(trajectory.segments) == 1
        return
    assert trajectory.failure is not None
    assert trajectory.failure.stage == STAGES[fault]
    words = f"{DEADLINE_S:g} s have passed in stage 'step' of turn 1" if fault == "hang" else f"crashed in {fault}"
    assert words in trajectory.failure.error
    assert bool(trajectory.failure.traceback) == (fault != "hang")


def finished_requests(two: TwoSamplers) -> float:
    """Returns the number of finished requests of the second sampler's engine."""
    lines = httpx.get(two.metrics, timeout=60.0).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))
