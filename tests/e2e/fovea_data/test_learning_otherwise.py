"""Small runs of the examples that learn from a teacher and from preferences; the student can read
pictures afterwards.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import fovea_tinyvlm
from tests.e2e.fovea_data.conftest import Trained
from tests.e2e.stack import API_KEY, Stack, running_stack

ROOT = pathlib.Path(__file__).parents[3]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # each test trains: 264 s beside other work


def run(name: str, stack: Stack, out: pathlib.Path, **sizes: int) -> dict[str, Any]:
    options = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    server = ["--base-url", stack.base_url, "--api-key", API_KEY, "--out", str(out)]
    ran = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *options, *server],
        cwd=ROOT,
        env=os.environ | {"TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads((out / f"{name}-0.json").read_text())
    return result


def judge(checks: str, stack: Stack, out: pathlib.Path) -> dict[str, str]:
    """Runs checks of the conformance suite; returns the verdicts by check."""
    options = ["--base-url", stack.base_url, "--only", checks, "--json", str(out)]
    command = [sys.executable, "-m", "fovea_conformance", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert out.exists(), ran.stdout + ran.stderr
    return {row["id"]: row["status"] for row in json.loads(out.read_text())}


@pytest.mark.timeout(900)
def test_a_student_learns_from_a_teacher_behind_the_same_gateway(trained: Trained, tmp_path: pathlib.Path) -> None:
    with running_stack(fovea_tinyvlm.ensure(), "--also-sample", f"teacher={trained.merged}") as both:
        result = run("distillation_digits", both, tmp_path, steps=20, groups=32, warm_up=80, held_out=100)
        verdicts = judge("C120-C121", both, tmp_path / "verdicts.json")
    assert verdicts == {"C120": "passed", "C121": "passed"}
    assert result["teacher"] >= 0.85
    assert result["after"] >= result["before"] + 0.3, result


@pytest.mark.timeout(660)
def test_the_preferred_answer_becomes_the_likelier_one(stack: Stack, tmp_path: pathlib.Path) -> None:
    result = run("dpo_digits", stack, tmp_path, steps=20, groups=32, held_out=100)
    assert result["after"] >= result["before"] + 0.15, result
