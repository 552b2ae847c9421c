"""A trainer killed in the middle of a step, on a real GPU in bfloat16: clients see a pause and the same numbers."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker

from benchmarks.client import Bench
from tests.e2e.stack import Stack
from tests.gpu.test_gpu import image_data
from tests.waiting import eventually

ROUNDS = 12
SPREAD = 1e-3
"""Relative tolerance of a loss: repeated steps on one card differ in the order of float sums."""


def train(bench: Bench, answered: list[float]) -> None:
    """Appends the loss of each step when it arrives; submits all steps before the first answer."""
    data, training = image_data(bench), bench.training(32)
    pending = []
    for _ in range(ROUNDS):
        pending.append(training.forward_backward(data, "cross_entropy"))
        training.optim_step(tinker.AdamParams(learning_rate=2e-4))
    for each in pending:  # one by one, because another thread reads the progress
        answered.append(each.result(600).metrics["loss:sum"])  # noqa: PERF401


def test_a_killed_trainer_is_a_pause(stack: Stack, bench: Bench) -> None:
    undisturbed: list[list[float]] = [[], []]
    for each in undisturbed:
        train(bench, each)
    disturbed: list[float] = []
    back = stack.log.read_text().count("is restored after")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(train, bench, disturbed)
        asyncio.run(eventually(lambda: len(disturbed) >= ROUNDS // 3, 300))
        stack.kill("0")
        met, killed = len(disturbed), time.monotonic()
        asyncio.run(eventually(lambda: stack.log.read_text().count("is restored after") > back, 300))
        print(f"killed after {met} of {ROUNDS} steps; its models are back {time.monotonic() - killed:.1f} s later")
        running.result()
    assert met < ROUNDS, "the kill must interrupt work"
    print("losses, twice undisturbed and once disturbed:", *undisturbed, disturbed, sep="\n  ")
    assert undisturbed[1] == pytest.approx(undisturbed[0], rel=SPREAD)
    assert disturbed == pytest.approx(undisturbed[0], rel=SPREAD)
