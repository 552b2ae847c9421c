"""The three loops on a running Fovea through the SDK: the weights behind each sample, and exact on-policy training."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from fovea_rollout import (
    Answer,
    ChatTemplate,
    Evaluation,
    LoopSettings,
    Message,
    Picture,
    Record,
    RolloutSettings,
    SamplingSettings,
    Step,
    StepReport,
    WeightVersions,
    evaluate,
    train,
)
from tests.e2e.prompts import picture
from tests.e2e.stack import Stack

RATE = 1e-3
ROLLOUT = RolloutSettings(sampling=SamplingSettings(max_tokens=4, seed=1), max_turns=2)
RANDOM = random.Random(0)
SETTINGS: dict[str, Any] = {"groups_per_step": 2, "group_size": 4, "learning_rate": RATE, "rollout": ROLLOUT}


@dataclass
class Watched:
    """Two turns with a picture each; the reward depends on the answer.

    Attributes:
        bonus: Added to the last reward.
        gate: The event that the first step waits for.
        crashes: Makes the second step crash.
        waiting: Released when the gate is reached.
        closed: Counts the closed environments.
    """

    bonus: float = 0.0
    gate: asyncio.Event | None = None
    crashes: bool = False
    waiting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    closed: list[int] = field(default_factory=list)
    steps: int = 0

    async def reset(self) -> list[Message]:
        return [Message("user", (Picture.of_bytes(picture(224, 224, 1)), "What is this?"))]

    async def step(self, answer: Answer) -> Step:
        self.steps += 1
        if self.gate is not None and self.steps == 1:
            self.waiting.release()
            await self.gate.wait()
        if self.crashes:
            raise OSError("the simulator is gone")
        news = [Message("user", (Picture.of_bytes(picture(150, 224, self.steps)), "And this?"))]
        letters = sum(map(ord, answer.text))
        return Step(news, float(letters % 7) + self.bonus, self.steps == 2, {"letters": float(len(answer.text))})

    async def close(self) -> None:
        self.closed.append(1)


def lucky(**arguments: Any) -> Watched:
    """Rewards differ even for equal answers, so that every group has signal."""
    return Watched(bonus=RANDOM.random(), **arguments)


@pytest.fixture
async def training(stack: Stack, service: tinker.ServiceClient) -> tinker.TrainingClient:
    return await service.create_lora_training_client(base_model=stack.model_name, rank=8, seed=1)


@pytest.fixture(scope="package")
def template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def versions(report: StepReport) -> set[tuple[int, int]]:
    return {(datum.versions.oldest, datum.versions.newest) for datum in report.data}


async def test_on_policy(
    training: tinker.TrainingClient, template: ChatTemplate, base_sampler: tinker.SamplingClient
) -> None:
    members = iter(range(100))
    sources: list[Callable[[], Watched]] = [lucky, lambda: lucky(crashes=next(members) == 1)]
    reports: list[StepReport] = []
    settings = LoopSettings(steps=3, substeps=1, kl_coefficient=0.05, **SETTINGS)
    greedy = RolloutSettings(sampling=SamplingSettings(max_tokens=4, temperature=0.0), max_turns=2)
    held_out: list[Evaluation] = []

    async def note(report: StepReport) -> None:
        reports.append(report)
        held_out.append(await evaluate(report.policy, template, [Watched] * 3, greedy))

    policy = await train(training, template, sources, settings, note, base=base_sampler)
    assert policy is reports[-1].policy
    assert [report.step for report in reports] == [0, 1, 2]
    for report in reports:
        assert versions(report) == {(report.step, report.step)}
        assert report.lag == 0
        assert report.agreement is not None
        assert report.agreement.largest_log_ratio < 1e-3, "on-policy, every ratio must be 1"
        assert 0 <= report.agreement.kl < 1e-6
        assert report.base_kl is not None
        assert report.metrics["trainer/ratio:max"] == pytest.approx(1.0, abs=1e-3)
        assert report.sampled_tokens >= report.trained_tokens > 0
        assert set(report.seconds) == {"rollout", "batch", "train", "publish"}
        assert all(one.prefix_breaks == 0 for group in report.trajectories for one in group)
    assert abs(reports[0].base_kl or 0.0) < 1e-3, "a fresh adapter must equal the base"
    assert abs(reports[2].base_kl or 0.0) > 1e-3
    (failure,) = reports[0].failures
    assert failure[1].error == "OSError: the simulator is gone"
    assert failure[0] not in {datum.conversation for datum in reports[0].data}
    for step, seen in enumerate(held_out):
        assert len({one.reward for one in seen.trajectories}) == 1, "greedy answers must be equal"
        assert seen.reward_mean == seen.trajectories[0].reward
        assert {one.versions for one in seen.trajectories} == {WeightVersions(step + 1, step + 1)}


async def test_one_step_off(training: tinker.TrainingClient, template: ChatTemplate) -> None:
    reports: list[StepReport] = []
    settings = LoopSettings(steps=3, mode="one_step_off", loss="ppo", substeps=2, **SETTINGS)
    await train(training, template, [lucky], settings, reports.append)
    assert [versions(report) for report in reports] == [{(0, 0)}, {(0, 0)}, {(1, 1)}]
    assert [report.lag for report in reports] == [0, 1, 1]
    ratios = [report.agreement.largest_log_ratio for report in reports if report.agreement]
    assert ratios[0] < 1e-3 < min(ratios[1:]), "the weights must have changed since sampling"
    assert reports[0].rate_share == 0.25
    assert all(report.moved_kl is not None for report in reports), (
        "the second substep must report the effect of the first"
    )
    distances = [report.base_kl for report in reports if report.base_kl is not None]
    assert abs(distances[0]) < 1e-3 < abs(distances[2]), "without a base, the initial weights are the reference"


async def test_inflight(training: tinker.TrainingClient, template: ChatTemplate) -> None:
    moved = asyncio.Event()
    reports: list[StepReport] = []

    def note(report: StepReport) -> None:
        reports.append(report)
        moved.set()

    # All four groups start with version 0; the gated one ends only after the first step.
    sources: list[Callable[[], Watched]] = [lucky, lucky, lucky, lambda: lucky(gate=moved)]
    settings = LoopSettings(steps=4, mode="inflight", max_lag=2, **SETTINGS)
    await train(training, template, sources, settings, note)
    for report in reports:
        assert all(oldest <= newest <= report.step for oldest, newest in versions(report))
        assert report.lag <= 2
    assert versions(reports[0]) == {(0, 0)}
    straddling = [pair for report in reports for pair in versions(report) if pair[0] < pair[1]]
    assert straddling, "a rollout that ran during a change of weights must say so"


async def test_a_rollout_that_the_trainer_refuses_fails_alone(
    training: tinker.TrainingClient, template: ChatTemplate
) -> None:
    """The model has no experts to replay, so the trainer refuses the one sample that has some."""
    asked = iter(range(10**6))

    async def experts(sequence_id: str) -> npt.NDArray[np.integer] | None:
        return np.zeros((1, 1, 1), np.uint8) if next(asked) == 0 else None

    def single() -> Watched:
        return Watched(bonus=RANDOM.random(), steps=1)  # one turn, so that the sample is a whole datum

    reports: list[StepReport] = []
    settings = LoopSettings(steps=2, substeps=2, kl_coefficient=0.0, **SETTINGS)
    await train(training, template, [single], settings, reports.append, experts=experts)
    ((conversation, failure),) = reports[0].failures
    assert failure.stage == "train"
    assert "routed_experts" in failure.error
    trained = [datum.conversation for datum in reports[0].data]
    assert len(trained) == len(set(trained)) == 7
    assert conversation not in trained
    assert (len(reports[1].data), reports[1].failures) == (8, ())


async def test_records_and_steps_without_signal(training: tinker.TrainingClient, template: ChatTemplate) -> None:
    prompt = (Message("user", ("Name a digit.",)),)
    record = Record(prompt, "tests.e2e.fovea_rollout.test_loop:SameReward", {"method": "rule", "ground_truth": "1"})
    reports: list[StepReport] = []
    settings = LoopSettings(steps=2, kl_coefficient=0.0, filter_groups=True, **SETTINGS)
    await train(training, template, [record], settings, reports.append)
    assert [report.agreement for report in reports] == [None, None]
    assert [(report.reward_mean, report.signal_share, report.data) for report in reports] == [(1.0, 0.0, ())] * 2


async def test_cancelling_closes_everything(training: tinker.TrainingClient, template: ChatTemplate) -> None:
    waiting = asyncio.Semaphore(0)
    closed: list[int] = []
    settings = LoopSettings(steps=1, **SETTINGS)
    hanging = [lambda: Watched(gate=asyncio.Event(), waiting=waiting, closed=closed)]
    running = asyncio.create_task(train(training, template, hanging, settings, lambda report: None))
    for _ in range(8):
        await waiting.acquire()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(closed) == 8
    reports: list[StepReport] = []
    await train(training, template, [lucky], settings, reports.append)
    assert np.isfinite(reports[0].reward_mean), "the next run must not be affected"


class SameReward:
    """One turn with the same reward for every answer."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._prompt: tuple[Message, ...] = record["prompt"]

    def reset(self) -> tuple[Message, ...]:
        return self._prompt

    def step(self, answer: Answer) -> Step:
        return Step(reward=1.0, is_done=True)

    def close(self) -> None:
        pass
