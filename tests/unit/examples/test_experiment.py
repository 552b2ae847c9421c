"""The command line of the examples, and the counts of their evaluations."""

import argparse
import sys
from functools import partial
from typing import Any

import pytest
from transformers import AutoTokenizer

import fovea_tinyvlm
from examples.experiment import Experiment, read_arguments
from fovea_rollout import Answer, Message, RolloutSettings, Step
from tests.unit.fovea_rollout.scripted import ScriptedPolicy


def test_too_few_steps_for_the_stages_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "1"])
    assert read_arguments("One.", steps=9, groups=4, warm_up=3).steps == 1
    with pytest.raises(SystemExit):
        read_arguments("Two.", steps=9, groups=4, warm_up=3, stages=2)
    assert "--steps is 1; it must be 2 or more, one for each stage" in capsys.readouterr().err


class Asking:
    """Asks one question. A broken environment fails when it is answered."""

    def __init__(self, *, is_broken: bool) -> None:
        self._is_broken = is_broken

    def reset(self) -> list[Message]:
        return [Message("user", ("Is it?",))]

    def step(self, answer: Answer) -> Step:
        if self._is_broken:
            raise OSError("the simulator is gone")
        return Step(reward=0.5, is_done=True, metrics={"right": 1.0})

    def close(self) -> None:
        pass


class Training:
    """The calls that an experiment makes on a training client before training."""

    def get_tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(fovea_tinyvlm.ensure())


async def test_rollouts_that_fail_are_left_out_of_a_measurement_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(seed=0, steps=1, groups=1, warm_up=1, held_out=3)
    training: Any = Training()
    experiment = Experiment("asking", arguments, RolloutSettings(), training)
    experiment.policy = ScriptedPolicy(lambda _: "yes|")
    right, broken = partial(Asking, is_broken=False), partial(Asking, is_broken=True)
    await experiment.measure("before", [right, broken, right])
    found = {name: value for name, value in experiment.result.items() if name.startswith("before")}
    assert found == {"before": 0.5, "before_right": 1.0, "before_failed": 1}
    assert "before: 1 of 3 rollouts failed, the first: " in (said := capsys.readouterr().out)
    assert "the simulator is gone" in said
    with pytest.raises(RuntimeError, match=r"all 2 rollouts failed.*the simulator is gone"):
        await experiment.measure("after", [broken] * 2)
