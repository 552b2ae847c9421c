"""Variants of a family that the trainer refuses to load, because it would compute them wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fovea_tinyvlm
from fovea_trainer.model.packed_model import load_model
from fovea_trainer.settings import TrainerSettings

CPU = torch.device("cpu")
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0}


def _variant(kind: fovea_tinyvlm.Kind, directory: Path, **changes: Any) -> Path:
    """Links the tiny model's files, with another rotary embedding in the configuration."""
    base = fovea_tinyvlm.ensure(kind)
    for path in base.iterdir():
        (directory / path.name).symlink_to(path)
    config = json.loads((base / "config.json").read_text())
    text = config.get("text_config", config)
    text["rope_parameters"] |= {**changes, "original_max_position_embeddings": text["max_position_embeddings"] // 2}
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, LONG], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_vl"])
def test_rotary_frequencies_that_depend_on_the_longest_document(
    kind: fovea_tinyvlm.Kind, rope: dict[str, Any], tmp_path: Path
) -> None:
    directory = _variant(kind, tmp_path, **rope)
    with pytest.raises(ValueError, match=f"rope_type '{rope['rope_type']}' of {kind} is not supported"):
        load_model(TrainerSettings(model=str(directory)), directory, CPU)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_vl"])
def test_frequencies_that_are_fixed_load(kind: fovea_tinyvlm.Kind, tmp_path: Path) -> None:
    directory = _variant(kind, tmp_path, **YARN)
    _, _, module = load_model(TrainerSettings(model=str(directory)), directory, CPU)
    assert module.hf.config.get_text_config().rope_parameters["rope_type"] == "yarn"
