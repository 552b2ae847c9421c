"""Our patches equal the Hugging Face processor's, bit for bit."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from fovea_renderer import image_worker
from fovea_renderer.image_worker import ImagePatcher, QwenPatches, anywhere, open_processor
from tests.families import ensure_family
from tests.unit.renderer.pictures import picture

QWEN3 = {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 1_000_000}}
QWEN2_5 = {"patch_size": 14, "size": {"shortest_edge": 3_136, "longest_edge": 500_000}}


def write(directory: Path, **config: Any) -> Path:
    """Writes a directory with a processor of Qwen's class."""
    content = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, "temporal_patch_size": 2, **config}
    (directory / "preprocessor_config.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module", params=[QWEN3, QWEN2_5], ids=["16", "14"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[QwenPatches, Any]:
    """Our processor and the family's own."""
    own = AutoImageProcessor.from_pretrained(write(tmp_path_factory.mktemp("model"), **request.param))
    return QwenPatches(json.loads(own.to_json_string())), own


def check_equal(pair: tuple[QwenPatches, Any], image: Image.Image) -> None:
    patches, own = pair
    expected = own([image], return_tensors="np", do_rescale=False, do_normalize=False)
    found = patches(image, anywhere)
    assert found["pixel_values"].dtype == np.uint8
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@settings(max_examples=30)
@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 1000))
def test_any_size(pair: tuple[QwenPatches, Any], width: int, height: int, seed: int) -> None:
    if max(width, height) <= 200 * min(width, height):
        check_equal(pair, picture(width, height, seed))


@cache
def drawn(width: int, height: int) -> Image.Image:
    """Draws a picture once for both processors, because a large one takes a second."""
    return picture(width, height)


@pytest.mark.parametrize("size", [(448, 448), (1, 1), (1, 200), (3000, 2000), (28, 28), (64, 2016), (1021, 1019)])
def test_sizes_that_stay_grow_and_shrink(pair: tuple[QwenPatches, Any], size: tuple[int, int]) -> None:
    check_equal(pair, drawn(*size))


@pytest.mark.parametrize(
    "other", [{"resample": 2}, {"do_resize": False}, {"image_processor_type": "ViTImageProcessor"}]
)
def test_another_processor_is_used_itself(tmp_path: Path, other: dict[str, Any]) -> None:
    own = AutoImageProcessor.from_pretrained(write(tmp_path, **{**QWEN3, **other}))
    assert not QwenPatches.suits(own)


def test_what_differs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(tmp_path, **QWEN3)
    image = picture(448, 448)
    expected = ImagePatcher(directory).tensors(image, anywhere)

    class Wrong(QwenPatches):
        def __call__(self, image: Any, allocate: Any) -> Any:
            tensors = super().__call__(image, allocate)
            tensors["pixel_values"][-1, -1] ^= 1
            return tensors

    monkeypatch.setattr(image_worker, "QwenPatches", Wrong)
    found = ImagePatcher(directory).tensors(image, anywhere)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_line_feeds_around_an_image_are_no_part_of_it() -> None:
    tensors = open_processor(ensure_family("gemma3")).tensors(picture(64, 48), anywhere)
    tokens = AutoTokenizer.from_pretrained(ensure_family("gemma3")).convert_ids_to_tokens(tensors["input_ids"].tolist())
    assert tokens == ["<start_of_image>", *["<image_soft_token>"] * 16, "<end_of_image>"]


def test_the_number_of_an_image_is_no_part_of_it(tmp_path: Path) -> None:
    """The tokenizer_config.json of the published checkpoint does not name the processor's class."""
    directory = tmp_path / "model"
    shutil.copytree(ensure_family("minicpmv4_6"), directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processor_class": None}))
    tensors = open_processor(directory).tensors(picture(300, 100), anywhere)
    tokens = AutoTokenizer.from_pretrained(directory).convert_ids_to_tokens(tensors["input_ids"].tolist())
    assert tokens[0] == "<image>"
    assert tokens.count("<slice>") == len(tensors["target_sizes"]) - 1 > 0
    assert not [token for token in tokens if "image_id" in token]
    file = directory / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["use_image_id"] = False
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"writes \('<image>.*', ''\) .* must be \('<image_id>0</image_id>', ''\)"):
        open_processor(directory)


def test_a_processor_that_does_not_write_the_line_feeds_of_its_class_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(ensure_family("internvl"), directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processor_class": "Gemma3Processor"}))
    with pytest.raises(ValueError, match=r"InternVLProcessor writes \('<img>.* around an image, must be"):
        open_processor(directory)
