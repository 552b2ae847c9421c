"""What every process shares stays light: nobody pays for torch, vllm or transformers by importing fovea or gateway."""

import subprocess
import sys

import pytest

ROLLOUT = ["fovea_rollout.rollout", "fovea_rollout.template", "fovea_rollout.grpc_policy"]
DATA = ["fovea_data.dataset", "fovea_data.loggers", "fovea_data.pictures"]
HEAVY = {"torch", "vllm", "transformers", "torchvision", "peft", "matplotlib", "sklearn"}


@pytest.mark.parametrize(
    "module",
    ["fovea.cli.main", "fovea.client", "fovea.vision", "fovea.runtime.server", "fovea_gateway.app", *ROLLOUT, *DATA],
)
def test_importing_loads_no_heavy_module(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert HEAVY.isdisjoint(loaded)
