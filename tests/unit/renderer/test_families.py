"""Families: chosen by model_type, geometry as transformers computes it, positions as get_rope_index computes them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from services.renderer import families, model_directory
from services.renderer.families.base import Family, ImageSpan
from services.renderer.families.qwen2_5_vl import Qwen25VL
from services.renderer.families.qwen3_vl import Qwen3VL
from services.renderer.families.text import TextOnly
from tests.unit.renderer import checkpoints
from tests.unit.renderer.checkpoints import IMAGE, PROCESSORS, VIDEO, VISION, family


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


@pytest.mark.parametrize(
    ("model_type", "chosen"), [("qwen3_vl", Qwen3VL), ("qwen2_5_vl", Qwen25VL), ("qwen3", TextOnly)]
)
def test_the_configuration_chooses_the_family(tmp_path: Path, model_type: str, chosen: type) -> None:
    assert families.choose(checkpoints.write(tmp_path, model_type)) is chosen


def test_an_unknown_text_model_is_served(tmp_path: Path) -> None:
    model = checkpoints.write(tmp_path, "qwen3", model_type="llama")
    assert families.choose(model) is TextOnly
    assert (model.vocabulary_size, model.max_position_count) == (100, 8192)


def test_an_unknown_vision_model_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    model = checkpoints.write(tmp_path, "qwen3_vl", model_type="llava")
    with pytest.raises(
        ValueError, match=r"'llava' is a vision model.*supported are qwen2_5_vl, qwen3_vl, and text-only"
    ):
        families.choose(model)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not"):
        model_directory.read(tmp_path)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json; --model takes"):
        model_directory.read(tmp_path)


def test_a_configuration_without_model_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json has no model_type"):
        families.choose(model_directory.read(tmp_path))


def test_a_processor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    model = checkpoints.write(tmp_path, "qwen3_vl", vision_config={"spatial_merge_size": 4})
    with pytest.raises(ValueError, match=r"merge_size 2, config\.json has spatial_merge_size 4"):
        Qwen3VL(model, PROCESSORS["qwen3_vl"])
    with pytest.raises(ValueError, match="do_resize=false"):
        Qwen3VL(model, PROCESSORS["qwen3_vl"] | {"do_resize": False})


def test_pad_tokens_are_reserved(qwen3_vl: Family, qwen2_5_vl: Family) -> None:
    expected = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", VISION: "<|vision_pad|>"}
    assert qwen3_vl.reserved_ids == qwen2_5_vl.reserved_ids == expected


@pytest.mark.parametrize(
    ("width", "height", "count"),
    # Contract section 6, recomputed there with transformers 5.19; every size also the other way round.
    [
        (224, 224, 64),
        (150, 224, 70),
        (400, 300, 108),
        (480, 360, 165),
        (32, 32, 64),
        (1920, 1080, 2040),
        (5000, 5000, 16384),
    ],
)
def test_qwen3_vl_counts(qwen3_vl: Family, width: int, height: int, count: int) -> None:
    assert qwen3_vl.token_count(width, height) == qwen3_vl.token_count(height, width) == count


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from(["qwen3_vl", "qwen2_5_vl"]))
def test_counts_are_those_of_smart_resize(
    qwen3_vl: Family, qwen2_5_vl: Family, width: int, height: int, model_type: str
) -> None:
    width, height = min(width, 200 * height), min(height, 200 * width)
    processor = PROCESSORS[model_type]
    size, factor = processor["size"], processor["patch_size"] * processor["merge_size"]
    resized = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
    chosen = qwen3_vl if model_type == "qwen3_vl" else qwen2_5_vl
    assert chosen.token_count(width, height) == resized[0] * resized[1] // factor**2


def test_placeholders_are_one_a_merged_patch(qwen3_vl: Family) -> None:
    ids = qwen3_vl.placeholder_ids((1, 6, 10))
    assert ids.dtype == np.int32
    assert ids.tolist() == [IMAGE] * 15


def test_positions_of_text_image_text(qwen3_vl: Family) -> None:
    # Two tokens, an image of 2 rows and 3 columns after merging, two tokens.
    positions = qwen3_vl.positions(10, [ImageSpan(2, (1, 4, 6))])
    assert positions.dtype == np.int32
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_two_images_in_a_row_are_placed_one_after_the_other(qwen3_vl: Family) -> None:
    # transformers' get_rope_index cannot say this: it takes the run of placeholders for one image.
    positions = qwen3_vl.positions(6, [ImageSpan(0, (1, 2, 4)), ImageSpan(2, (1, 4, 4))])
    assert positions.tolist() == [[0, 0, 2, 2, 2, 2], [0, 0, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]]
