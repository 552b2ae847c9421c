"""The processor files: image, video and chat settings of the released Qwen checkpoints."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
from transformers.video_processing_utils import BaseVideoProcessor

from fovea_tinyvlm.recipe import Kind

HALF = [0.5, 0.5, 0.5]
_QWEN3_VL_GEOMETRY = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
_QWEN2_5_VL_GEOMETRY = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}


def chat_template(kind: Kind) -> str:
    """Returns the Jinja chat template of `kind`: the released one without its branch for tools."""
    return files("fovea_tinyvlm").joinpath("chat_templates", f"{kind}.jinja").read_text(encoding="utf-8")


def save_processor(kind: Kind, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Writes the files that the released checkpoints have: tokenizer, preprocessor and video preprocessor."""
    tokenizer.save_pretrained(directory)
    if kind != "qwen3":
        # One file per component, as released, instead of save_pretrained of the whole processor: all readers know
        # these.
        image_processor(kind).save_pretrained(directory)
        video_processor(kind).save_pretrained(directory)


def image_processor(kind: Kind) -> Qwen2VLImageProcessor:
    """Returns the image processor of a vision-language `kind` with its released settings."""
    if kind == "qwen3_vl":
        size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
        return Qwen2VLImageProcessor(size=size, image_mean=HALF, image_std=HALF, **_QWEN3_VL_GEOMETRY)
    size = {"shortest_edge": 3_136, "longest_edge": 12_845_056}
    return Qwen2VLImageProcessor(size=size, **_QWEN2_5_VL_GEOMETRY)


def video_processor(kind: Kind) -> BaseVideoProcessor:
    """Returns the video processor of a vision-language `kind`, without which AutoProcessor does not load."""
    if kind == "qwen3_vl":
        size = {"shortest_edge": 4_096, "longest_edge": 25_165_824}
        return Qwen3VLVideoProcessor(size=size, image_mean=HALF, image_std=HALF, **_QWEN3_VL_GEOMETRY)
    size = {"shortest_edge": 3_136, "longest_edge": 12_845_056}
    return Qwen2VLVideoProcessor(size=size, **_QWEN2_5_VL_GEOMETRY)
