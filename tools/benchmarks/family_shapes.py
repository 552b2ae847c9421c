"""Builds other families at published sizes with random weights: `python -m benchmarks.family_shapes gemma3-4b
DIRECTORY`.

Tokens and processors are those of the family in `fovea_tinyvlm.families`, with published image sizes. Weights are drawn
as transformers initializes them, in bfloat16. The sizes of Gemma 3 4B, InternVL 3.5 8B, Qwen3.5 9B and Qwen3-VL 30B-A3B
are those of their configurations on the hub. `qwen3_vl-30b-a3b-12l` (8.7B) and `-4l` (3.7B) have fewer layers; `-2l`,
for a CPU, also has an eighth of the experts, a small vocabulary and two blocks in its tower (0.3B).

`--seed 0` writes no data; trainer and sampler draw the weights instead (`benchmarks/random_checkpoint.py`). Use it for
models that do not fit on the disk. `--zeros` writes no data either; the weights read as zeros.
"""

import argparse
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

from benchmarks import random_checkpoint
from benchmarks.flops import IMAGE_SIDE, FamilySize
from fovea_tinyvlm.families.registry import FAMILIES
from fovea_tinyvlm.families.vocabulary import family_tokenizer
from fovea_trainer.model.expert_routing import is_experts

_CONTEXT = 32768


@dataclass(frozen=True)
class Shape:
    """Changes to a family's tiny configuration.

    Attributes:
        family: Name in `fovea_tinyvlm.families`.
        text, vision, whole: Config entries of the language model, the tower and the rest.
        patches: Patches of one image with sides of `IMAGE_SIDE` pixels, which the tower sees at once.
        processor: Creates the processor; None uses the tiny one, which has published image sizes.
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


def _qwen3_vl_moe(
    layers: int,
    experts: int = 128,
    vocabulary: int = 151936,
    blocks: int = 27,
    deepstack: tuple[int, ...] = (8, 16, 24),
) -> Shape:
    return Shape(
        "qwen3_vl_moe",
        text={
            "vocab_size": vocabulary,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_local_experts": experts,
            "num_experts_per_tok": 8,
            "num_hidden_layers": layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        vision={"depth": blocks, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
        | {"out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": list(deepstack)},
        whole={},
        patches=(IMAGE_SIDE // 16) ** 2,
    )


SHAPES = {
    "qwen3_vl-30b-a3b": _qwen3_vl_moe(48),
    "qwen3_vl-30b-a3b-12l": _qwen3_vl_moe(12),
    "qwen3_vl-30b-a3b-4l": _qwen3_vl_moe(4),
    "qwen3_vl-30b-a3b-2l": _qwen3_vl_moe(2, experts=16, vocabulary=2048, blocks=2, deepstack=(0, 1)),
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


def build(name: str, directory: Path, device: str, without_bytes: bool = False, seed: int | None = None) -> None:
    """Writes model, tokenizer and processor files in bfloat16; on request, only the header of the weights."""
    shape = SHAPES[name]
    family = FAMILIES[shape.family]
    tokenizer = family_tokenizer(family)
    model = _model(shape, tokenizer, "meta" if without_bytes else device)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    directory.mkdir(parents=True, exist_ok=True)
    if without_bytes:
        random_checkpoint.write_model(model, directory, family.experts, seed)
    elif family.experts == "one by one":
        model.save_pretrained(directory)
    else:
        published = random_checkpoint.published_tensors(model, family.experts)
        whole = {name: tensor.contiguous() for name, tensor in published.items()}
        model.save_pretrained(directory, state_dict=whole, save_original_format=False)
    make = shape.processor or FAMILIES[shape.family].processor
    assert make is not None
    make(tokenizer).save_pretrained(directory)


def size_of(name: str) -> FamilySize:
    """Returns the sizes that determine a shape's FLOPs, counted on a model without memory."""
    shape = SHAPES[name]
    model = _model(shape, family_tokenizer(FAMILIES[shape.family]), "meta")
    text, vision = model.config.get_text_config(), model.config.vision_config
    heads = text.num_attention_heads * text.head_dim
    layers = model.get_decoder().layers
    windows = {"full_attention": None, "sliding_attention": getattr(text, "sliding_window", None)}
    kinds = getattr(text, "layer_types", None) or text.num_hidden_layers * ["full_attention"]
    tower = getattr(model.model, "visual", None) or model.model.vision_tower
    return FamilySize(
        language_parameters=_active(layers, text) + text.vocab_size * text.hidden_size,
        attention=tuple((heads, windows[kind]) for kind in kinds if kind in windows),
        vision_parameters=_matrices(tower),
        vision_layers=getattr(vision, "depth", None) or vision.num_hidden_layers,
        vision_hidden=vision.hidden_size,
        patches=shape.patches,
        adapter_width=_adapter_width(layers, text) + text.vocab_size + text.hidden_size,
    )


def _active(layers: nn.Module, text: Any) -> int:
    """Returns the number of matrix elements used per token; of experts, only those that are active."""
    every = sum(_matrices(module) for module in layers.modules() if is_experts(module))
    if not every:
        return _matrices(layers)
    return int(_matrices(layers) - every + every * text.num_experts_per_tok // text.num_experts)


def _adapter_width(layers: nn.Module, text: Any) -> int:
    """Returns the numbers of a rank-1 adapter used per token. Experts share their outer factors."""
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    width = sum(module.in_features + module.out_features for module in linears)
    experts = sum(is_experts(module) for module in layers.modules())
    taken = getattr(text, "num_experts_per_tok", 0) * getattr(text, "moe_intermediate_size", 0)
    return int(width + experts * 3 * (text.hidden_size + taken))


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


def main() -> None:
    """Writes one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--seed", type=int, help="seed of weights that trainer and sampler draw")
    ways.add_argument("--zeros", action="store_true", help="weights that read as zeros, from a hole in the file")
    options = parser.parse_args()
    without_bytes = options.zeros or options.seed is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    build(options.shape, options.directory, device, without_bytes, options.seed)


if __name__ == "__main__":
    main()
