"""The launcher of the ranks: it holds no resources that could fail at its end, and reports which rank failed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import fovea_tinyvlm
from fovea.runtime.hosts import free_ports
from tests.processes import survivors

START = """
import os, signal, sys, time
from fovea_trainer.ranks.rank_launcher import launch
from fovea_trainer.settings import TrainerSettings

def rank(settings, rank_env):
    number, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.write(1, f"rank {{number}} of {{size}} in {{rank_env.rendezvous}}\\n".encode())  # at once
    what = dict(word.split("=") for word in {ranks!r}.split(",")).get(number, "sleep")
    if what == "ignore":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what != "sleep":
        sys.exit(int(what))
    time.sleep(600)

sys.argv[1:] = []
sys.exit(launch(TrainerSettings(model="m", ranks={count}, drain_s=0), lambda: rank))
"""
"""Starts ranks that sleep, fail or end as `ranks` says. They do not import torch, which takes seconds."""

LOOK = """
import json, os, signal, sys
from fovea_trainer.ranks.rank_launcher import launch
from fovea_trainer.settings import TrainerSettings

def rank(settings, rank_env):
    opened = {{int(fd): os.path.realpath(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")}}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    found = [rank_env.rank, rank_env.store_fd, opened, len(mask), signal.getsignal(signal.SIGTERM)]
    os.write(1, (json.dumps(found) + "\\n").encode())
    sys.exit(0)

print("launcher", end=" ")  # waits in a buffer
meeting = dict(nodes=2, node_rank={node}, master_addr="127.0.0.1", master_port={port})
sys.exit(launch(TrainerSettings(model="m", ranks=2, drain_s=0, **meeting), lambda: rank))
"""
"""Starts ranks that record their inherited state: rank, store_fd, files by number, blocked signals, handler."""

WATCHED = """
import os, runpy, sys

def look(event, arguments):
    if event == "os.fork":
        torch = sys.modules["torch"]
        sockets = sum("socket:" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        found = [len(os.listdir("/proc/self/task")), sockets, torch.cuda.is_initialized()]
        os.write(1, f"{found}\\n".encode())

sys.addaudithook(look)
runpy.run_module("fovea_trainer", run_name="__main__", alter_sys=True)
"""
"""The real trainer. Before each fork it records its threads and sockets, and whether CUDA is initialised."""

STUBBORN = """
import os, time
from fovea_trainer.ranks.rank_launcher import launch
from fovea_trainer.settings import TrainerSettings

def import_rank():
    os.write(1, b"importing\\n")
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

launch(TrainerSettings(model="m", device="cpu"), import_rank)
"""
"""Imports like a library that catches every exception."""


class Launcher:
    """The launcher, with ranks that act by their number, such as `0=sleep,1=kill`."""

    def __init__(self, folder: Path, ranks: str) -> None:
        code = START.format(ranks=ranks, count=len(ranks.split(",")))
        environment = {**os.environ, "TMPDIR": str(folder)}
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
        """Waits for the end; returns the exit status and stderr."""
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
    """It leaves no folder behind; only its user could read that folder."""
    launcher = Launcher(tmp_path, "0=ignore,1=sleep")
    (place,) = {Path(line.split()[-1]) for line in launcher.said}
    assert place.stat().st_mode & 0o777 == 0o700
    launcher.popen.send_signal(number)
    assert launcher.end() == (0, "")
    assert not place.exists()


def test_ranks_have_names_and_end_with_their_launcher(tmp_path: Path) -> None:
    """They have a separate session, so that Ctrl-C in a terminal reaches only the launcher."""
    launcher = Launcher(tmp_path, "0=sleep,1=sleep")
    ranks = psutil.Process(launcher.popen.pid).children()
    assert sorted(rank.name() for rank in ranks) == ["trainer-rank0", "trainer-rank1"]
    assert {os.getsid(rank.pid) for rank in ranks} == {rank.pid for rank in ranks}
    launcher.popen.kill()
    assert launcher.end() == (-signal.SIGKILL, "")
    assert survivors(ranks, 60.0) == []


def test_ranks_inherit_only_what_is_theirs(tmp_path: Path) -> None:
    """No rank listens at the port of the rendezvous or reads the terminal; only rank 0 has the store's socket."""
    (port,) = free_ports(1)
    nodes = []
    for node in (0, 1):
        code = LOOK.format(node=node, port=port)
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for node, popen in enumerate(nodes):
        said, complaints = popen.communicate(timeout=120)
        assert popen.returncode == 0, complaints
        first, lines = said[: len("launcher ")], said[len("launcher ") :].splitlines()
        assert first == "launcher "  # once, because it was written before the forks
        found = sorted(map(json.loads, lines))
        assert [rank for rank, *_ in found] == [2 * node, 2 * node + 1]
        for rank, store_fd, opened, blocked, handler in found:
            sockets = [int(fd) for fd, what in opened.items() if "socket:" in what]
            assert sockets == ([store_fd] if rank == 0 else []), opened
            assert opened["0"] == os.devnull
            assert (blocked, handler) == (0, signal.SIG_DFL)


@pytest.mark.slow
def test_the_trainer_forks_before_it_has_threads_sockets_or_cuda(tmp_path: Path) -> None:
    """A lock that another thread holds during a fork would stay locked in the rank for ever."""
    arguments = ["--model", str(fovea_tinyvlm.ensure("qwen3")), "--port", "0", "--ranks", "2", "--device", "cpu"]
    places = [word for name in ("recovery", "checkpoints") for word in (f"--{name}", str(tmp_path / name))]
    popen = subprocess.Popen(
        [sys.executable, "-c", WATCHED, *arguments, *places], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert popen.stdout
    said = [popen.stdout.readline() for _ in range(2)]
    ranks = psutil.Process(popen.pid).children() if all(said) else []
    popen.kill()
    _, complaints = popen.communicate(timeout=60)
    assert said == ["[1, 0, False]\n"] * 2, complaints
    assert survivors(ranks, 60.0) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_while_it_imports(number: signal.Signals) -> None:
    """It ends, although libraries catch exceptions during imports."""
    popen = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert popen.stdout
    assert popen.stdout.readline() == b"importing\n"
    popen.send_signal(number)
    try:
        _, complaints = popen.communicate(timeout=60)
    finally:
        popen.kill()
    assert (popen.returncode, complaints) == (0, b"")


def test_ranks_that_replicas_do_not_divide_are_not_started(tmp_path: Path) -> None:
    code = START.format(ranks="", count="4, replicas=3")
    ended = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    said = "--replicas is 3, which does not divide the 4 ranks of all nodes: use one of 1, 2, 4, or other --ranks"
    assert (ended.returncode, ended.stderr) == (1, f"trainer: node 0: {said}\n")


def test_ranks_that_all_leave(tmp_path: Path) -> None:
    assert Launcher(tmp_path, "0=0,1=0").end() == (0, "")
