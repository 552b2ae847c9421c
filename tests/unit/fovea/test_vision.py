"""Vision-language families: geometry as in transformers, positions as in get_rope_index."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from fovea import vision
from fovea.runtime.model_files import check_supported, language_entries
from fovea.vision.qwen_vl import QwenVL
from fovea.vision.vision_family import ImageAt, VisionFamily
from tests.unit.renderer.checkpoints import (
    ADDED_TOKENS,
    IMAGE,
    PROCESSORS,
    START,
    VIDEO,
    VISION,
    VOCABULARY_SIZE,
    config,
    family,
)

KINDS = ["qwen3_vl", "qwen2_5_vl"]


@pytest.fixture
def qwen3_vl() -> VisionFamily:
    return family("qwen3_vl")


def test_the_model_type_chooses_the_family() -> None:
    qwen = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe"}
    assert set(vision.MODEL_TYPES) == qwen | {"glm4v", "glm4v_moe"} | set(PROCESSED)
    assert [vision.choose(config(kind)) for kind in KINDS] == [QwenVL, QwenVL]
    assert vision.choose({"model_type": "qwen3"}) is vision.choose({"model_type": "llama"}) is None
    assert vision.bind({"model_type": "qwen3"}, ADDED_TOKENS) is None


@pytest.mark.parametrize("tower", ["vision_config", "audio_config", "mm_vision_tower", "image_token_id"])
def test_an_unknown_vision_model_is_refused_with_the_supported_ones(tower: str) -> None:
    with pytest.raises(ValueError, match=r"'some_vlm' is a vision model.*supported are gemma3, .*, and text-"):
        vision.bind({"model_type": "some_vlm", tower: {}}, {})


@pytest.mark.parametrize(("model_type", "piece"), vision.MISSING_PIECES.items())
def test_a_refused_family_names_the_missing_piece(model_type: str, piece: str) -> None:
    tower: dict[str, Any] = {} if model_type in ("gpt_oss", "nemotron_h") else {"vision_config": {}}
    with pytest.raises(ValueError, match=f"'{model_type}' .*: {re.escape(piece)}; supported are "):
        check_supported({"model_type": model_type, **tower})


@pytest.mark.parametrize("entry", ["image_token_id", "vision_config"])
def test_an_entry_that_is_missing_is_named(entry: str) -> None:
    lacking = {key: value for key, value in config("qwen3_vl").items() if key != entry}
    with pytest.raises(ValueError, match=rf"config\.json has no {entry}"):
        vision.bind(lacking, ADDED_TOKENS)


def test_a_processor_that_does_not_fit_is_named(qwen3_vl: VisionFamily) -> None:
    with pytest.raises(ValueError, match=r"merge_size 4, config\.json has spatial_merge_size 2"):
        qwen3_vl.token_counter(PROCESSORS["qwen3_vl"] | {"merge_size": 4})
    with pytest.raises(ValueError, match="do_resize=false"):
        qwen3_vl.token_counter(PROCESSORS["qwen3_vl"] | {"do_resize": False})


@pytest.mark.parametrize("kind", KINDS)
def test_placeholders_are_reserved(kind: str) -> None:
    assert family(kind).reserved_ids == {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", VISION: "<|vision_pad|>"}


def test_the_parts_of_a_thinker_are_found(qwen3_vl: VisionFamily) -> None:
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": config("qwen3_vl") | {"audio_config": {}}}
    bound = vision.bind(whole, ADDED_TOKENS)
    assert isinstance(bound, QwenVL)
    assert bound.reserved_ids == qwen3_vl.reserved_ids
    assert not bound.tensors_problem(qwen3_vl.blank_image())
    assert language_entries(whole)["vocab_size"] == VOCABULARY_SIZE
    whole["thinker_config"] |= {"vision_config": {"attention_dropout": 0.1}}
    with pytest.raises(ValueError, match="attention_dropout must be 0"):
        check_supported(whole)


def test_the_configuration_alone_reserves_what_it_names() -> None:
    bare = vision.bind(config("qwen3_vl") | {"vision_start_token_id": START}, {})
    assert bare is not None
    assert bare.opener_id == START
    assert bare.reserved_ids == {IMAGE: "the image placeholder", VIDEO: "the video placeholder"}


@pytest.mark.parametrize("placeholder", [IMAGE, VIDEO, VISION])
def test_a_placeholder_after_the_opener_is_a_lost_image(qwen3_vl: VisionFamily, placeholder: int) -> None:
    assert qwen3_vl.find_lost_image(np.array([1, START, placeholder])) == 2
    assert qwen3_vl.find_lost_image(np.array([placeholder]), previous_id=START) == 0
    assert qwen3_vl.find_lost_image(np.array([1, placeholder, START, -1])) is None  # sampled, and with an image
    assert qwen3_vl.find_lost_image(np.array([], np.int32)) is None


@pytest.mark.parametrize(
    ("width", "height", "count"),
    # Contract section 6, recomputed with transformers 5.19; every size also with its sides swapped.
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
def test_qwen3_vl_counts(qwen3_vl: VisionFamily, width: int, height: int, count: int) -> None:
    token_count = qwen3_vl.token_counter(PROCESSORS["qwen3_vl"])
    assert token_count(width, height) == token_count(height, width) == count


@settings(max_examples=400)
@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from(KINDS))
def test_counts_are_those_of_smart_resize(width: int, height: int, model_type: str) -> None:
    width, height = min(width, 200 * height), min(height, 200 * width)
    processor = PROCESSORS[model_type]
    size, factor = processor["size"], processor["patch_size"] * processor["merge_size"]
    resized = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
    assert family(model_type).token_counter(processor)(width, height) == resized[0] * resized[1] // factor**2


def of_grid(*grid: int) -> dict[str, np.ndarray]:
    """Returns the tensors of an image that encode its grid."""
    return {"image_grid_thw": np.array([grid], np.int64)}


def test_placeholders_are_one_a_merged_patch(qwen3_vl: VisionFamily) -> None:
    ids, is_embedding = qwen3_vl.replacement(of_grid(1, 6, 10))
    assert ids.dtype == np.int32
    assert ids.tolist() == [IMAGE] * 15
    assert is_embedding.tolist() == [True] * 15
    assert qwen3_vl.patch_count(15) == 60


def test_positions_of_text_image_text(qwen3_vl: VisionFamily) -> None:
    # Two tokens, an image of 2 rows and 3 columns after merging, two tokens.
    positions = qwen3_vl.positions(10, [ImageAt(2, of_grid(1, 4, 6))])
    assert positions is not None
    assert positions.dtype == np.int32
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_two_images_in_a_row_are_placed_one_after_the_other(qwen3_vl: VisionFamily) -> None:
    # transformers' get_rope_index cannot do this: it reads the run of placeholders as one image.
    positions = qwen3_vl.positions(6, [ImageAt(0, of_grid(1, 2, 4)), ImageAt(2, of_grid(1, 4, 4))])
    assert positions is not None
    assert positions.tolist() == [[0, 0, 2, 2, 2, 2], [0, 0, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]]


@pytest.mark.parametrize(("model_type", "channels"), [("qwen3_vl", "in_channels"), ("qwen2_5_vl", "in_chans")])
def test_what_a_well_formed_image_is(model_type: str, channels: str) -> None:
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, channels: 3}
    bound = vision.bind({"model_type": model_type, "image_token_id": 7, "vision_config": sizes}, {})
    assert bound is not None
    pixels = np.zeros((96, 3 * 2 * 14 * 14), np.uint8)
    assert not bound.image_problem({"pixel_values": pixels} | of_grid(1, 8, 12), np.ones(24, np.bool_))
    assert not bound.tensors_problem(bound.blank_image())


def test_tensors_are_checked(qwen3_vl: VisionFamily) -> None:
    tensors = qwen3_vl.blank_image()
    pixels, grid = tensors["pixel_values"], tensors["image_grid_thw"]
    spoiled = {
        "tensors are": {"pixel_values": pixels},
        "is float32": {"pixel_values": pixels.astype(np.float32), "image_grid_thw": grid},
        "pixel_values has shape": {"pixel_values": pixels[1:], "image_grid_thw": grid},
        "image_grid_thw has shape": {"pixel_values": pixels, "image_grid_thw": grid[0]},
        "must be [64, 1536] for the grid [1, 8, 8]": {"pixel_values": pixels[:, 1:], "image_grid_thw": grid},
    }
    for problem, bad in spoiled.items():
        assert problem in qwen3_vl.tensors_problem(bad)


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        ([0, 2, 2], "must be positive"),
        ([-1, -2, 2], "must be positive"),
        ([1, 2**62, 2**62], "at most 16777216 patches"),
        ([1, 2**20, 2**20], "at most 16777216 patches"),
        ([2, 2, 2], "has 2 frames"),
        ([1, 3, 2], "multiples of 2"),
    ],
)
def test_grids_are_checked(qwen3_vl: VisionFamily, grid: list[int], problem: str) -> None:
    found = qwen3_vl.tensors_problem(qwen3_vl.blank_image() | of_grid(*grid))
    assert found.startswith("image_grid_thw [")
    assert problem in found


TILED = {"image_size": 8, "patch_size": [2, 2], "num_channels": 3}
PROCESSED: dict[str, dict[str, Any]] = {
    "internvl": {"image_token_id": IMAGE, "image_seq_length": 4, "vision_config": TILED},
    "gemma3": {"image_token_index": IMAGE, "mm_tokens_per_image": 4, "boi_token_index": START, "vision_config": TILED},
    "llama4": {"image_token_index": IMAGE, "boi_token_index": START, "vision_config": TILED},
    "idefics3": {"image_token_id": IMAGE, "scale_factor": 2, "vision_config": TILED},
    "smolvlm": {"image_token_id": IMAGE, "scale_factor": 2, "vision_config": TILED},
    "mistral3": {"image_token_index": IMAGE, "spatial_merge_size": 2, "vision_config": {"patch_size": 2}},
    "llava": {"image_token_index": IMAGE, "vision_config": {"model_type": "pixtral", "patch_size": 2}},
    "llava_onevision": {
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[8, 16]],
        "vision_config": {"image_size": 8, "patch_size": 8},
    },
    "llava_next": {
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[8, 16]],
        "vision_config": {"image_size": 8, "patch_size": 8},
    },
    "lfm2_vl": {"image_token_id": IMAGE, "downsample_factor": 2, "vision_config": {"patch_size": 2}},
    "minicpmv4_6": {"image_token_id": IMAGE, "vision_config": {"patch_size": 2}},
    "gemma4": {
        "image_token_id": IMAGE,
        "boi_token_id": START,
        "vision_config": {"patch_size": 2, "pooling_kernel_size": 2, "position_embedding_size": 32},
    },
}


def processed(model_type: str) -> VisionFamily:
    """A family that handles images with its own processor."""
    bound = vision.bind({"model_type": model_type} | PROCESSED[model_type], ADDED_TOKENS)
    assert bound is not None
    return bound


@pytest.mark.parametrize("model_type", PROCESSED)
def test_the_output_of_a_processor_is_checked(model_type: str) -> None:
    bound = processed(model_type)
    tensors = bound.blank_image()
    assert not bound.tensors_problem(tensors)
    assert bound.replacement(tensors).ids.tolist() == [IMAGE] * 4
    merged = {"llava": 1, "llava_next": 1, "llava_onevision": 1, "minicpmv4_6": 16}.get(model_type, 4)
    assert bound.patch_count(4) == 4 * merged
    assert bound.token_counter({}) is None
    assert bound.positions(4, [ImageAt(0, tensors)]) is None
    pixels = tensors["pixel_values"]
    spoiled = {
        "tensors are": {"pixel_values": pixels},
        "pixel_values is float64": tensors | {"pixel_values": pixels.astype(np.float64)},
        "pixel_values has shape": tensors | {"pixel_values": pixels[..., 0]},
        "input_ids is int64": tensors | {"input_ids": tensors["input_ids"].astype(np.int64)},
        "input_ids has 3 placeholders, but the tower makes 4": tensors | {"input_ids": tensors["input_ids"][1:]},
    }
    for problem, bad in spoiled.items():
        assert bound.tensors_problem(bad).startswith(problem)


def test_ids_around_embeddings_are_no_placeholders() -> None:
    bound = processed("internvl")
    ids = np.array([START, *[IMAGE] * 8, 5], np.int32)
    tensors = {"pixel_values": np.zeros((2, 3, 8, 8), np.float32), "input_ids": ids}
    found = bound.replacement(tensors)
    assert found.ids.tolist() == ids.tolist()
    assert found.is_embedding.tolist() == [False] + [True] * 8 + [False]
    assert not bound.image_problem(tensors, found.is_embedding)
    assert bound.image_problem(tensors, np.ones(10, np.bool_)) == "embedding_mask is not that of the tensors"


def test_an_image_in_its_own_proportions() -> None:
    bound = processed("mistral3")
    ids = np.array([*[IMAGE] * 3, 7] * 2, np.int32)
    pixels = np.zeros((1, 3, 8, 12), np.float32)
    tensors = {"pixel_values": pixels, "image_sizes": np.array([[8, 12]]), "input_ids": ids}
    assert not bound.tensors_problem(tensors)
    assert "makes 0 embeddings" in bound.tensors_problem(tensors | {"image_sizes": np.array([[12, 8]])})
    assert "makes 0 embeddings" in bound.tensors_problem(tensors | {"pixel_values": pixels[..., :10]})


# Tiles, including the overview, of images of (height, width) pixels in LLaVA-OneVision 7B.
ONEVISION = {(384, 384): 2, (37, 100): 2, (500, 30): 3, (384, 9000): 7, (944, 1153): 13, (2304, 2304): 37}


@pytest.mark.parametrize(("size", "tiles"), ONEVISION.items())
def test_tiles_without_their_padding_are_counted_as_transformers_does(size: tuple[int, int], tiles: int) -> None:
    config = LlavaOnevisionConfig().to_dict()
    bound = vision.bind(config, {})
    assert bound is not None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<image>": 0, "<video>": 1}, "<image>")))
    pixels = LlavaOnevisionImageProcessor(image_grid_pinpoints=config["image_grid_pinpoints"])
    own = LlavaOnevisionProcessor(pixels, tokenizer, LlavaOnevisionVideoProcessor(), num_image_tokens=27 * 27)
    (count,) = own._get_num_multimodal_tokens([size])["num_image_tokens"]
    image = {"pixel_values": np.zeros((1, tiles, 3, 384, 384), np.float32), "image_sizes": np.array([size])}
    ids = np.full(count, config["image_token_index"], np.int32)
    assert not bound.tensors_problem(image | {"input_ids": ids})
    assert bound.patch_count(count) >= tiles * 27 * 27 / 2
    more = np.zeros((1, tiles + 1, 3, 384, 384), np.float32)
    for bad in ({"pixel_values": more}, {"image_sizes": np.array([[0, 1]])}, {"image_sizes": np.array([[1, 2**40]])}):
        assert "the tower makes 0 embeddings" in bound.tensors_problem(image | {"input_ids": ids} | bad)


def test_places_and_sizes_are_checked() -> None:
    gemma4, lfm2_vl, minicpm = processed("gemma4"), processed("lfm2_vl"), processed("minicpmv4_6")
    placed, padded, sliced = gemma4.blank_image(), lfm2_vl.blank_image(), minicpm.blank_image()
    spoiled = [
        (gemma4, placed | {"image_position_ids": placed["image_position_ids"] + 32}),
        (gemma4, placed | {"image_position_ids": placed["image_position_ids"] - 2}),
        (lfm2_vl, padded | {"spatial_shapes": np.array([[2, 4]])}),
        (lfm2_vl, padded | {"spatial_shapes": np.array([[1, 16]])}),
        (lfm2_vl, padded | {"spatial_shapes": np.array([[-4, -4]])}),
        *((minicpm, sliced | {"target_sizes": np.array([grid], np.int32)}) for grid in ([8, 4], [2, 32], [-8, -8])),
        (minicpm, sliced | {"target_sizes": np.array([[2**30, 2**30]], np.int32)}),
    ]
    for bound, tensors in spoiled:
        assert "the tower makes 0 embeddings" in bound.tensors_problem(tensors)


@pytest.mark.parametrize(
    ("entry", "value"), [("downsample_mode", "4x"), ("drop_vision_last_layer", True), ("merger_times", 2)]
)
def test_a_minicpm_v_that_vllm_or_transformers_would_compute_otherwise_is_refused(entry: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{entry} is {value!r}; Fovea supports only"):
        vision.bind({"model_type": "minicpmv4_6", entry: value} | PROCESSED["minicpmv4_6"], {})


def test_llava_is_supported_only_with_a_pixtral_tower() -> None:
    with pytest.raises(ValueError, match="'clip_vision_model'; for LLaVA, Fovea supports only pixtral towers"):
        vision.bind(
            {"model_type": "llava", "image_token_index": 1, "vision_config": {"model_type": "clip_vision_model"}}, {}
        )


def test_code_of_a_checkpoint_is_refused() -> None:
    for model_type in ("kimi_k25", "qwen3_vl", "qwen3"):
        with pytest.raises(ValueError, match=rf"'{model_type}' needs custom code .*which Fovea never runs"):
            vision.choose({"model_type": model_type, "vision_config": {}, "auto_map": {"AutoModel": "m.py"}})
