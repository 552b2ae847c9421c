"""Runs the reinforcement-learning examples for two small steps each, with only an address and a key."""

import json
import pathlib
import subprocess
import sys

import pytest

from examples.__main__ import EXAMPLES
from tests.client_environment import client_environment
from tests.e2e.stack import API_KEY, Stack

ROOT = pathlib.Path(__file__).parents[2]
MOST_DIFFERENT = {"rl_digits", "rl_visgym_reasoned"}
"""Two examples: one turn, and many turns of tickets with thoughts. `make long` runs all."""


@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    "name",
    [name if name in MOST_DIFFERENT else pytest.param(name, marks=pytest.mark.long) for name in sorted(EXAMPLES)],
)
def test_an_example_runs(name: str, stack: Stack, tmp_path: pathlib.Path) -> None:
    server = ["--base-url", stack.base_url, "--api-key", API_KEY]
    size = ["--steps", "2", "--groups", "4", "--warm-up", "1", "--held-out", "4", "--seed", "5"]
    module, *options = EXAMPLES[name]
    run = subprocess.run(
        [sys.executable, "-m", f"examples.{module}", *options, *server, *size, "--out", tmp_path],
        cwd=ROOT,
        env=client_environment(TINKER_TELEMETRY="0"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / f"{name}-5.json").read_text())
    assert result["example"] == name
    assert result["prefix_breaks"] == 0
    assert result["largest_log_ratio"] < 1e-3
    assert len(result["rewards"]) == 2
    for moment in ("cloned", "before", "after"):
        assert 0.0 <= result[moment] <= 1.0
    assert "data:image/" in (tmp_path / f"{name}-5.html").read_text()
