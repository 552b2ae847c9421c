"""Other families at published sizes, random weights: `python -m benchmarks.family_shapes gemma3-4b DIRECTORY`.

Tokens and processors are those of the family in `tinyvlm.families`, at published image sizes; weights are drawn as
transformers initializes them, in bfloat16. Sizes: Gemma 3 4B, InternVL 3.5 8B and Qwen3.5 9B as their configurations on
the hub have them.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma3ImageProcessor,
    Gemma3Processor,
    GenerationConfig,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from benchmarks.flops import IMAGE_SIDE, FamilySize
from tinyvlm.families.registry import FAMILIES
from tinyvlm.families.vocabulary import family_tokenizer

_CONTEXT = 32768


@dataclass(frozen=True)
class Shape:
    """What a family's tiny configuration becomes.

    Attributes:
        family: Its name in `tinyvlm.families`.
        text, vision, whole: Entries of the language model, the tower and the rest.
        patches: Of one picture of `IMAGE_SIDE` pixels, which the tower sees at once.
        processor: Makes the processor; None takes the tiny one's, whose image sizes are the published ones.
    """

    family: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    whole: Mapping[str, Any]
    patches: int
    processor: Callable[[PreTrainedTokenizerBase], ProcessorMixin] | None = None


def _gemma3_processor(tokenizer: PreTrainedTokenizerBase) -> Gemma3Processor:
    image = Gemma3ImageProcessor(size={"height": 896, "width": 896})
    return Gemma3Processor(image, tokenizer, image_seq_length=256, chat_template=tokenizer.chat_template)


def _internvl_processor(tokenizer: PreTrainedTokenizerBase) -> InternVLProcessor:
    scale: dict[str, Any] = {"size": {"height": 448, "width": 448}}
    scale |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    image, video = GotOcr2ImageProcessor(**scale), InternVLVideoProcessor(**scale)
    return InternVLProcessor(image, tokenizer, video, image_seq_length=256, chat_template=tokenizer.chat_template)


SHAPES = {
    "gemma3-4b": Shape(
        "gemma3",
        text={
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "layer_types": [("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(34)],
        },
        vision={"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
        | {"image_size": 896},
        whole={"mm_tokens_per_image": 256},
        patches=64**2,
        processor=_gemma3_processor,
    ),
    "internvl-8b": Shape(
        "internvl",
        text={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": 36 * ["full_attention"],
        },
        vision={"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"image_size": [448, 448]},
        whole={"image_seq_length": 256},
        patches=32**2 + 1,
        processor=_internvl_processor,
    ),
    "qwen3_5-9b": Shape(
        "qwen3_5",
        text={
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "layer_types": 8 * [*(3 * ["linear_attention"]), "full_attention"],
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
        vision={"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
        | {"out_hidden_size": 4096, "num_position_embeddings": 2304},
        whole={},
        patches=(IMAGE_SIDE // 16) ** 2,
    ),
}


def build(name: str, directory: Path, device: str) -> None:
    """Writes model, tokenizer and processor files in bfloat16."""
    shape = SHAPES[name]
    tokenizer = family_tokenizer(FAMILIES[shape.family])
    model = _model(shape, tokenizer, device)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    make = shape.processor or FAMILIES[shape.family].processor
    assert make is not None
    make(tokenizer).save_pretrained(directory)


def size_of(name: str) -> FamilySize:
    """What decides a shape's FLOPs, counted on a model without memory."""
    shape = SHAPES[name]
    model = _model(shape, family_tokenizer(FAMILIES[shape.family]), "meta")
    text, vision = model.config.get_text_config(), model.config.vision_config
    heads = text.num_attention_heads * text.head_dim
    windows = {"full_attention": None, "sliding_attention": getattr(text, "sliding_window", None)}
    tower = getattr(model.model, "visual", None) or model.model.vision_tower
    return FamilySize(
        language_parameters=_matrices(model.get_decoder().layers) + text.vocab_size * text.hidden_size,
        attention=tuple((heads, windows[kind]) for kind in text.layer_types if kind in windows),
        vision_parameters=_matrices(tower),
        vision_layers=getattr(vision, "depth", None) or vision.num_hidden_layers,
        vision_hidden=vision.hidden_size,
        patches=shape.patches,
    )


def _model(shape: Shape, tokenizer: PreTrainedTokenizerBase, device: str) -> Any:
    family = FAMILIES[shape.family]
    tiny = family.config(tokenizer.get_added_vocab())
    config: PretrainedConfig = type(tiny).from_dict(_grown(tiny.to_dict(), shape))
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return family.architecture(config)
    finally:
        torch.set_default_dtype(before)


def _grown(config: dict[str, Any], shape: Shape) -> dict[str, Any]:
    text = config["text_config"] | dict(shape.text) | {"max_position_embeddings": _CONTEXT, "dtype": "bfloat16"}
    vision = config["vision_config"] | dict(shape.vision)
    return config | dict(shape.whole) | {"text_config": text, "vision_config": vision, "dtype": "bfloat16"}


def _matrices(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]), "cuda" if torch.cuda.is_available() else "cpu")
