"""A killed loop resumes with another client and gives the same result as an undisturbed one."""

import json
import pathlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import tinker

from fovea.wire.errors import InvalidInput
from fovea_rollout import ChatTemplate, train
from tests.client_environment import client_environment
from tests.e2e.fovea_rollout.resumable_run import SETTINGS
from tests.e2e.fovea_rollout.test_loop import Watched
from tests.e2e.stack import API_KEY, Stack
from tests.waiting import eventually

EXACT = ("step", "reward", "held_out_reward", "letters", "signal_share", "sampled_tokens", "trained_tokens", "lag")
CLOSE = ("base_kl", "moved_kl", "rate_share")
"""Sums of log-probabilities, which the sampler rounds differently depending on its batch."""


def figures(out: pathlib.Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    return [json.loads(row) for row in path.read_text().split("\n")[:-1]] if path.exists() else []


def start(out: pathlib.Path, stack: Stack) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.e2e.fovea_rollout.resumable_run", str(out), stack.base_url, API_KEY]
    return subprocess.Popen(command, env=client_environment(TINKER_TELEMETRY="0"), stdout=subprocess.DEVNULL)


async def test_a_killed_loop_goes_on(stack: Stack, tmp_path: pathlib.Path, service: tinker.ServiceClient) -> None:
    whole, cut, every = tmp_path / "whole", tmp_path / "cut", SETTINGS.evaluate_every
    undisturbed, killed = start(whole, stack), start(cut, stack)
    await eventually(lambda: len(figures(cut)) > every, 240)  # after an evaluation, before the next
    killed.kill()
    killed.wait()
    assert every < len(figures(cut)) < SETTINGS.steps, "the kill must interrupt work that is then repeated"
    assert start(cut, stack).wait(240) == 0
    assert undisturbed.wait(240) == 0

    def of(out: pathlib.Path, names: tuple[str, ...]) -> list[dict[str, float | None]]:
        return [{name: row.get(name) for name in names} for row in figures(out)]

    assert of(cut, EXACT) == of(whole, EXACT)
    for again, once in zip(of(cut, CLOSE), of(whole, CLOSE), strict=True):
        assert again == pytest.approx(once, rel=1e-3, abs=1e-6)
    rows = figures(cut)
    assert [row["step"] for row in rows if "held_out_reward" in row] == [2, 4, 6]
    assert abs(rows[0]["base_kl"]) < 1e-6 < 1e-3 < abs(rows[-1]["base_kl"]), "from the warmed-up weights to the end"
    assert all(row["trainer_kl"] < 1e-6 for row in rows), "on-policy, including the first resumed step"

    assert start(cut, stack).wait(240) == 0, "a finished run must have nothing left to do"
    assert figures(cut) == rows

    fresh = await service.create_lora_training_client(base_model=stack.model_name, rank=8)
    asked: dict[str, Any] = {"on_step": print, "held_out": [Watched], "out": cut}
    template = ChatTemplate(fresh.get_tokenizer())
    with pytest.raises(
        InvalidInput, match="a run of 6 steps, and the training client does not have its weights: create"
    ):
        await train(fresh, template, [Watched] * 3, SETTINGS, **asked)
    with pytest.raises(InvalidInput, match="to a run with steps 6, not 7: give another folder"):
        await train(fresh, template, [Watched] * 3, replace(SETTINGS, steps=7), **asked)
