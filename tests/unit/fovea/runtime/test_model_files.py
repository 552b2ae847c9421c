"""Properties of a checkpoint's files, which all services read alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoProcessor

import fovea_tinyvlm
from fovea.runtime import model_files
from fovea.runtime.model_files import check_directory, context_length, fingerprints, read_image_processor
from fovea_renderer.image_worker import ImagePatcher
from fovea_trainer.model.model_family import PatchNormalizer

YARN = {"rope_type": "yarn", "factor": 4.0}


def read_config(model: str) -> dict[str, Any]:
    """Reads the configuration from a directory; the hub has one file for every name."""

    def download(name: str, file: str) -> str:
        return str(fovea_tinyvlm.ensure("qwen3") / file)

    return model_files.read_config(model, download)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 128000, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 128000),
        # Qwen's instructions add these lines and leave the length unchanged.
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 32768, "rope_parameters": YARN}, 131072),
        # DeepSeek's set the length after scaling.
        (
            {"max_position_embeddings": 163840, "rope_scaling": {**YARN, "original_max_position_embeddings": 4096}},
            163840,
        ),
        ({"text_config": {"max_position_embeddings": 256, "rope_parameters": YARN}}, 1024),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 4096),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
        ({"n_positions": 1024}, None),
    ],
)
def test_context_lengths(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3"])
def test_all_services_read_one_context_under_yarn(kind: str, tmp_path: Path) -> None:
    """The sampler and the renderer read config.json, the trainer gets it from transformers."""
    config = read_config(str(fovea_tinyvlm.ensure(kind)))
    text = config.get("text_config", config)
    text["rope_parameters"] |= {**YARN, "original_max_position_embeddings": text["max_position_embeddings"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = 4 * text["max_position_embeddings"]
    assert context_length(read_config(str(tmp_path))) == expected
    assert model_files.read_directory(tmp_path).max_position_count == expected
    assert context_length(AutoConfig.from_pretrained(tmp_path).to_dict()) == expected


def test_a_processor_that_transformers_5_saved(tmp_path: Path) -> None:
    """One file for the processor and its parts instead of two; the renderer and the trainer read it alike."""
    model = fovea_tinyvlm.ensure("qwen3_vl")
    processor = AutoProcessor.from_pretrained(model)
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    processor.save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    settings = read_image_processor(tmp_path)
    assert settings["image_mean"] == [0.1, 0.2, 0.3]
    assert settings["size"] == read_image_processor(model)["size"]
    assert ImagePatcher(tmp_path).settings["image_mean"] == [0.1, 0.2, 0.3]
    normalizer = PatchNormalizer.from_checkpoint(tmp_path, 3, 6)
    black = normalizer(torch.zeros(1, 6, dtype=torch.uint8), torch.float32)
    assert black[0, ::2].tolist() == pytest.approx([-0.2, -0.4, -0.6])


def test_the_nested_processor_goes_first_as_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 1}')
    assert read_image_processor(tmp_path) == {"patch_size": 1}
    (tmp_path / "processor_config.json").write_text('{"processor_class": "P"}')
    assert read_image_processor(tmp_path) == {"patch_size": 1}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"patch_size": 2}}')
    assert read_image_processor(tmp_path) == {"patch_size": 2}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "own.Processor"}}),
        ("processor_config.json", {"auto_map": {"AutoProcessor": "own.Processor"}, "image_processor": {}}),
        ("processor_config.json", {"image_processor": {"auto_map": {"AutoImageProcessor": "own.Processor"}}}),
    ],
)
def test_code_that_a_processor_alone_brings_is_refused_before_anything_starts(
    name: str, content: dict[str, Any], tmp_path: Path
) -> None:
    for file in fovea_tinyvlm.ensure("qwen3_vl").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    check_directory(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{name} needs custom code \(auto_map, .*which Fovea never runs"):
        check_directory(tmp_path)
    with pytest.raises(ValueError, match=f"{name} needs custom code"):
        fingerprints(tmp_path)  # as every service does at its start


def test_a_hub_name() -> None:
    assert read_config("some/model")["model_type"] == "qwen3"


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither preprocessor_config.json nor image_processor in processor_config"):
        read_image_processor(tmp_path)
    with pytest.raises(FileNotFoundError, match="checkpoint folder or a Hugging Face model name"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_config(str(tmp_path))


def test_fingerprints_tell_what_services_read_differently(tmp_path: Path) -> None:
    model = fovea_tinyvlm.ensure("qwen3_vl")
    first, same, other = (tmp_path / name for name in ("first", "same", "other"))
    for directory in (first, same, other):
        shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"transformers_version": "6.0.0"}, indent=1))
    assert fingerprints(first) == fingerprints(same)
    (processor,) = {"processor_config.json", "preprocessor_config.json"} & {path.name for path in other.iterdir()}
    (other / processor).write_text((other / processor).read_text().replace("image_mean", "image_mode"))
    assert dict(fingerprints(first).items() ^ fingerprints(other).items()).keys() == {"image processor"}
    assert set(fingerprints(fovea_tinyvlm.ensure("qwen3"))) == {"config.json", "tokenizer.json"}
