"""Model directories that the renderer accepts, and its errors for the others."""

from pathlib import Path

import pytest

from fovea.runtime.model_files import read_directory
from tests.unit.renderer import checkpoints


def test_a_vision_model_and_a_text_model_of_any_architecture(tmp_path: Path) -> None:
    model = read_directory(checkpoints.write(tmp_path, "qwen3_vl"))
    assert (model.model_type, model.vocabulary_size, model.max_position_count) == ("qwen3_vl", 100, 8192)
    assert model.family is not None
    assert checkpoints.VISION in model.family.reserved_ids
    model = read_directory(checkpoints.write(tmp_path, "qwen3", model_type="llama"))
    assert (model.model_type, model.vocabulary_size, model.max_position_count) == ("llama", 100, 8192)
    assert model.family is None


def test_an_unknown_vision_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'some_vlm' is a vision model"):
        read_directory(checkpoints.write(tmp_path, "qwen3_vl", model_type="some_vlm"))


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not"):
        read_directory(tmp_path)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json; --model takes"):
        read_directory(tmp_path)


def test_a_configuration_without_model_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json has no model_type"):
        _ = read_directory(tmp_path).model_type
