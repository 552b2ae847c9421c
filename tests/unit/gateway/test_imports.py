"""The gateway's imports stay light and its files small."""

from pathlib import Path

import pytest

import fovea_gateway
from tests.copies import Ended, run_copies

HEAVY = {
    *("torch", "vllm", "transformers", "PIL", "torchvision", "safetensors", "alembic"),
    *("peft", "matplotlib", "sklearn"),
}


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    """The results of `--help` and of a start with an unknown option."""
    return run_copies("fovea_gateway.fronts.app", ["fovea_gateway", "--help"], ["fovea_gateway", "--nonsense", "1"])


def test_importing_the_gateway_loads_nothing_heavy(ended: list[Ended]) -> None:
    assert "fovea_gateway.fronts.app" in ended[0].loaded
    assert HEAVY & ended[0].loaded == set()


def test_files_are_small() -> None:
    folder = Path(fovea_gateway.__file__).parent
    lengths = {path: len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    assert len(lengths) > 40
    assert [path for path, length in lengths.items() if length > 400] == []


def test_help_and_wrong_arguments(ended: list[Ended]) -> None:
    shown, refused = ended
    assert shown.returncode == 0
    for flag in ("--model-name", "--renderer", "--sampler", "--trainer", "--grpc-port", "--state-dir"):
        assert flag in shown.stdout
    assert refused.returncode != 0
    assert "nonsense" in refused.stderr
