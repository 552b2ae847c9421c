"""The command line, and the modules of the service process."""

from pathlib import Path

import pytest

from fovea import vision
from tests.copies import Ended, run_copies
from tests.unit.renderer import checkpoints

HEAVY = {"torch", "torchvision", "transformers", "vllm", "PIL"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `nothing`, and with `unknown`, a model of no known family."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("nothing", "unknown"):
        (folder / name).mkdir()
    checkpoints.write(folder / "unknown", "qwen3_vl", model_type="some_vlm")
    return folder


@pytest.fixture(scope="module")
def ended(directory: Path) -> dict[str, Ended]:
    """The results of starting the service with different arguments."""
    arguments = {
        "help": ["--help"],
        "no model": ["--model", str(directory / "nothing")],
        "unknown family": ["--model", str(directory / "unknown")],
        "unknown setting": ["--model", str(directory / "nothing"), "--wokers", "2"],
    }
    programs = [["fovea_renderer", *each] for each in arguments.values()]
    return dict(zip(arguments, run_copies("fovea_renderer.renderer_service", *programs), strict=True))


def test_the_service_process_loads_no_model_library(ended: dict[str, Ended]) -> None:
    assert "fovea_renderer.renderer_service" in ended["help"].loaded
    assert HEAVY & ended["help"].loaded == set()


def test_help_names_every_setting(ended: dict[str, Ended]) -> None:
    text = ended["help"].stdout
    for name in ("--model", "--port", "--workers", "--advertise", "--image-hosts", "--feature-cache-bytes"):
        assert name in text
    assert "FOVEA_RENDERER_" in text


def test_a_directory_without_a_model_ends_the_start(ended: dict[str, Ended], directory: Path) -> None:
    assert ended["no model"].returncode == 1
    assert f"{directory / 'nothing'} has no config.json" in ended["no model"].stderr


def test_an_unknown_vision_family_ends_the_start(ended: dict[str, Ended]) -> None:
    assert ended["unknown family"].returncode == 1
    assert "supported are " + ", ".join(vision.MODEL_TYPES) in ended["unknown family"].stderr


def test_an_unknown_setting_ends_the_start(ended: dict[str, Ended]) -> None:
    assert ended["unknown setting"].returncode == 2
    assert "--wokers" in ended["unknown setting"].stderr
