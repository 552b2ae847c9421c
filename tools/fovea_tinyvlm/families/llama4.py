"""Llama 4: Scout with its tower, and the language model of Maverick."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import (
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4ImageProcessor,
    Llama4Processor,
    Llama4TextConfig,
    PreTrainedTokenizerBase,
)

from fovea_tinyvlm.families.declaration import ChatWords, Family, TokenIds
from fovea_tinyvlm.families.text_models import EXPERTS, HEAD_DIM, language, rope

_TILE = 56
"""The side of a tile in pixels: 4 patches of 14, of which 2 x 2 are shuffled into one token."""

_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eom|>",
    "<|eot|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|finetune_right_pad|>",
)
_IMAGE_TOKENS = (
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
)
_CHAT = ChatWords(
    start="<|begin_of_text|>",
    user="<|header_start|>user<|header_end|>\n\n",
    assistant="<|header_start|>assistant<|header_end|>\n\n",
    end="<|eot|>",
)


def _text(ids: TokenIds) -> dict[str, Any]:
    """Returns the settings that both share: three layers in chunks, one without positions that sees all tokens."""
    settings = language(ids, begin="<|begin_of_text|>", end="<|eot|>", pad="<|finetune_right_pad|>", layers=4)
    return settings | {
        "head_dim": HEAD_DIM,
        "num_local_experts": EXPERTS["num_experts"],
        "num_experts_per_tok": 1,
        "intermediate_size": EXPERTS["moe_intermediate_size"],  # of an expert and of the shared one
        "intermediate_size_mlp": settings["intermediate_size"],  # of a dense layer
        "attention_chunk_size": 32,  # 8192 published; vLLM's blocks of 32 tokens must divide it
        "floor_scale": 24,  # 8192 published
        "tie_word_embeddings": False,
    }


def _llama4(ids: TokenIds) -> Llama4Config:
    # Scout: 48 layers of 40 heads of 128 for 8, all with 16 experts of 8,192 channels, queries and keys normalised;
    # a tower of 34 blocks, 336 pixels are 144 tokens after a shuffle of 2 x 2; up to 16 tiles and a view of the whole.
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rotary = rope(5e5, rope_type="llama3", original_max_position_embeddings=512, **scaling)
    tower = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    places = {"image_size": _TILE, "patch_size": 14, "rope_parameters": rope(1e4)}
    sizes = {"projector_input_dim": 96, "projector_output_dim": 96, "vision_output_dim": 96}
    return Llama4Config(
        text_config=_text(ids) | {"rope_parameters": rotary},
        vision_config=tower | places | sizes,
        boi_token_index=ids["<|image_start|>"],
        eoi_token_index=ids["<|image_end|>"],
        image_token_index=ids["<|patch|>"],
    )


def _llama4_text(ids: TokenIds) -> Llama4TextConfig:
    # Maverick: 48 layers, every second one with 128 experts; no scaling, queries and keys as they are.
    return Llama4TextConfig(**_text(ids), rope_parameters=rope(5e5), interleave_moe_layer_step=2, use_qk_norm=False)


def _processor(tokenizer: PreTrainedTokenizerBase) -> Llama4Processor:
    image = Llama4ImageProcessor(size={"height": _TILE, "width": _TILE}, max_patches=4)
    return Llama4Processor(image, tokenizer, patch_size=14, chat_template=tokenizer.chat_template)


LLAMA4 = (
    Family(
        name="llama4",
        published="meta-llama/Llama-4-Scout-17B-16E-Instruct",
        source="defaults of transformers 5.19",
        architecture=Llama4ForConditionalGeneration,
        config=_llama4,
        processor=_processor,
        tokens=(*_TOKENS, *_IMAGE_TOKENS),
        chat=replace(_CHAT, image="<|image|>"),
        begin="<|begin_of_text|>",
        end="<|eot|>",
        pad="<|finetune_right_pad|>",
    ),
    Family(
        name="llama4_text",
        published="meta-llama/Llama-4-Maverick-17B-128E-Instruct without its tower",
        source="convert_llama4_weights_to_hf.py of huggingface/transformers; defaults of transformers 5.19",
        architecture=Llama4ForCausalLM,
        config=_llama4_text,
        tokens=_TOKENS,
        chat=_CHAT,
        begin="<|begin_of_text|>",
        end="<|eot|>",
        pad="<|finetune_right_pad|>",
    ),
)
