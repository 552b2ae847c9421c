"""Small model directories for tests that need no weights and no processor: configurations as released ones have."""

import json
from pathlib import Path
from typing import Any

from services.renderer import families, model_directory
from services.renderer.families.base import Family
from services.renderer.model_directory import Checkpoint

IMAGE, VIDEO, VISION, START, END = 90, 91, 92, 93, 94
VOCABULARY_SIZE = 100

PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "qwen2_5_vl": {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3_136, "longest_edge": 12_845_056}},
    "qwen3": {},
}


def write(directory: Path, kind: str, **config: Any) -> Checkpoint:
    """Writes config.json and tokenizer.json, and reads them as the renderer does."""
    text = {"vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 8192}
    content = {"model_type": kind, **(text if kind == "qwen3" else {"text_config": text})}
    if kind != "qwen3":
        content |= {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_config": {"spatial_merge_size": 2}}
    (directory / "config.json").write_text(json.dumps(content | config))
    names = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_pad|>": VISION, "<|vision_start|>": START}
    added = [{"id": token_id, "content": name} for name, token_id in names.items()]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return model_directory.read(directory)


def family(directory: Path, model_type: str) -> Family:
    """The family of such a directory, with the released checkpoints' processor settings."""
    model = write(directory, model_type)
    return families.choose(model)(model, PROCESSORS[model_type])
