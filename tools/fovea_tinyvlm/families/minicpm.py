"""MiniCPM-V 4.6: Qwen3.5's language model, and a tower that merges patches between its layers and after them."""

from __future__ import annotations

from dataclasses import replace

from transformers import (
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
    PreTrainedTokenizerBase,
)

from fovea_tinyvlm.families.declaration import Family, TokenIds
from fovea_tinyvlm.families.qwen_likes import qwen3_5_language
from fovea_tinyvlm.families.text_models import CHATML, QWEN_TOKENS, rope

_TOKENS = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
_PLACEHOLDERS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


def _config(ids: TokenIds) -> MiniCPMV4_6Config:
    # 24 layers in Qwen3.5's pattern, 8 heads of 256 for 2, unembedding tied; a tower of 27 blocks with 1,152 channels
    # and 70 x 70 positions, of which the 7th is followed by the first merger; slices of about 448 x 448 pixels.
    text = qwen3_5_language(ids) | {"rope_parameters": rope(1e7, partial_rotary_factor=0.25)}
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    return MiniCPMV4_6Config(
        text_config=text | {"model_type": "qwen3_5_text", "tie_word_embeddings": True},
        vision_config=tower | {"image_size": 140, "patch_size": 14},
        insert_layer_id=1,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        drop_vision_last_layer=False,
        tie_word_embeddings=True,
    )


def _processor(tokenizer: PreTrainedTokenizerBase) -> MiniCPMV4_6Processor:
    image, video = MiniCPMV4_6ImageProcessor(scale_resolution=112), MiniCPMV4_6VideoProcessor(scale_resolution=112)
    return MiniCPMV4_6Processor(image, video, tokenizer, chat_template=tokenizer.chat_template)


MINICPM = Family(
    name="minicpmv4_6",
    published="openbmb/MiniCPM-V-4.6",
    source="its config.json, quoted in public code; defaults of transformers 5.19",
    architecture=MiniCPMV4_6ForConditionalGeneration,
    config=_config,
    processor=_processor,
    tokens=(*QWEN_TOKENS, *_TOKENS.values()),
    plain_tokens=("<think>", "</think>"),
    token_names=_TOKENS | _PLACEHOLDERS,
    chat=replace(CHATML, image="<|image_pad|>"),
    end="<|im_end|>",
    pad="<|endoftext|>",
)
