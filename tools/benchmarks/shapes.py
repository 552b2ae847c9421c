"""Builds Qwen3-VL checkpoints of real sizes with random weights: `python -m benchmarks.shapes 4b DIRECTORY`.

The sizes are those of the published models' configuration files. Weights are drawn as transformers initializes them
(normal, 0.02), which gives logits of unit scale. No weight is zero. With `--seed 0` no weights are written: trainer and
sampler draw them (`benchmarks/random_checkpoint.py`).
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks import random_checkpoint
from fovea_tinyvlm.curriculum import lesson_texts
from fovea_tinyvlm.processor import chat_template, save_processor
from fovea_tinyvlm.prose import corpus
from fovea_tinyvlm.special_tokens import END_OF_TEXT, IM_END, IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from fovea_tinyvlm.tokenizer import train_tokenizer

_VISION_SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_VISION_LARGE = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 16},
        {"depth": 4, "hidden_size": 256, "intermediate_size": 512, "deepstack_visual_indexes": [0, 1, 2]},
    ),
    "2b": (
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
        _VISION_SMALL,
    ),
    "4b": (
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
        _VISION_SMALL,
    ),
    "8b": (
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        _VISION_LARGE,
    ),
}
VOCABULARY_SIZE = 151936
_CONTEXT = 32768


def build(shape: str, directory: Path, device: str, seed: int | None = None) -> None:
    """Writes model, tokenizer and processor files in bfloat16; with a seed, only the header of the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([*corpus(), *(20 * lesson_texts())], chat_template("qwen3_vl"))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device if seed is None else "meta"):
        model = Qwen3VLForConditionalGeneration(_config(shape, tokenizer))
    ends = [_id(tokenizer, token) for token in (IM_END, END_OF_TEXT)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    if seed is None:
        model.save_pretrained(directory)
    else:
        random_checkpoint.write_model(model, directory, "together", seed)
    save_processor("qwen3_vl", tokenizer, directory)


def _config(shape: str, tokenizer: PreTrainedTokenizerBase) -> Qwen3VLConfig:
    text, vision = SHAPES[shape]
    is_tied = shape != "8b"
    settings = {
        "vocab_size": VOCABULARY_SIZE,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": is_tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "bos_token_id": _id(tokenizer, END_OF_TEXT),
        "eos_token_id": _id(tokenizer, IM_END),
        "pad_token_id": _id(tokenizer, END_OF_TEXT),
        "dtype": torch.bfloat16,
    }
    tower = {
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
    }
    return Qwen3VLConfig(
        text_config=settings | text,
        vision_config=tower | vision,
        tie_word_embeddings=is_tied,
        image_token_id=_id(tokenizer, IMAGE_PAD),
        video_token_id=_id(tokenizer, VIDEO_PAD),
        vision_start_token_id=_id(tokenizer, VISION_START),
        vision_end_token_id=_id(tokenizer, VISION_END),
    )


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def main() -> None:
    """Writes one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, help="seed of weights that trainer and sampler draw")
    options = parser.parse_args()
    build(options.shape, options.directory, "cuda" if torch.cuda.is_available() else "cpu", options.seed)


if __name__ == "__main__":
    main()
