"""A client program of the tests cannot import torch, and finds all that this process finds."""

import os
import subprocess
import sys

import pytest

from tests.client_environment import client_environment

_PROGRAM = """
import os, sys
import fovea_rollout
try:
    import torch
except ModuleNotFoundError as error:
    print(error.name, os.environ["ONE"], sys.argv[1] in sys.path)
"""


def test_torch_is_hidden_and_the_path_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, env=client_environment(ONE="1"), capture_output=True, text=True, check=True)
    assert ended.stdout == "torch 1 True\n"
