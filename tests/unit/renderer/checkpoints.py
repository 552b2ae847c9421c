"""Small model directories for tests without weights or a processor: configurations like released ones."""

import json
from pathlib import Path
from typing import Any

from fovea import vision
from fovea.vision.vision_family import VisionFamily

IMAGE, VIDEO, VISION, START, END = 90, 91, 92, 93, 94
VOCABULARY_SIZE = 100
VISION_CONFIG = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
ADDED_TOKENS = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_pad|>": VISION, "<|vision_start|>": START}

PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "qwen2_5_vl": {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3_136, "longest_edge": 12_845_056}},
    "qwen3": {},
}


def config(model_type: str) -> dict[str, Any]:
    """Returns the config.json of a model of this type."""
    text = {"vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 8192}
    if model_type == "qwen3":
        return {"model_type": model_type, **text}
    images = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_config": VISION_CONFIG}
    return {"model_type": model_type, "text_config": text, **images}


def family(model_type: str) -> VisionFamily:
    """Returns the vision-language family of such a model."""
    bound = vision.bind(config(model_type), ADDED_TOKENS)
    assert bound is not None
    return bound


def write(directory: Path, kind: str, **changes: Any) -> Path:
    """Writes config.json and tokenizer.json."""
    (directory / "config.json").write_text(json.dumps(config(kind) | changes))
    added = [{"id": token_id, "content": name} for name, token_id in ADDED_TOKENS.items()]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return directory
