"""Shared modules stay light: importing fovea loads neither torch, vllm nor transformers.

tests/unit/gateway/test_imports.py has stricter rules for the gateway.
"""

import json
import subprocess
import sys

import pytest

from fovea.cli import main

ROLLOUT = [
    "fovea_rollout.rollout",
    "fovea_rollout.templates.template",
    "fovea_rollout.policies.grpc_policy",
    "fovea_rollout.loop.loggers",
    "fovea_rollout.loop.loop",
]
DATA = ["fovea_data.dataset", "fovea_data.fine_tuning"]
PROGRAMS = sorted({program.module for program in main.PROGRAMS.values()})
"""Programs behind `fovea` refuse a wrong argument before they import a heavy module."""
MODULES = ["fovea.cli.main", "fovea.client", "fovea.vision", "fovea.runtime.server", *ROLLOUT, *DATA]
MODULES += [name if "." in name else f"{name}.__main__" for name in (*PROGRAMS, "fovea_tinyvlm")]
HEAVY = {"tinker", "torch", "vllm", "transformers", "torchvision", "peft", "matplotlib", "sklearn"}
PROGRAM = """
import importlib, json, sys
loaded = {}
for module in sys.argv[1:]:
    before = set(sys.modules)
    importlib.import_module(module)
    loaded[module] = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Returns the packages that each module loads in addition to those before it, in one process."""
    command = [sys.executable, "-c", PROGRAM, *MODULES]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = json.loads(said)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_importing_loads_no_heavy_module(loaded: dict[str, list[str]], module: str) -> None:
    assert HEAVY.isdisjoint(loaded[module])
