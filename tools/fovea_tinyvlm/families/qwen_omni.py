"""Qwen3-Omni: a thinker with the tower and the experts of Qwen3-VL, and an audio tower, which Fovea does not train."""

from __future__ import annotations

from dataclasses import replace

from transformers import (
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeProcessor,
    WhisperFeatureExtractor,
)

from fovea_tinyvlm.families.declaration import Family, TokenIds
from fovea_tinyvlm.families.qwen_likes import QWEN3_TOWER
from fovea_tinyvlm.families.text_models import CHATML, EXPERTS, HEAD_DIM, HIDDEN_SIZE, QWEN_TOKENS, qwen_language, rope

_AUDIO_TOKENS = (
    *("<|audio_start|>", "<|audio_end|>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
    "<|audio_pad|>",
)
_MEL_BINS = 128


def _config(ids: TokenIds) -> Qwen3OmniMoeConfig:
    # 30B-A3B: the language model of Qwen3-30B-A3B with theta 1,000,000 and sections [24, 20, 20] of 64 frequencies;
    # the tower of Qwen3-VL; an audio tower of 32 layers with 1,280 channels. Thinking has no talker. The entries of
    # `vision` are in published files, and vLLM reads them.
    rotary = rope(1e6, mrope_section=[6, 5, 5], mrope_interleaved=True, interleaved=True)
    sparse = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    text = {"head_dim": HEAD_DIM, "rope_parameters": rotary, "tie_word_embeddings": False}
    audio = {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
    vision = {"image_size": 256, "apply_vit_abs_pos_embed": True}
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "audio_token_id": "<|audio_pad|>"}
    edges = {"audio_start_token_id": "<|audio_start|>", "audio_end_token_id": "<|audio_end|>"}
    edges |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    thinker = {
        "text_config": qwen_language(ids) | sparse | text,
        "vision_config": QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]} | vision,
        "audio_config": audio | {"output_dim": HIDDEN_SIZE, "downsample_hidden_size": 16, "num_mel_bins": _MEL_BINS},
        "tie_word_embeddings": False,
        "position_id_per_seconds": 13,
        **{key: ids[token] for key, token in (names | edges).items()},
    }
    return Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)


def _processor(tokenizer: PreTrainedTokenizerBase) -> Qwen3OmniMoeProcessor:
    half = [0.5, 0.5, 0.5]
    size = {"shortest_edge": 3_136, "longest_edge": 12_845_056}
    image = Qwen2VLImageProcessor(size=size, image_mean=half, image_std=half, patch_size=16)
    video = Qwen2VLVideoProcessor(size=size, image_mean=half, image_std=half, patch_size=16)
    audio = WhisperFeatureExtractor(feature_size=_MEL_BINS)
    return Qwen3OmniMoeProcessor(image, video, audio, tokenizer, chat_template=tokenizer.chat_template)


QWEN_OMNI = (
    Family(
        name="qwen3_omni_moe",
        published="Qwen/Qwen3-Omni-30B-A3B-Thinking",
        source="its config.json, quoted in public code; towers by the defaults of transformers 5.19",
        architecture=Qwen3OmniMoeForConditionalGeneration,
        config=_config,
        processor=_processor,
        tokens=(*QWEN_TOKENS, *_AUDIO_TOKENS),
        plain_tokens=("<think>", "</think>"),
        token_names={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        chat=replace(CHATML, image="<|vision_start|><|image_pad|><|vision_end|>"),
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
)
