"""The processor files: image, video and chat settings of the released Qwen checkpoints."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from transformers import (
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tinyvlm.recipe import Kind

HALF = [0.5, 0.5, 0.5]


def chat_template(kind: Kind) -> str:
    """The Jinja chat template of `kind`: the released one, without its tool branch."""
    return files("tinyvlm").joinpath("chat_templates", f"{kind}.jinja").read_text(encoding="utf-8")


def save_processor(kind: Kind, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the files the released checkpoints have: tokenizer, preprocessor and video preprocessor."""
    tokenizer.save_pretrained(directory)
    if kind != "qwen3":
        whole = processor(kind, tokenizer)
        # One file a part, as released, not save_pretrained of the whole: other readers know only these names.
        for part in (whole.image_processor, whole.video_processor):
            part._set_processor_class(type(whole).__name__)
            part.save_pretrained(directory)


def processor(kind: Kind, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """The processor of a vision-language `kind`.

    Raises:
        ValueError: `kind` has no processor, only a tokenizer.
    """
    if kind == "qwen3_vl":
        geometry = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
        return Qwen3VLProcessor(
            image_processor=Qwen2VLImageProcessor(
                size={"shortest_edge": 65_536, "longest_edge": 16_777_216},
                image_mean=HALF,
                image_std=HALF,
                **geometry,
            ),
            tokenizer=tokenizer,
            video_processor=Qwen3VLVideoProcessor(
                size={"shortest_edge": 4_096, "longest_edge": 25_165_824},
                image_mean=HALF,
                image_std=HALF,
                **geometry,
            ),
            chat_template=tokenizer.chat_template,
        )
    if kind == "qwen2_5_vl":
        geometry = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        size = {"shortest_edge": 3_136, "longest_edge": 12_845_056}
        return Qwen2_5_VLProcessor(
            image_processor=Qwen2VLImageProcessor(size=size, **geometry),
            tokenizer=tokenizer,
            video_processor=Qwen2VLVideoProcessor(size=size, **geometry),
            chat_template=tokenizer.chat_template,
        )
    raise ValueError(f"{kind} has no processor")
