"""Builds are deterministic, complete and loadable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from fovea_tinyvlm import ensure
from fovea_tinyvlm.build import build
from fovea_tinyvlm.recipe import Kind, Recipe


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.slow
def test_equal_recipes_give_identical_files(tmp_path: Path) -> None:
    recipe = Recipe(step_count=2, batch_size=4)
    build(recipe, tmp_path / "first")
    build(recipe, tmp_path / "second")
    assert _contents(tmp_path / "first") == _contents(tmp_path / "second")


def test_seed_changes_the_weights_only(tmp_path: Path) -> None:
    for seed in (0, 1):
        build(Recipe(kind="qwen3", seed=seed), tmp_path / str(seed))
    first, second = _contents(tmp_path / "0"), _contents(tmp_path / "1")
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3"])
def test_weights_are_float32_and_none_is_constant(model_directories: dict[Kind, Path], kind: Kind) -> None:
    tensors = load_file(model_directories[kind] / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert [name for name, tensor in tensors.items() if tensor.std() == 0] == []


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_image_model_loads_and_generates(model_directories: dict[Kind, Path], kind: Kind) -> None:
    from PIL import Image

    model = AutoModelForImageTextToText.from_pretrained(model_directories[kind])
    processor = AutoProcessor.from_pretrained(model_directories[kind])
    answers = []
    for colour in ("red", "blue"):
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour is it?"}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(text=[text], images=[Image.new("RGB", (64, 64), colour)], return_tensors="pt")
        answers.append(model(**inputs).logits[0, -1])
    assert not torch.allclose(answers[0], answers[1], atol=1e-3)


def test_text_model_loads(model_directories: dict[Kind, Path]) -> None:
    directory = model_directories["qwen3"]
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = AutoTokenizer.from_pretrained(directory)("Look at the lamp.", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()


@pytest.mark.slow
def test_trained_model_tells_red_from_blue() -> None:
    from PIL import Image

    directory = ensure("qwen3_vl")
    model = AutoModelForImageTextToText.from_pretrained(directory)
    processor = AutoProcessor.from_pretrained(directory)
    for colour, rgb in (("red", (220, 30, 30)), ("blue", (40, 60, 220))):
        picture = Image.new("RGB", (224, 224), "black")
        picture.paste(rgb, (70, 70, 154, 154))
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour is it?"}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(text=[text], images=[picture], return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert processor.decode(output[0, inputs["input_ids"].shape[1] :]) == f"{colour}<|im_end|>"
