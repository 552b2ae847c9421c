"""Builds the wheel as `make wheel` does, and runs programs that must succeed."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
UV = str(pathlib.Path(sys.executable).with_name("uv"))


def run(*command: str) -> str:
    """Runs a program in a clean environment; returns its output. Raises an error if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="package")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built
