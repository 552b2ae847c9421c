"""The SDK's command line and the cookbook's download against Fovea: their output, downloads and leftovers."""

import json
import os
import pathlib
import subprocess
from dataclasses import dataclass

import pyrage  # type: ignore[import-untyped]
import pytest
import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
from transformers import PreTrainedTokenizerBase

from tests.e2e.downloads import Downloaded
from tests.e2e.prompts import Prompt, PromptBuilder, max_difference
from tests.e2e.stack import API_KEY, Stack
from tests.e2e.test_agreement import TOLERANCE, sampler_logprobs, take_steps, trainer_logprobs

pytestmark = pytest.mark.slow

COOKBOOK = pathlib.Path(__file__).parents[2] / ".cookbook" / "0.6.1" / "bin" / "python"


@dataclass(frozen=True)
class Trained:
    """A trained and saved model.

    Attributes:
        trained: The trainer's log-probabilities.
        sampled: The sampler's log-probabilities.
    """

    run_id: str
    state: str
    trained: dict[str, list[float]]
    sampled: dict[str, list[float | None]]


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompt]:
    catalogue = PromptBuilder(tokenizer).catalogue()
    return {name: catalogue[name] for name in ("text", "one image", "two images")}


@pytest.fixture(scope="module")
def saved(stack: Stack, prompts: dict[str, Prompt]) -> Trained:
    """A checkpoint from a session that has ended."""
    with stack.service_client() as service:
        training = service.create_lora_training_client(
            base_model=stack.model_name, rank=8, user_metadata={"renderer_name": "qwen3_vl"}
        ).result()
        take_steps(training, prompts, 2, 5e-3)
        state = training.save_state("kept").result().path
        training.save_weights_for_sampler("kept").result()
        trained = trainer_logprobs(training, prompts)
        sampled = sampler_logprobs(training.save_weights_and_get_sampling_client().result(), prompts)
    return Trained(state.split("/")[2], state, trained, sampled)


def run(stack: Stack, *arguments: str) -> str:
    """Runs `tinker` in this process, which has imported the SDK; returns its output.

    Check C113 of the conformance suite runs most of these commands as processes.
    """
    result = CliRunner().invoke(main_cli, arguments, env=environment(stack))
    assert result.exit_code == 0, f"{arguments}\n{result.output}\n{result.exception!r}"
    return result.stdout


def call(stack: Stack, *command: str) -> str:
    """Runs a program with Fovea's address in its environment; it must succeed."""
    told = os.environ | environment(stack)
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=told)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def environment(stack: Stack) -> dict[str, str]:
    """Environment variables that point the SDK at Fovea."""
    return {"TINKER_BASE_URL": stack.base_url, "TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"}


def listed(stack: Stack) -> dict[str, tinker.types.Checkpoint]:
    """Returns the caller's checkpoints by path, without a new process."""
    api = tinker.RestClient(base_url=stack.base_url, api_key=API_KEY)
    return {entry.tinker_path: entry for entry in api.list_user_checkpoints(limit=1000).result().checkpoints}


def assert_same_model(stack: Stack, folder: pathlib.Path, prompts: dict[str, Prompt], saved: Trained) -> None:
    model = Downloaded(stack.model, folder)
    for name, prompt in prompts.items():
        scores = model.logprobs(prompt)
        assert max_difference(scores, saved.trained[name][:-1]) <= TOLERANCE, name
        assert max_difference(saved.sampled[name][1:], scores) <= TOLERANCE, name


