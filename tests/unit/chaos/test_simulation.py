"""The simulated gateway: no seed breaks a promise, and one seed gives the same run each time.

The simulations run in their own processes, which install a simulated clock before they import the gateway.
"""

import re
import subprocess
import sys

import pytest

BUGS = (
    "answer_not_kept", "journal_row_dropped", "replay_skips_a_command", "commands_without_numbers",
    "submission_not_kept", "newest_snapshot_sampled",
)  # fmt: skip

BROKE_ONCE = {
    81: "saves that waited for room, while the model was brought back",
    2296: "a call that failed when the model was back already",
    3028: "a snapshot written before its model's first point",
}


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m chaos.simulation` with these arguments."""
    return _run("chaos.simulation", *arguments)


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, pytest.param(200, marks=pytest.mark.long)])
def test_no_seed_breaks_a_promise(count: int) -> None:
    done = simulate("--seeds", str(count))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    print(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.long)])
def test_no_seed_breaks_a_promise_with_two_trainers(count: int) -> None:
    """Trainers are killed, drained and disconnected; their models continue on the other one."""
    done = simulate("--seeds", str(count), "--trainers", "2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    print(done.stdout)


@pytest.mark.slow
def test_seeds_that_broke_once_keep_every_promise() -> None:
    done = simulate("--seed", *map(str, BROKE_ONCE))
    assert done.returncode == 0, done.stdout[-2000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if line.startswith("seed ")] == [
        f"seed {seed}" for seed in BROKE_ONCE
    ]


@pytest.mark.slow
def test_a_seed_is_the_same_run_each_time() -> None:
    first, second = simulate("--seed", "7"), simulate("--seed", "7")
    assert "world killed " in first.stderr
    assert first.stdout == second.stdout
    # These depend on the process and not on the seed: the path of the database, and the prefix of request ids.
    drawn = re.compile(r"fovea-simulation-\w+|request \w{6}-")
    assert drawn.sub("", first.stderr) == drawn.sub("", second.stderr), "the logs must be equal, including times"


@pytest.mark.slow
def test_planted_bugs_are_found_within_200_seeds() -> None:
    done = _run("tests.unit.chaos.planted_bugs", *BUGS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [line.partition(": seed ")[0] for line in done.stdout.splitlines()] == list(BUGS)
    print(done.stdout)
