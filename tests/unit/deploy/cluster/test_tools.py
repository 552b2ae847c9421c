"""The folder of the tools."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("moved", "folder"),
    [
        ({}, "/home/ada/.cache/fovea/k8s"),
        ({"FOVEA_CACHE": "/cache"}, "/cache/k8s"),
        ({"FOVEA_K8S_HOME": "/tools"}, "/tools"),
        ({"FOVEA_CACHE": "/cache", "FOVEA_K8S_HOME": "~/tools"}, "/home/ada/tools"),
    ],
)
def test_the_tools_lie_in_the_cache_unless_they_have_a_home(moved: dict[str, str], folder: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("FOVEA_CACHE", "FOVEA_K8S_HOME")}
    command = [sys.executable, "-c", "from deploy.cluster.tools import FOLDER; print(FOLDER)"]
    environment = kept | {"HOME": "/home/ada"} | moved
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == folder
