"""What starts the ranks: it holds nothing that could fail as it ends, and says which rank failed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


RANK = """
import os, signal, sys, time
rank = os.environ["RANK"]
os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']} in {os.environ['FOVEA_RENDEZVOUS']}\\n".encode())  # at once
what = dict(word.split("=") for word in sys.argv[-1].split(",")).get(rank, "sleep")
if what == "ignore":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
elif what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif what != "sleep":
    sys.exit(int(what))
time.sleep(600)
"""
"""Stands for a rank, which takes seconds to import torch."""


START = """
import os, sys
from fovea_trainer.ranks.rank_launcher import launch
from fovea_trainer.settings import TrainerSettings
os.environ["PYTHONPATH"] = {folder!r}  # of the ranks
sys.argv[1:] = [{ranks!r}]
sys.exit(launch(TrainerSettings(model="m", ranks={count}, drain_s=0)))
"""


class Launcher:
    """The launcher, with ranks that do what they are told by number, such as `0=sleep,1=kill`."""

    def __init__(self, folder: Path, ranks: str) -> None:
        package = folder / "fovea_trainer"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(RANK)
        code = START.format(folder=str(folder), ranks=ranks, count=len(ranks.split(",")))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        self.folder = folder
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd="/",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout
        self.said = [self.popen.stdout.readline() for _ in ranks.split(",")]

    def end(self) -> tuple[int, str]:
        """Exit status, and what it complained of."""
        _, complaints = self.popen.communicate(timeout=60)
        return self.popen.returncode, complaints


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ("0=sleep,1=3", "rank 1 ended with status 3; see its log for the reason"),
        ("0=sleep,1=sleep,2=kill", "rank 2 ended by SIGKILL; see its log for the reason"),
    ],
)
def test_a_rank_that_dies_is_named_and_takes_the_others_along(ranks: str, said: str, tmp_path: Path) -> None:
    status, complaints = Launcher(tmp_path, ranks).end()
    assert (status, complaints.strip()) == (1, f"trainer: node 0: {said}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_well(number: signal.Signals, tmp_path: Path) -> None:
    """And leaves no folder behind, to which nobody but its user had access."""
    launcher = Launcher(tmp_path, "0=ignore,1=sleep")
    (place,) = {Path(line.split()[-1]) for line in launcher.said}
    assert place.stat().st_mode & 0o777 == 0o700
    launcher.popen.send_signal(number)
    assert launcher.end() == (0, "")
    assert not place.exists()


def test_it_does_without_torch(tmp_path: Path) -> None:
    """It starts fast, and no thread of torch's is left as it ends: one that was would abort it (see the notes)."""
    launcher = Launcher(tmp_path, "0=sleep,1=sleep")
    assert "libtorch" not in Path(f"/proc/{launcher.popen.pid}/maps").read_text()
    launcher.popen.terminate()
    assert launcher.end() == (0, "")


def test_ranks_that_replicas_do_not_divide_are_not_started(tmp_path: Path) -> None:
    code = START.format(folder=str(tmp_path), ranks="", count="4, replicas=3")
    ended = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    said = "--replicas is 3, which does not divide the 4 ranks of all nodes: use one of 1, 2, 4, or other --ranks"
    assert (ended.returncode, ended.stderr) == (1, f"trainer: node 0: {said}\n")


def test_ranks_that_all_leave(tmp_path: Path) -> None:
    assert Launcher(tmp_path, "0=0,1=0").end() == (0, "")
