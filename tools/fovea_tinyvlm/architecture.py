"""The configurations of the three tiny models, and their random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from fovea_tinyvlm.recipe import Kind
from fovea_tinyvlm.special_tokens import END_OF_TEXT, IM_END, IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START
from fovea_tinyvlm.tokenizer import MAX_LENGTH, VOCABULARY_SIZE

# 32 is the smallest head size for which vLLM's CPU attention has a kernel.
HEAD_DIM = 32
HIDDEN_SIZE = 128
VISION_HIDDEN_SIZE = 64
GRID_SIDE = 16
"""The number of patches along a side of a 256x256 image, the smallest square that the processor returns."""


def random_model(kind: Kind, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Returns a model with random float32 weights of realistic scale, drawn from torch's global generator."""
    if kind == "qwen3_vl":
        model: PreTrainedModel = _qwen3_vl(tokenizer)
    elif kind == "qwen2_5_vl":
        model = _qwen2_5_vl(tokenizer)
    else:
        model = _qwen3(tokenizer)
    _randomize(model)
    if isinstance(model, Qwen3VLForConditionalGeneration):
        _place_positions(model)
    return model


@torch.no_grad()
def _place_positions(model: Qwen3VLForConditionalGeneration) -> None:
    # The position embedding starts as sines and cosines of row and column (the fixed embedding of Vaswani et al. 2017,
    # in two dimensions). Neighbours then start similar, and the model need not learn attention to positions from noise.
    table = model.model.visual.pos_embed.weight
    quarter = table.shape[1] // 4
    frequencies = torch.pi / GRID_SIDE * torch.logspace(0.0, 3.0, quarter, base=2.0)
    angles = torch.arange(GRID_SIDE)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = waves[:, None].expand(-1, GRID_SIDE, -1)
    columns = waves[None].expand(GRID_SIDE, -1, -1)
    table.copy_(torch.cat([rows, columns], dim=-1).reshape(GRID_SIDE**2, -1))


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    # transformers draws every matrix with a deviation of 0.02, which suits thousands of channels. With 64 or 128
    # channels the layers would have almost no effect. Biases and norms get noise, so that a test detects an omitted
    # one.
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            is_table = "embed_tokens" in name or "pos_embed" in name
            fan_in = parameter.shape[1] if is_table else parameter[0].numel()
            parameter.normal_(std=fan_in**-0.5)
        elif name.endswith("norm.weight") or (".norm" in name and name.endswith("weight")) or "ln_q" in name:
            parameter.normal_(mean=1.0, std=0.02)
        else:
            parameter.normal_(std=0.02)
    for name, parameter in model.named_parameters():
        # Two such matrices per layer add to the residual stream, of which the scale should not grow with the depth.
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")):
            parameter.mul_(0.5)


def _qwen3(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **_language_settings(),
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        **_token_ids(tokenizer),
    )
    return Qwen3ForCausalLM(config)


def _qwen3_vl(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(
        text_config=_language_settings()
        | {
            "head_dim": HEAD_DIM,
            "rope_parameters": {
                "rope_type": "default",
                # With the 5,000,000 of a full-size model, half of these few frequencies would have no effect.
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        }
        | _token_ids(tokenizer),
        vision_config={
            "depth": 2,
            "hidden_size": VISION_HIDDEN_SIZE,
            "intermediate_size": 2 * VISION_HIDDEN_SIZE,
            "num_heads": 2,
            "out_hidden_size": HIDDEN_SIZE,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": GRID_SIDE**2,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings=True,
        **_vision_token_ids(tokenizer),
    )
    return Qwen3VLForConditionalGeneration(config)


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(
        text_config=_language_settings()
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]}}
        | {"tie_word_embeddings": True}
        | _token_ids(tokenizer),
        vision_config={
            "depth": 3,
            "hidden_size": VISION_HIDDEN_SIZE,
            "intermediate_size": 2 * VISION_HIDDEN_SIZE,
            "num_heads": 2,
            "out_hidden_size": HIDDEN_SIZE,
            "patch_size": 14,
            "spatial_patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=True,
        **_vision_token_ids(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _language_settings() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 3 * HIDDEN_SIZE,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "dtype": torch.float32,
    }


def _token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {
        "bos_token_id": _token_id(tokenizer, END_OF_TEXT),
        "eos_token_id": _token_id(tokenizer, IM_END),
        "pad_token_id": _token_id(tokenizer, END_OF_TEXT),
    }


def _vision_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {
        "image_token_id": _token_id(tokenizer, IMAGE_PAD),
        "video_token_id": _token_id(tokenizer, VIDEO_PAD),
        "vision_start_token_id": _token_id(tokenizer, VISION_START),
        "vision_end_token_id": _token_id(tokenizer, VISION_END),
    }


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id
