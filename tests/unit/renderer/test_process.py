"""The command line, and what the service process loads."""

import json
import subprocess
import sys
from pathlib import Path

from fovea import vision
from tests.unit.renderer import checkpoints

HEAVY = {"torch", "torchvision", "transformers", "vllm", "PIL"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_the_service_process_loads_no_model_library() -> None:
    code = (
        "import json, sys, fovea_services.renderer.renderer_service\n"
        "print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    )
    found = run("-c", code)
    assert found.returncode == 0, found.stderr
    assert HEAVY & set(json.loads(found.stdout)) == set()


def test_help_names_every_setting() -> None:
    text = run("-m", "fovea_services.renderer", "--help").stdout
    for name in ("--model", "--port", "--workers", "--advertise", "--image-hosts", "--feature-cache-bytes"):
        assert name in text
    assert "FOVEA_RENDERER_" in text


def test_a_directory_without_a_model_ends_the_start(tmp_path: Path) -> None:
    ended = run("-m", "fovea_services.renderer", "--model", str(tmp_path))
    assert ended.returncode == 1
    assert f"{tmp_path} has no config.json" in ended.stderr


def test_an_unknown_vision_family_ends_the_start(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, "qwen3_vl", model_type="some_vlm")
    ended = run("-m", "fovea_services.renderer", "--model", str(tmp_path))
    assert ended.returncode == 1
    assert "supported are " + ", ".join(vision.MODEL_TYPES) in ended.stderr


def test_an_unknown_setting_ends_the_start(tmp_path: Path) -> None:
    ended = run("-m", "fovea_services.renderer", "--model", str(tmp_path), "--wokers", "2")
    assert ended.returncode == 2
    assert "--wokers" in ended.stderr
