"""`fovea evaluate` against a Fovea: a base model, a checkpoint, a model that is not served."""

import json
import os
import pathlib
import subprocess
import sys

import tinker

from tests.e2e.fovea_data.test_fine_tuning import digits
from tests.e2e.stack import API_KEY, Stack


def evaluate(stack: Stack, model: str, data: pathlib.Path) -> "subprocess.CompletedProcess[str]":
    command = [str(pathlib.Path(sys.executable).with_name("fovea")), "evaluate", model, str(data), "--json"]
    server = ["--base-url", stack.base_url, "--max-tokens", "4", "--limit", "40"]
    environment = os.environ | {"TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"}
    return subprocess.run([*command, *server], env=environment, capture_output=True, text=True, check=False)


def test_a_base_model_and_its_untrained_checkpoint_score_alike(stack: Stack, tmp_path: pathlib.Path) -> None:
    folder = digits(tmp_path / "digits", 60)
    with stack.service_client() as service:
        training: tinker.TrainingClient = service.create_lora_training_client(base_model=stack.model_name).result()
        path = training.save_weights_for_sampler("untrained").result().path
    base, checkpoint = (evaluate(stack, model, folder) for model in (stack.model_name, path))
    assert (base.returncode, checkpoint.returncode) == (0, 0), (base, checkpoint)
    found = [json.loads(one.stdout) for one in (base, checkpoint)]
    assert [one.pop("model") for one in found] == [stack.model_name, path]
    assert found[0] == found[1]
    assert (found[0]["kind"], found[0]["rows"], found[0]["failed"]) == ("accuracy", 40, 0)


def test_a_model_that_is_not_served_is_an_error_in_a_line(stack: Stack, tmp_path: pathlib.Path) -> None:
    done = evaluate(stack, "nobody/nothing", digits(tmp_path / "digits", 20))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "nobody/nothing" in done.stderr
