"""A program that starts a Fovea also stops it."""

import pathlib
import signal
import subprocess
import sys

import pytest

from fovea_demo.up import NotReady, running_fovea

PROGRAM = """
import pathlib, subprocess, sys, time
from fovea_demo import up

def wait(process, *_):
    print(process.pid, flush=True)
    time.sleep(60)

up._wait = wait
folder = pathlib.Path(sys.argv[1])
with up.running_fovea(folder, folder / "none"):
    pass
"""


def test_sigterm_ends_the_fovea_too(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        fovea = int(program.stdout.readline())
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == -signal.SIGINT
    assert not pathlib.Path(f"/proc/{fovea}").exists()


def test_a_fovea_that_cannot_start_says_why(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotReady, match="ended with code"), running_fovea(tmp_path, tmp_path / "none"):
        pass