def test_commands_that_show_runs_and_checkpoints(stack: Stack, saved: Trained) -> None:
    runs = json.loads(run(stack, "--format", "json", "run", "list"))["runs"]
    assert saved.run_id in [entry["training_run_id"] for entry in runs]
    info = json.loads(run(stack, "--format", "json", "run", "info", saved.run_id))
    assert info["user_metadata"] == {"renderer_name": "qwen3_vl"}
    of_run = json.loads(run(stack, "--format", "json", "checkpoint", "list", "--run-id", saved.run_id))
    assert {entry["checkpoint_id"] for entry in of_run["checkpoints"]} == {"weights/kept", "sampler_weights/kept"}
    checkpoint = json.loads(run(stack, "--format", "json", "checkpoint", "info", saved.state))
    assert (checkpoint["tinker_path"], checkpoint["lora_rank"]) == (saved.state, 8)
    assert stack.model_name in run(stack, "--format", "json", "model", "list")
    assert "Tinker accessible: yes" in run(stack, "auth", "status")
    everything = json.loads(run(stack, "--format", "json", "checkpoint", "list", "--limit", "0"))["checkpoints"]
    assert {entry["tinker_path"] for entry in everything} == set(listed(stack))
    assert "1 training run" in run(stack, "run", "list", "--limit", "1")


def test_commands_that_change_checkpoints(stack: Stack, saved: Trained) -> None:
    run(stack, "checkpoint", "set-ttl", saved.state, "--ttl", "7200")
    assert listed(stack)[saved.state].expires_at is not None
    run(stack, "checkpoint", "set-ttl", saved.state, "--remove")
    assert listed(stack)[saved.state].expires_at is None
    run(stack, "checkpoint", "publish", saved.state)
    assert listed(stack)[saved.state].public is True
    run(stack, "checkpoint", "unpublish", saved.state)
    assert listed(stack)[saved.state].public is False
    other = saved.state.replace("/weights/", "/sampler_weights/")
    run(stack, "checkpoint", "delete", "--yes", other)
    assert other not in listed(stack)


def test_a_downloaded_adapter_is_the_model(
    stack: Stack, saved: Trained, prompts: dict[str, Prompt], tmp_path: pathlib.Path
) -> None:
    before = set(listed(stack))
    run(stack, "checkpoint", "download", saved.state, "--output", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert set(listed(stack)) == before, "the temporary export must be gone"
    assert_same_model(stack, folder, prompts, saved)


def test_exports_of_all_parameters_and_encrypted_ones(
    stack: Stack, prompts: dict[str, Prompt], tmp_path: pathlib.Path
) -> None:
    identity = pyrage.x25519.Identity.generate()
    with stack.service_client() as service:
        training = service.create_lora_training_client(base_model=stack.model_name, rank=0).result()
        take_steps(training, prompts, 2, 5e-4)
        plain = training.save_weights_external("plain").result().path
        public = [str(identity.to_public())]
        secret = training.save_weights_external("secret", age_encryption_recipients=public).result().path
        trained = trainer_logprobs(training, prompts)
    for path, folder in ((plain, tmp_path / "plain"), (secret, tmp_path / "secret")):
        run(stack, "checkpoint", "download", path, "--output", str(folder))
    (opened,), (closed,) = ((tmp_path / name).iterdir() for name in ("plain", "secret"))
    model = Downloaded(stack.model, opened)
    for name, prompt in prompts.items():
        assert max_difference(model.logprobs(prompt), trained[name][:-1]) <= TOLERANCE, name
    assert sorted(path.name for path in closed.iterdir()) == sorted(f"{path.name}.age" for path in opened.iterdir())
    for file in opened.iterdir():
        assert pyrage.decrypt((closed / f"{file.name}.age").read_bytes(), [identity]) == file.read_bytes()
    for path in (plain, secret):
        run(stack, "checkpoint", "delete", "--yes", path)


@pytest.mark.skipif(not COOKBOOK.exists(), reason="make cookbook creates the environment of tinker-cookbook 0.6.1")
def test_the_cookbook_downloads_and_decrypts(
    stack: Stack, saved: Trained, prompts: dict[str, Prompt], tmp_path: pathlib.Path
) -> None:
    before = set(listed(stack))
    download = "weights.download(tinker_path=sys.argv[1], output_dir=sys.argv[2])"
    code = f"import sys; from tinker_cookbook import weights; {download}"
    call(stack, str(COOKBOOK), "-c", code, saved.state, str(tmp_path / "adapter"))
    assert set(listed(stack)) == before, "the temporary export must be gone"
    assert_same_model(stack, tmp_path / "adapter", prompts, saved)
