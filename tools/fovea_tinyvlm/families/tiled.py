"""Vision families that cut an image into tiles: InternVL, LLaVA-NeXT and -OneVision, Idefics 3, SmolVLM 2, LFM2-VL."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from transformers import (
    GotOcr2ImageProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerBase,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from fovea_tinyvlm.families.declaration import ChatWords, Family, TokenIds
from fovea_tinyvlm.families.text_models import (
    CHATML,
    HEAD_DIM,
    MISTRAL_CHAT,
    QWEN_TOKENS,
    SMALL_TOWER,
    language,
    mistral_language,
    qwen_language,
    rope,
)

TILE = 56
"""The side of a tile in pixels: 4 patches of 14."""

_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_CHATML_IMAGE = replace(CHATML, image="<image>")
_INTERNVL_CHAT = replace(CHATML, image="<IMG_CONTEXT>\n")
_IDEFICS_CHAT = ChatWords(
    start="<|begin_of_text|>", user="User:", assistant="Assistant:", end="<end_of_utterance>\n", image="<image>"
)
_LFM_CHAT = replace(_CHATML_IMAGE, start="<|startoftext|>")
_INTERNVL_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")
_IDEFICS_IMAGE = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
# Idefics 3 writes the positions of tiles as text, SmolVLM as added tokens.
_IDEFICS_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|eot_id|>", *_IDEFICS_IMAGE)
_SMOLVLM_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row, column in product(range(1, 7), repeat=2)),
    *_IDEFICS_IMAGE,
)
_LFM_TOKENS = (
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row, column in product(range(1, 11), repeat=2)),
)


def _internvl(ids: TokenIds) -> InternVLConfig:
    # 8B: Qwen3 of 36 layers; InternViT of 24 blocks with 1024 channels, biases, layer scales; 448 pixels become
    # 256 tokens.
    text = qwen_language(ids) | {"head_dim": HEAD_DIM, "rope_parameters": rope(1e6), "model_type": "qwen3"}
    vision = {"image_size": [TILE, TILE], "patch_size": [14, 14], "attention_bias": True}
    return InternVLConfig(
        text_config=text | {"tie_word_embeddings": False},
        vision_config=SMALL_TOWER | vision,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


def _internvl_processor(tokenizer: PreTrainedTokenizerBase) -> InternVLProcessor:
    size = {"height": TILE, "width": TILE}
    scale: dict[str, Any] = {"size": size, "image_mean": _IMAGENET_MEAN, "image_std": _IMAGENET_STD}
    image, video = GotOcr2ImageProcessor(**scale), InternVLVideoProcessor(**scale)
    return InternVLProcessor(image, tokenizer, video, image_seq_length=4, chat_template=tokenizer.chat_template)


_NEXT_PINPOINTS = [[TILE * rows, TILE * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]


def _llava_next(ids: TokenIds) -> LlavaNextConfig:
    # 1.6 with Mistral 7B v0.2: theta 1,000,000; CLIP of 24 blocks, with the output of the last but one without its
    # class token; 336 pixels are 24 x 24 tokens; two to four tiles, a learnt token after each row.
    text = mistral_language(ids) | {"rope_parameters": rope(1e6), "tie_word_embeddings": False}
    vision = {"model_type": "clip_vision_model", "image_size": TILE, "patch_size": 14, "projection_dim": 64}
    return LlavaNextConfig(
        text_config=text,
        vision_config=SMALL_TOWER | vision | {"num_hidden_layers": 3},
        image_token_index=ids["<image>"],
        image_grid_pinpoints=_NEXT_PINPOINTS,
        tie_word_embeddings=False,
    )


def _llava_next_processor(tokenizer: PreTrainedTokenizerBase) -> LlavaNextProcessor:
    crop = {"height": TILE, "width": TILE}
    return LlavaNextProcessor(
        LlavaNextImageProcessor(size={"shortest_edge": TILE}, crop_size=crop, image_grid_pinpoints=_NEXT_PINPOINTS),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )


_PINPOINTS = [[TILE * rows, TILE * columns] for rows, columns in product(range(1, 7), repeat=2)]


def _llava_onevision(ids: TokenIds) -> LlavaOnevisionConfig:
    # 7B: Qwen2; SigLIP of 26 blocks without its head, 384 pixels are 27 x 27 tokens; up to 6 x 6 tiles, pooled to the
    # area of 9, a learnt token after each row.
    text = qwen_language(ids) | {"rope_parameters": rope(1e6), "model_type": "qwen2", "tie_word_embeddings": False}
    vision = {"model_type": "siglip_vision_model", "image_size": TILE, "patch_size": 14, "vision_use_head": False}
    return LlavaOnevisionConfig(
        text_config=text,
        vision_config=SMALL_TOWER | vision,
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=_PINPOINTS,
        tie_word_embeddings=False,
    )


def _llava_onevision_processor(tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionProcessor:
    size = {"height": TILE, "width": TILE}
    return LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=_PINPOINTS),
        tokenizer,
        LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(TILE // 14) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )


def _idefics3(ids: TokenIds) -> Idefics3Config:
    # 8B: Llama 3; SigLIP of 27 blocks, 364 pixels are 169 tokens after a shuffle of 2 x 2; up to 4 x 4 tiles and a view
    # of the whole.
    return Idefics3Config(**_shuffled(ids, begin="<|begin_of_text|>", pad="<|finetune_right_pad_id|>", theta=5e5))


def _idefics3_processor(tokenizer: PreTrainedTokenizerBase) -> Idefics3Processor:
    image = Idefics3ImageProcessor(size={"longest_edge": 4 * TILE}, max_image_size={"longest_edge": TILE})
    return Idefics3Processor(image, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template)


def _smolvlm(ids: TokenIds) -> SmolVLMConfig:
    # 2.2B: SmolLM2 (Llama) of 24 layers; SigLIP of 27 blocks, 384 pixels are 81 tokens after a shuffle of 3 x 3.
    return SmolVLMConfig(**_shuffled(ids, begin="<|im_start|>", pad="<|im_end|>", theta=273_768.0))


def _shuffled(ids: TokenIds, *, begin: str, pad: str, theta: float) -> dict[str, Any]:
    """Returns the settings of a Llama with a SigLIP tower, of which 2 x 2 outputs are shuffled into one token."""
    text = language(ids, begin=begin, end="<end_of_utterance>", pad=pad)
    text |= {"model_type": "llama", "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "rope_parameters": rope(theta)}
    return {
        "text_config": text | {"tie_word_embeddings": False},
        "vision_config": SMALL_TOWER | {"image_size": TILE, "patch_size": 14},
        "image_token_id": ids["<image>"],
        "pad_token_id": ids[pad],
        "scale_factor": 2,
        "tie_word_embeddings": False,
    }


def _smolvlm_processor(tokenizer: PreTrainedTokenizerBase) -> SmolVLMProcessor:
    sizes: dict[str, Any] = {"size": {"longest_edge": 4 * TILE}, "max_image_size": {"longest_edge": TILE}}
    image, video = SmolVLMImageProcessor(**sizes), SmolVLMVideoProcessor(**sizes)
    return SmolVLMProcessor(image, tokenizer, video, image_seq_len=4, chat_template=tokenizer.chat_template)


def _lfm2_vl(ids: TokenIds) -> Lfm2VlConfig:
    # 450M: 16 layers, attention in 2, 5, 8, 10, 12 and 14, short convolutions of 3 in the others, MLPs of two thirds of
    # their stated width; SigLIP 2 of 12 blocks with ragged grids, shuffled 2 x 2 and normalised; tiles of 512 pixels.
    text = language(ids, begin="<|startoftext|>", end="<|im_end|>", pad="<|pad|>", layers=4)
    layers = ["conv", "conv", "full_attention", "conv"]
    text |= {"model_type": "lfm2", "layer_types": layers, "conv_L_cache": 3, "block_multiple_of": 64}
    vision = {"model_type": "siglip2_vision_model", "patch_size": 16, "num_patches": 256, "vision_use_head": False}
    return Lfm2VlConfig(
        text_config=text | {"rope_parameters": rope(1e6), "tie_word_embeddings": True},
        vision_config=SMALL_TOWER | vision,
        image_token_id=ids["<image>"],
        projector_hidden_size=128,
        projector_use_layernorm=True,
        downsample_factor=2,
        tie_word_embeddings=True,
    )


def _lfm2_vl_processor(tokenizer: PreTrainedTokenizerBase) -> Lfm2VlProcessor:
    limits = {"tile_size": 128, "min_image_tokens": 4, "max_image_tokens": 16}
    return Lfm2VlProcessor(Lfm2VlImageProcessor(**limits), tokenizer, chat_template=tokenizer.chat_template)


TILED = (
    Family(
        name="internvl",
        published="OpenGVLab/InternVL3_5-8B-HF",
        source="convert_internvl_weights_to_hf.py of huggingface/transformers; defaults of transformers 5.19",
        architecture=InternVLForConditionalGeneration,
        config=_internvl,
        processor=_internvl_processor,
        tokens=(*QWEN_TOKENS, *_INTERNVL_TOKENS, "<video>"),
        token_names={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        chat=_INTERNVL_CHAT,
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="llava_next",
        published="llava-hf/llava-v1.6-mistral-7b-hf",
        source="its config.json, quoted in public code; defaults of transformers 5.19",
        architecture=LlavaNextForConditionalGeneration,
        config=_llava_next,
        processor=_llava_next_processor,
        tokens=("<unk>", "<s>", "</s>", "<image>", "<pad>"),
        chat=replace(MISTRAL_CHAT, user="[INST] ", assistant=" [/INST]", image="<image>\n"),
        begin="<s>",
        end="</s>",
        pad="<pad>",
    ),
    Family(
        name="llava_onevision",
        published="llava-hf/llava-onevision-qwen2-7b-ov-hf",
        source="defaults of transformers 5.19, which are this checkpoint's",
        architecture=LlavaOnevisionForConditionalGeneration,
        config=_llava_onevision,
        processor=_llava_onevision_processor,
        tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
        chat=_CHATML_IMAGE,
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="idefics3",
        published="HuggingFaceM4/Idefics3-8B-Llama3",
        source="defaults of transformers 5.19",
        architecture=Idefics3ForConditionalGeneration,
        config=_idefics3,
        processor=_idefics3_processor,
        tokens=_IDEFICS_TOKENS,
        chat=_IDEFICS_CHAT,
        begin="<|begin_of_text|>",
        end="<end_of_utterance>",
        pad="<|finetune_right_pad_id|>",
    ),
    Family(
        name="smolvlm",
        published="HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        source="its text_config, and config.json with the added tokens of the 500M one, both quoted in public code",
        architecture=SmolVLMForConditionalGeneration,
        config=_smolvlm,
        processor=_smolvlm_processor,
        tokens=_SMOLVLM_TOKENS,
        token_names={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        chat=replace(_IDEFICS_CHAT, start="<|im_start|>"),
        end="<end_of_utterance>",
        pad="<|im_end|>",
    ),
    Family(
        name="lfm2_vl",
        published="LiquidAI/LFM2-VL-450M",
        source="its config.json, preprocessor_config.json and modeling_lfm2_vl.py in copies of the checkpoint",
        architecture=Lfm2VlForConditionalGeneration,
        config=_lfm2_vl,
        processor=_lfm2_vl_processor,
        tokens=_LFM_TOKENS,
        token_names={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        chat=_LFM_CHAT,
        begin="<|startoftext|>",
        end="<|im_end|>",
        pad="<|pad|>",
    ),
)
