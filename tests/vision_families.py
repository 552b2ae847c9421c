"""A vision-language family with small patches, for tests of validation rather than computation."""

from fovea import vision
from fovea.vision.vision_family import VisionFamily

OPENER, IMAGE, VIDEO, PAD = 89, 90, 91, 92


def small_qwen3_vl(patch_size: int = 2) -> VisionFamily:
    """Four patches of 6 * patch_size^2 bytes make a token."""
    sizes = {"patch_size": patch_size, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
    config = {"model_type": "qwen3_vl", "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_config": sizes}
    family = vision.bind(config, {"<|vision_start|>": OPENER, "<|vision_pad|>": PAD})
    assert family is not None
    return family
