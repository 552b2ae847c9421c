"""A request enters no more of the gateway's files than written here: `python -m benchmarks.request_files --list`."""

import json
import subprocess
import sys

import pytest

MOST = {"forward_backward": 31, "sample": 30, "optim_step": 26, "save_and_first_sample": 40}
"""A figure that has become better may be written down here. Each asks
whether there is room for its result, and a sample which parts its base model has."""


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    # A process of its own: the profiler sees only the threads that begin after it.
    command = [sys.executable, "-m", "benchmarks.request_files"]
    run = subprocess.run(command, capture_output=True, check=True, timeout=120)
    figures = [json.loads(line) for line in run.stdout.splitlines()]
    return {one["figure"].removeprefix("request_files."): one["value"] for one in figures}


@pytest.mark.parametrize("name", MOST)
def test_no_request_enters_more_files(found: dict[str, int], name: str) -> None:
    assert found[name] <= MOST[name]
