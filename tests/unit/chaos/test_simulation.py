"""The simulated gateway: seeds break no promise, and one seed is the same run each time.

Each runs in a process of its own, which has a made-up clock before it imports the gateway.
"""

import re
import subprocess
import sys

import pytest

BUGS = (
    "answer_not_kept", "journal_row_dropped", "replay_skips_a_command", "commands_without_numbers",
    "submission_not_kept", "newest_snapshot_sampled",
)  # fmt: skip


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m chaos.simulation` with these arguments."""
    return _run("chaos.simulation", *arguments)


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
def test_no_seed_breaks_a_promise() -> None:
    done = simulate("--seeds", "200")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    print(done.stdout)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(81, id="81: saves that waited for room, while the model was brought back"),
        pytest.param(2296, id="2296: a call that failed when the model was back already"),
        pytest.param(3028, id="3028: a snapshot written before its model's first point"),
    ],
)
def test_a_seed_that_broke_once_keeps_every_promise(seed: int) -> None:
    done = simulate("--seed", str(seed))
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_seed_is_the_same_run_each_time() -> None:
    first, second = simulate("--seed", "7"), simulate("--seed", "7")
    assert "is killed" in first.stderr
    assert first.stdout == second.stdout
    # Of each process, not of the seed: where the database is, and what request ids begin with.
    drawn = re.compile(r"fovea-simulation-\w+|request \w{6}-")
    assert drawn.sub("", first.stderr) == drawn.sub("", second.stderr), "the logs differ, times included"


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_within_200_seeds(bug: str) -> None:
    done = _run("tests.unit.chaos.planted_bugs", bug)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    print(done.stdout)
