"""The Python programs of the guides about fine-tuning and OpenAI's API run against a real Fovea.

tests/contract/fovea_rollout/test_guide.py runs those about reinforcement learning.
"""

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tinker
from PIL import Image

from tests.client_environment import client_environment
from tests.code_blocks import programs
from tests.e2e.fovea_data.test_fine_tuning import digits
from tests.e2e.stack import API_KEY, Stack


def _run(program: str, stack: Stack, folder: Path, *, with_torch: bool = False) -> str:
    """Runs a program against Fovea, with torch if it needs it; returns what it prints."""
    text = program.replace("http://127.0.0.1:8000", stack.base_url).replace("tml-local", API_KEY)
    (folder / "program.py").write_text(text)
    given = {"TINKER_BASE_URL": stack.base_url, "TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"}
    environment = os.environ | given if with_torch else client_environment(**given)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_folder_of_images_becomes_a_model_that_both_apis_serve(stack: Stack, tmp_path: Path) -> None:
    digits(tmp_path / "birds", 20)  # ten kinds
    Image.open(tmp_path / "birds/0/0.png").save(tmp_path / "unknown.jpg")
    table = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in (tmp_path / "birds").rglob("*.png")]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *table]))
    tuning, reading, asking, _ = programs("first-fine-tune.md")
    reading += "assert len(held_out) == 4 and {row.answer for row in train} <= set('0123456789')\n"
    # As its comment says: on Fovea instead of vLLM.
    asking = asking.replace('api_key="none"', 'api_key="tml-local"').replace(
        'model="birds-model"', "model=model.weights"
    )
    assert asking.count("model.weights") == 2
    said = _run(f"{reading}\n{tuning}\n{asking}", stack, tmp_path, with_torch=True).splitlines()  # it merges an adapter
    assert len(said) >= 3
    assert (tmp_path / "birds-model" / "model.safetensors").exists()


def test_training_goes_on_from_a_path(stack: Stack, service: tinker.ServiceClient, tmp_path: Path) -> None:
    training = service.create_lora_training_client(stack.model_name, rank=4).result()
    path = training.save_state("kept").result().path
    *_, loading = programs("first-fine-tune.md")
    loading = re.sub(r"tinker://[^\"]+", path, loading)
    assert path in loading
    loading = loading.replace("tinker.ServiceClient()", "(service := tinker.ServiceClient())")
    ending = "print(training.model_id)\nservice.close('success').result()\n"  # its model would outlive this module
    assert "train" in _run(f"import tinker\n{loading}{ending}", stack, tmp_path)


def test_openais_client_asks_about_a_picture(stack: Stack, tmp_path: Path) -> None:
    (program,) = programs("openai.md")
    digits(tmp_path, 1)
    encoded = base64.b64encode((tmp_path / "0/0.png").read_bytes()).decode()
    program = program.replace("tinker://sess-1:train:0/sampler_weights/ada", stack.model_name)
    assert program.count("base64,...") == 1
    assert _run(program.replace("base64,...", f"base64,{encoded}"), stack, tmp_path)
