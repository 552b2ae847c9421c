"""Families read their facts from the configuration."""

import numpy as np
import pytest

from services.sampler.families import family_of

VISION = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}


@pytest.mark.parametrize(("model_type", "channels"), [("qwen3_vl", "in_channels"), ("qwen2_5_vl", "in_chans")])
def test_qwen(model_type: str, channels: str) -> None:
    family = family_of(
        {"model_type": model_type, "image_token_id": 7, "video_token_id": 8, "vision_config": {**VISION, channels: 3}}
    )
    assert family.image_token_id == 7
    assert family.reserved_token_ids == {7, 8}
    assert family.token_count([1, 8, 12]) == 24
    assert family.tensor_shapes([1, 8, 12])["pixel_values"] == ("uint8", (96, 3 * 2 * 14 * 14))
    grey = family.grey_image()
    assert grey is not None
    tensors, grid = grey
    assert not family.grid_problem(grid)
    assert not family.tensors_problem(grid, tensors)


def test_tensors_are_checked() -> None:
    family = family_of({"model_type": "qwen3_vl", "image_token_id": 7, "vision_config": VISION})
    grey = family.grey_image()
    assert grey is not None
    tensors, grid = grey
    pixels, held_grid = tensors["pixel_values"], tensors["image_grid_thw"]
    spoiled = {
        "tensors are": {"pixel_values": pixels},
        "is float32": {"pixel_values": pixels.astype(np.float32), "image_grid_thw": held_grid},
        "pixel_values has shape": {"pixel_values": pixels[1:], "image_grid_thw": held_grid},
        "image_grid_thw has shape": {"pixel_values": pixels, "image_grid_thw": held_grid[0]},
        "image_grid_thw is": {"pixel_values": pixels, "image_grid_thw": held_grid[:, ::-1]},
    }
    for problem, bad in spoiled.items():
        assert problem in family.tensors_problem(grid, bad)


def test_text_and_unknown_models() -> None:
    text = family_of({"model_type": "llama"})
    assert text.image_token_id is None
    assert text.grey_image() is None
    for model_type in ("some_vlm", "qwen3_vl_moe"):
        with pytest.raises(ValueError, match=rf"'{model_type}' is not supported; known: qwen2_5_vl, qwen3_vl, text"):
            family_of({"model_type": model_type, "vision_config": {}})
    with pytest.raises(ValueError, match="'qwen3_moe' is not supported"):
        family_of({"model_type": "qwen3_moe", "num_experts": 128})
