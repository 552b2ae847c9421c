"""Commands that inspect a running Fovea, its log after an undisturbed run, and a training-only Fovea."""

import json
import re
import subprocess
import sys
import time

import httpx
import pytest
import tinker
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

import fovea_tinyvlm
from fovea.cli.main import app
from fovea_doctor.__main__ import examine
from tests.e2e.prompts import PromptBuilder
from tests.e2e.stack import API_KEY, Stack, running_stack
from tests.e2e.test_agreement import take_steps

pytestmark = pytest.mark.slow


def fovea(stack: Stack, *arguments: str) -> str:
    """Runs a command in the stack's state folder, in this process; it must succeed."""
    done = CliRunner().invoke(app, [*arguments, "--state-dir", str(stack.log.parent)])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.stdout


def test_a_healthy_start_warns_of_nothing(stack: Stack) -> None:
    said, ready, _ = stack.log.read_text().partition("Fovea is ready after")
    assert ready
    assert re.findall(r".*(?:WARN|ERROR|[Ww]arning|Traceback).*", said) == []
    assert "no GPU: trainer and 1 sampler on the CPU" in said


def test_status_and_logs_tell_what_runs(stack: Stack) -> None:
    with stack.service_client() as service:
        service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        report = json.loads(fovea(stack, "status", "--json"))
        assert report["models"] >= 1
        assert set(report["services"]) == {"renderer", "sampler", "trainer", "gateway"}
        assert all(item["serves"] and item["memory_bytes"] > 50 * 2**20 for item in report["services"].values())
    assert f"Fovea {report['version']} at {stack.base_url}, up for " in fovea(stack, "status")
    trained = fovea(stack, "logs", "trainer", "--lines", "100000")
    assert "fovea_trainer" in trained
    assert all(" trainer │ " in line for line in trained.splitlines())


def test_an_administrator_reads_the_logs_of_all_services(stack: Stack) -> None:
    create = ["keys", "create", "--owner", "root", "--scope", "admin", "--state-dir", str(stack.log.parent)]
    command = [sys.executable, "-m", "fovea_gateway.access.access_command", *create]
    key = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    with httpx.Client(base_url=f"{stack.base_url}/api/v1/", headers={"X-API-Key": key}, trust_env=False) as http:
        while (first := http.get("live/logs")).status_code == 401:  # until the gateway has read the new key
            time.sleep(0.1)
        services = first.json()["services"]
        assert sorted(services) == ["gateway", "renderer", "sampler", "trainer"]
        for name in services:
            found = http.get("live/logs", params={"service": name}).json()
            assert (found["failures"], {line["service"] for line in found["lines"]}) == ({}, {name})
            assert stack.secret not in json.dumps(found)


def test_the_doctor_of_a_running_fovea_takes_no_secret(stack: Stack) -> None:
    files, found = examine(stack.log.parent)
    services = json.loads(files["services.json"])["services"]
    assert {name: item["serves"] for name, item in services.items()} == dict.fromkeys(stack.state["services"], True)
    assert json.loads(files["database.json"])["rows"]["keys"] >= 1
    assert [one.problem for one in found if "serve" in one.problem or "database" in one.problem] == []
    secrets = [value for name, value in stack.state.items() if "secret" in name and value]
    assert secrets
    everything = "\n".join(files.values())
    assert [secret for secret in (*secrets, *({API_KEY} - {"tml-local"})) if secret in everything] == []


def test_without_samplers_it_trains(tokenizer: PreTrainedTokenizerBase) -> None:
    catalogue = PromptBuilder(tokenizer).catalogue()
    with (
        running_stack(fovea_tinyvlm.ensure(), "--samplers", "0", "--ranks", "1") as stack,
        stack.service_client() as service,
    ):
        assert set(stack.state["services"]) == {"renderer", "trainer", "gateway"}
        api = tinker.RestClient(base_url=stack.base_url, api_key=API_KEY)
        (served,) = api.get_server_capabilities().result().supported_models
        assert served.sampleable is False
        training = service.create_lora_training_client(base_model=stack.model_name, rank=4).result()
        take_steps(training, {"one image": catalogue["one image"]}, 1, 1e-3)
        with pytest.raises(tinker.RequestFailedError, match="is served for training only"):
            training.save_weights_and_get_sampling_client().result()
        path = training.save_weights_for_sampler("kept").result().path
        assert path in fovea(stack, "checkpoints", "list")
