"""What the trainer refuses before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.runtime.model_files import MODEL_TYPES
from fovea_services.trainer.model.model_family import FAMILIES
from fovea_services.trainer.ranks.rank_launcher import check_checkpoint
from tests.unit.renderer import checkpoints


def test_the_types_are_those_of_the_trainer_s_families() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)


@pytest.mark.parametrize("service", ["trainer", "sampler", "renderer"])
def test_an_unsupported_model_is_refused_in_one_line_before_anything_heavy(service: str, tmp_path: Path) -> None:
    config = {"model_type": "qwen3_omni_moe", "vision_config": {}, "image_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['x', '--model', {str(tmp_path)!r}, '--port', '0', '--metrics-port', '0']\n"
        "try:\n"
        f"    runpy.run_module('fovea_services.{service}', run_name='__main__')\n"
        "finally:\n"
        "    print('heavy:', [name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "qwen3_omni_moe" in last
    for name in ("qwen2_5_vl", "qwen3_vl"):
        assert name in last
    assert ended.stdout.strip() == "heavy: []"


def test_a_vision_model_without_a_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.config("qwen3_vl")))
    with pytest.raises(ValueError, match="describes no image processor"):
        check_checkpoint(str(tmp_path))
