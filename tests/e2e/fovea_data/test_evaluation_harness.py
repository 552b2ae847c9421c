"""inspect-ai, unmodified and in its own environment, against OpenAI's API: its accuracy equals our own client's.

Set `FOVEA_HARNESS=1` to run it: it installs the harness from the package index.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from fovea_demo.digits import QUESTION
from tests.e2e.fovea_data.conftest import Trained
from tests.e2e.stack import API_KEY, Stack

HARNESS = "inspect-ai==0.3.285"
PROGRAMS = pathlib.Path(sys.executable).parent
EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.environ.get("FOVEA_HARNESS") != "1", reason=f"installs {HARNESS}; FOVEA_HARNESS=1 asks for it"
    ),
]


def run(*command: object, **given: str) -> str:
    """Runs a program that must succeed; returns its output."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(words, env=kept | given, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_harness_finds_the_accuracy_that_our_client_finds(
    trained: Trained, stack: Stack, tmp_path: pathlib.Path
) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    run(PROGRAMS / "uv", "venv", "--quiet", "--python", sys.executable, tmp_path / "environment")
    run(PROGRAMS / "uv", "pip", "install", "--quiet", "--python", python, HARNESS, "openai")
    held_out = tmp_path / "held-out"
    for where, _ in trained.asked:
        picture = pathlib.Path(where)
        (held_out / picture.parent.name).mkdir(parents=True, exist_ok=True)
        (held_out / picture.parent.name / picture.name).symlink_to(picture)

    server = {"FOVEA_BASE_URL": f"{stack.base_url}/v1", "FOVEA_API_KEY": API_KEY}
    asked = ("inspect_pictures.py", "-T", f"folder={held_out}", "-T", f"question={QUESTION}", "--temperature", "0")
    logged = ("--log-dir", tmp_path / "log", "--log-format", "json", "--display", "none")
    run(
        python.with_name("inspect"),
        "eval",
        *asked,
        "--model",
        f"openai-api/fovea/{trained.model.weights}",
        *logged,
        **server,
    )
    (log,) = (tmp_path / "log").glob("*.json")
    found = json.loads(log.read_text())
    assert found["status"] == "success", found.get("error")
    accuracy = found["results"]["scores"][0]["metrics"]["mean"]["value"]

    ours = run(
        PROGRAMS / "fovea", "evaluate", trained.model.weights, held_out, "--question", QUESTION, "--json",
        "--base-url", stack.base_url, TINKER_API_KEY=API_KEY,
    )  # fmt: skip
    report = json.loads(ours)
    print(
        f"inspect-ai: accuracy {accuracy:.4f} of {len(found['samples'])} pictures; fovea evaluate: {report['mean']:.4f}"
    )
    assert (report["rows"], report["failed"], len(found["samples"])) == (60, 0, 60)
    assert accuracy == pytest.approx(report["mean"], abs=1e-9)

    read = trained.model.connection.encoder.read
    said = {sample["id"]: sample["output"]["completion"] for sample in found["samples"]}
    for (where, _), tokens in zip(trained.asked, trained.answers, strict=True):
        picture = pathlib.Path(where)
        assert said[f"{picture.parent.name}/{picture.name}"] == read(tokens, is_cut=False)
