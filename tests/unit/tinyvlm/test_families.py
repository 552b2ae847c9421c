"""The tiny families: transformers loads each, an image changes its answer, and saving it again loses nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    BatchFeature,
    PreTrainedModel,
    ProcessorMixin,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from fovea_data.base_model import trained_part
from fovea_tinyvlm.families import FAMILIES, build_family, ensure_families

# Some processors, such as GLM's, convert torch tensors to numpy 2 in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


THINKERS = {"qwen3_omni_moe": Qwen3OmniMoeThinkerForConditionalGeneration}
"""The classes of the parts that Fovea trains, of families for which that is not all."""


@pytest.fixture(scope="session")
def directories() -> dict[str, Path]:
    return ensure_families(FAMILIES)


def _load(directory: Path) -> PreTrainedModel:
    is_vision = FAMILIES[directory.name.split("-")[1]].processor is not None
    auto = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
    part = trained_part(AutoConfig.from_pretrained(directory))
    model: PreTrainedModel = auto.from_pretrained(directory, config=part).eval()
    return model


def _chat(processor: Any, image: Image.Image | None) -> BatchFeature:
    content = [{"type": "image"}] if image else []
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What is this?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = {"images": [image]} if image else {}
    inputs: BatchFeature = processor(text=[text], return_tensors="pt", add_special_tokens=False, **images)
    return inputs.to(torch.float32)  # Llama 4 processes images in bfloat16


def _picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (90, 140, 3), np.uint8))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_runs(directories: dict[str, Path], name: str) -> None:
    family, directory = FAMILIES[name], directories[name]
    assert AutoConfig.from_pretrained(directory).architectures == [family.architecture.__name__]
    model = _load(directory)
    assert type(model) is THINKERS.get(name, family.architecture)
    processor = AutoProcessor.from_pretrained(directory)
    with torch.no_grad():
        if family.processor is None:
            assert model(**_chat(processor, None)).logits.isfinite().all()
            return
        assert isinstance(processor, ProcessorMixin)
        first, second = (model(**_chat(processor, _picture(seed))).logits[0, -1] for seed in (0, 1))
    assert first.isfinite().all()
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_those_of_transformers_5(directories: dict[str, Path], name: str) -> None:
    present = {path.name for path in directories[name].iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= present
    assert ("processor_config.json" in present) == (FAMILIES[name].processor is not None)
    assert not present & {"preprocessor_config.json", "video_preprocessor_config.json"}


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("qwen3_moe", {"0.gate_proj.weight": [96, 128], "7.down_proj.weight": [128, 96]}),
        ("mixtral", {"0.w1.weight": [96, 128], "7.w2.weight": [128, 96]}),
        ("qwen3_vl_moe", {"gate_up_proj": [8, 128, 192], "down_proj": [8, 96, 128]}),
        ("qwen3_5_moe", {"gate_up_proj": [8, 192, 128], "down_proj": [8, 128, 96]}),
    ],
)
def test_experts_are_on_disk_as_published(
    directories: dict[str, Path], name: str, shapes: dict[str, list[int]]
) -> None:
    with safe_open(directories[name] / "model.safetensors", "pt") as file:
        found = {
            key.partition(".experts.")[2]: file.get_slice(key).get_shape()
            for key in file.keys()  # noqa: SIM118, which takes the file for a mapping
            if re.search(r"\.layers\.0\.(mlp|block_sparse_moe)\.experts\.", key)
        }
    assert found.items() >= shapes.items()
    assert len(found) == {"qwen3_moe": 24, "mixtral": 24}.get(name, 2)


@pytest.mark.parametrize(
    "name", ["qwen3_5", "qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "gemma3", "llava_onevision", "llama"]
)
def test_saved_again_in_shards_it_is_the_same(directories: dict[str, Path], name: str, tmp_path: Path) -> None:
    model = _load(directories[name])
    again = tmp_path / directories[name].name
    model.save_pretrained(again, max_shard_size="2MB")
    AutoProcessor.from_pretrained(directories[name]).save_pretrained(again)
    index = json.loads((again / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    loaded = _load(again)
    for (key, value), (other_key, other) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert key == other_key
        assert torch.equal(value, other)


@pytest.mark.parametrize("name", ["gemma3", "llama", "lfm2_vl"])
def test_tied_embeddings_are_saved_once(directories: dict[str, Path], name: str) -> None:
    model = _load(directories[name])
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not [key for key in load_file(directories[name] / "model.safetensors") if "lm_head" in key]


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.randn(3)  # earlier random draws of the caller do not matter
        build_family("mistral", tmp_path / folder, seed)
    a, b, c = (load_file(tmp_path / folder / "model.safetensors") for folder in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(torch.equal(a[key], c[key]) for key in a)
