"""Models that the trainer refuses before it imports torch."""

import json
from pathlib import Path

import pytest

from fovea.runtime.model_files import MODEL_TYPES
from fovea_trainer.model.model_family import FAMILIES
from fovea_trainer.ranks.rank_launcher import check_checkpoint
from tests.copies import Ended, run_copies
from tests.unit.renderer import checkpoints


def test_the_types_are_those_of_the_trainer_s_families() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)


SERVICES = ["trainer", "sampler", "renderer"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The results of starting each service with a model of another type."""
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "ernie4_5_vl_moe", "vision_config": {}, "image_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ["--model", str(folder), "--port", "0", "--metrics-port", "0"]
    programs = ([f"fovea_{service}", *arguments] for service in SERVICES)
    return dict(zip(SERVICES, run_copies("fovea.runtime.server", *programs), strict=True))


@pytest.mark.parametrize("service", SERVICES)
def test_an_unsupported_model_is_refused_in_one_line_before_anything_heavy(
    ended: dict[str, Ended], service: str
) -> None:
    assert ended[service].returncode == 1
    last = ended[service].stderr.strip().splitlines()[-1]
    assert "ernie4_5_vl_moe" in last
    for name in ("qwen2_5_vl", "qwen3_vl"):
        assert name in last
    assert ended[service].stdout == ""
    assert {"torch", "transformers", "vllm"} & ended[service].loaded == set()


def test_a_vision_model_without_a_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.config("qwen3_vl")))
    with pytest.raises(ValueError, match="describes no image processor"):
        check_checkpoint(str(tmp_path))
