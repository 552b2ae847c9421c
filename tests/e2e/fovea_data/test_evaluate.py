"""`fovea evaluate` against a Fovea: a base model, a checkpoint, and a model that is not served."""

import base64
import json
import pathlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import openai
import tinker
import typer
from click.testing import Result
from typer.testing import CliRunner

from fovea_data.evaluate import main
from fovea_demo.digits import QUESTION
from fovea_rollout.messages import Picture
from tests.client_environment import client_environment
from tests.e2e.fovea_data.conftest import Trained
from tests.e2e.fovea_data.test_fine_tuning import digits
from tests.e2e.prompts import picture
from tests.e2e.stack import API_KEY, Stack

APP = typer.Typer()
APP.command()(main)
TOLD = {"TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"}


def arguments(stack: Stack, model: str, data: pathlib.Path) -> list[str]:
    return [model, str(data), "--json", "--base-url", stack.base_url, "--max-tokens", "4", "--limit", "40"]


def evaluate(stack: Stack, model: str, data: pathlib.Path) -> Result:
    """Runs the command in this process, which has imported its modules."""
    return CliRunner().invoke(APP, arguments(stack, model, data), env=TOLD)


def test_a_base_model_and_its_untrained_checkpoint_score_alike(stack: Stack, tmp_path: pathlib.Path) -> None:
    folder = digits(tmp_path / "digits", 60)
    with stack.service_client() as service:
        training: tinker.TrainingClient = service.create_lora_training_client(base_model=stack.model_name).result()
        path = training.save_weights_for_sampler("untrained").result().path
    command = [pathlib.Path(sys.executable).with_name("fovea"), "evaluate", *arguments(stack, stack.model_name, folder)]
    base = subprocess.run(command, env=client_environment(**TOLD), capture_output=True, text=True, check=False)
    assert base.returncode == 0, base
    checkpoint = evaluate(stack, path, folder)
    assert checkpoint.exit_code == 0, checkpoint.output
    found = [json.loads(one.stdout) for one in (base, checkpoint)]
    assert [one.pop("model") for one in found] == [stack.model_name, path]
    rows = [[sum(row) for row in one.pop("answers")["counts"]] for one in found]
    assert found[0] == found[1]
    assert rows[0] == rows[1]
    assert sum(rows[0]) == 40
    assert (found[0]["kind"], found[0]["rows"], found[0]["failed"]) == ("accuracy", 40, 0)


def test_a_model_that_is_not_served_is_an_error_in_a_line(stack: Stack, tmp_path: pathlib.Path) -> None:
    done = evaluate(stack, "nobody/nothing", digits(tmp_path / "digits", 20))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "nobody/nothing" in done.stderr


def test_a_checkpoint_is_asked_the_question_of_its_training(
    stack: Stack, trained: Trained, tmp_path: pathlib.Path
) -> None:
    folder = digits(tmp_path / "digits", 40)
    told, untold = (
        json.loads(
            CliRunner().invoke(APP, [*arguments(stack, trained.model.weights, folder), *options], env=TOLD).stdout
        )
        for options in (["--question", QUESTION], [])
    )
    assert told == untold
    assert (untold["question"], untold["trained_question"]) == (QUESTION, QUESTION)
    other = CliRunner().invoke(
        APP, [trained.model.weights, str(folder), *arguments(stack, "", folder)[3:], "--question", "Hm?"], env=TOLD
    )
    assert f'evaluating {trained.model.weights} on 40 rows of {folder}, asked "Hm?"' in other.stderr
    assert f'asked "Hm?", but trained with "{QUESTION}"' in other.stdout
    assert QUESTION in (trained.merged / "README.md").read_text()


def test_the_openai_route_asks_about_pictures_of_the_trained_size(stack: Stack, trained: Trained) -> None:
    """At 1600x1200 a picture has 1,900 tokens; at the 512 pixels of training it has 192."""
    with (
        openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=API_KEY, max_retries=0) as client,
        stack.service_client() as service,
    ):
        model = replace(
            trained.model, sampling=service.create_sampling_client(model_path=trained.model.weights).result()
        )
        for seed in range(3):
            large = picture(1600, 1200, seed, "jpeg")
            url = {"url": f"data:image/jpeg;base64,{base64.b64encode(large).decode()}"}
            parts: list[Any] = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
            answer = client.chat.completions.create(
                model=trained.model.weights, messages=[{"role": "user", "content": parts}], temperature=0.0,
                max_completion_tokens=8,
            )  # fmt: skip
            assert answer.choices[0].message.content == model.ask(Picture.of_bytes(large), QUESTION, max_tokens=8)
            assert answer.usage is not None
            assert 192 < answer.usage.prompt_tokens < 260
