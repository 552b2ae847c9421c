"""Limits the number of gateway files that each kind of request enters: `python -m benchmarks.request_files --list`."""

import json
import subprocess
import sys

import pytest

from tests.client_environment import client_environment

MOST = {"forward_backward": 23, "sample": 22, "optim_step": 18, "save_and_first_sample": 31}
"""The largest number of gateway files that each request may enter. These limits may only fall."""


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    # In its own process, because the profiler sees only threads that start after it.
    command = [sys.executable, "-m", "benchmarks.request_files"]
    run = subprocess.run(command, capture_output=True, check=True, timeout=120, env=client_environment())
    figures = [json.loads(line) for line in run.stdout.splitlines()]
    return {one["figure"].removeprefix("request_files."): one["value"] for one in figures}


@pytest.mark.parametrize("name", MOST)
def test_no_request_enters_more_files(found: dict[str, int], name: str) -> None:
    assert found[name] <= MOST[name]
