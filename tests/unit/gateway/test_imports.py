"""The gateway stays light, and its files stay small."""

import subprocess
import sys
from pathlib import Path

import fovea_gateway

HEAVY = ("torch", "vllm", "transformers", "PIL", "torchvision", "safetensors", "alembic")


def test_importing_the_gateway_loads_nothing_heavy() -> None:
    code = f"import fovea_gateway.app, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_files_are_small() -> None:
    folder = Path(fovea_gateway.__file__).parent
    lengths = {path: len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    assert len(lengths) > 40
    assert [path for path, length in lengths.items() if length > 400] == []


def test_help_and_wrong_arguments() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fovea_gateway", "--help"], capture_output=True, text=True, check=True
    )
    for flag in ("--model-name", "--renderer", "--sampler", "--trainer", "--grpc-port", "--state-dir"):
        assert flag in shown.stdout
    refused = subprocess.run([sys.executable, "-m", "fovea_gateway", "--nonsense", "1"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "nonsense" in refused.stderr
