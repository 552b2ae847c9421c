"""Vision families that process an image as a whole: Gemma 3 and 4, Mistral 3, Pixtral."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerBase,
)

from fovea_tinyvlm.families.declaration import ChatWords, Family, TokenIds
from fovea_tinyvlm.families.text_models import (
    EXPERTS,
    GEMMA_CHAT,
    GEMMA_NEWLINES,
    GEMMA_TOKENS,
    HEAD_DIM,
    MISTRAL_CHAT,
    MISTRAL_TOKENS,
    SMALL_TOWER,
    gemma3_language,
    language,
    mistral_language,
    rope,
)

_GEMMA3_CHAT = replace(GEMMA_CHAT, image="<start_of_image>")
_GEMMA4_CHAT = ChatWords(
    start="<bos>", user="<|turn>user\n", assistant="<|turn>model\n", end="<turn|>\n", image="<|image|>"
)
_MISTRAL_IMAGE_CHAT = replace(MISTRAL_CHAT, image="[IMG]")
_GEMMA4_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<|image|>",
    "<image|>",
    "<|audio>",
    "<|audio|>",
    "<audio|>",
    "<|video|>",
)
_PIXTRAL_TOKENS = (*MISTRAL_TOKENS, "[IMG]", "[IMG_BREAK]", "[IMG_END]")


def _gemma3(ids: TokenIds) -> Gemma3Config:
    # 4B: SigLIP of 27 blocks without its head, 896 pixels are 64 x 64 patches, averaged 4 x 4 to 256 tokens. Here the
    # same averaging leaves 4 x 4.
    return Gemma3Config(
        text_config=gemma3_language(ids),
        vision_config=SMALL_TOWER | {"image_size": 224, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=16,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
        tie_word_embeddings=True,
    )


def _gemma3_processor(tokenizer: PreTrainedTokenizerBase) -> Gemma3Processor:
    image = Gemma3ImageProcessor(size={"height": 224, "width": 224})
    return Gemma3Processor(image, tokenizer, image_seq_length=16, chat_template=tokenizer.chat_template)


def _gemma4(ids: TokenIds, text: dict[str, Any], vision: dict[str, Any]) -> Gemma4Config:
    # No audio tower: Fovea takes text and images.
    both = {
        "sliding_attention": rope(1e4),
        "full_attention": rope(1e6, rope_type="proportional", partial_rotary_factor=0.25),
    }
    shared = {
        "head_dim": HEAD_DIM,
        "global_head_dim": 2 * HEAD_DIM,  # 256 and 512 published
        "sliding_window": 96,  # 512 and 1024 published: an image of 70 or 280 tokens fits
        "pad_token_id": 0,  # as published; transformers looks it up at the positions of images
        "final_logit_softcapping": 30.0,
        "rope_parameters": both,
        "tie_word_embeddings": True,
    }
    tower = SMALL_TOWER | {
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "pooling_kernel_size": 3,
        "position_embedding_size": 1024,
        "default_output_length": 70,  # in published files, and vLLM reads it; transformers does not
    }
    layer_count = len(text["layer_types"])
    base = language(ids, begin="<bos>", end="<turn|>", pad="<pad>", layers=layer_count)
    return Gemma4Config(
        text_config=base | shared | {"vocab_size_per_layer_input": base["vocab_size"]} | text,
        vision_config=tower | vision,
        audio_config=None,
        boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"],
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        boa_token_id=ids["<|audio>"],
        eoa_token_index=ids["<audio|>"],
        audio_token_id=ids["<|audio|>"],
        vision_soft_tokens_per_image=70,
        tie_word_embeddings=True,
    )


def _gemma4_e2b(ids: TokenIds) -> Gemma4Config:
    # 35 layers of which 20 take keys and values of an earlier one and have an MLP twice as wide; one head of keys; an
    # embedding per layer of 256 channels; clipped linears in the tower.
    layers = 2 * (2 * ["sliding_attention"] + ["full_attention"])
    text = {"layer_types": layers, "num_key_value_heads": 1, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
    return _gemma4(ids, text | {"hidden_size_per_layer_input": 16}, {"use_clipped_linears": True})


_GEMMA4_LARGE = {
    "layer_types": 5 * ["sliding_attention"] + ["full_attention"],
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
}


def _gemma4_31b(ids: TokenIds) -> Gemma4Config:
    # 60 layers, five with a window and one without; its keys are its values; image tokens attend in both directions.
    return _gemma4(ids, _GEMMA4_LARGE, {"standardize": True})


def _gemma4_26b(ids: TokenIds) -> Gemma4Config:
    # 30 layers like those of 31B, each with an MLP of 2,112 channels and 128 experts of 704, of which a token uses 8.
    sizes = {key: EXPERTS[key] for key in ("num_experts", "moe_intermediate_size")}
    sparse = {"enable_moe_block": True, "top_k_experts": EXPERTS["num_experts_per_tok"], **sizes}
    return _gemma4(ids, _GEMMA4_LARGE | sparse, {"standardize": True})


def _gemma4_processor(tokenizer: PreTrainedTokenizerBase) -> Gemma4Processor:
    # 280 tokens published; 70 is the least that the processor supports.
    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(max_soft_tokens=70),
        tokenizer,
        Gemma4VideoProcessor(),
        image_seq_length=70,
        chat_template=tokenizer.chat_template,
    )


def _pixtral_tower(side: int, patch: int) -> dict[str, Any]:
    return SMALL_TOWER | {"model_type": "pixtral", "image_size": side, "patch_size": patch, "hidden_act": "silu"}


def _mistral3(ids: TokenIds) -> Mistral3Config:
    # Small 3.1: Mistral of 40 layers, theta 1e9; Pixtral's tower of 24 blocks up to 1540 pixels, merged 2 x 2.
    text = mistral_language(ids) | {"rope_parameters": rope(1e9), "tie_word_embeddings": False}
    return Mistral3Config(
        text_config=text,
        vision_config=_pixtral_tower(280, 14),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


def _pixtral(ids: TokenIds) -> LlavaConfig:
    # 12B in the HF format: LLaVA with Mistral NeMo (theta 1e6) and a tower of 24 blocks up to 1024 pixels.
    text = mistral_language(ids) | {"rope_parameters": rope(1e6), "tie_word_embeddings": False}
    return LlavaConfig(
        text_config=text,
        vision_config=_pixtral_tower(256, 16),
        image_token_index=ids["[IMG]"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=1,
        tie_word_embeddings=False,
    )


def _mistral3_processor(tokenizer: PreTrainedTokenizerBase) -> PixtralProcessor:
    image = PixtralImageProcessor(size={"longest_edge": 280}, patch_size={"height": 14, "width": 14})
    return PixtralProcessor(
        image, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=tokenizer.chat_template
    )


def _pixtral_processor(tokenizer: PreTrainedTokenizerBase) -> PixtralProcessor:
    image = PixtralImageProcessor(size={"longest_edge": 256}, patch_size={"height": 16, "width": 16})
    return PixtralProcessor(image, tokenizer, patch_size=16, chat_template=tokenizer.chat_template)


def _gemma4_family(name: str, published: str, config: Any) -> Family:
    return Family(
        name=name,
        published=published,
        source="convert_gemma4_weights.py of huggingface/transformers",
        architecture=Gemma4ForConditionalGeneration,
        config=config,
        processor=_gemma4_processor,
        tokens=_GEMMA4_TOKENS,
        plain_tokens=GEMMA_NEWLINES,
        token_names={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        chat=_GEMMA4_CHAT,
        begin="<bos>",
        end="<turn|>",
        pad="<pad>",
    )


WHOLE_IMAGES = (
    Family(
        name="gemma3",
        published="google/gemma-3-4b-it",
        source="defaults of transformers 5.19",
        architecture=Gemma3ForConditionalGeneration,
        config=_gemma3,
        processor=_gemma3_processor,
        tokens=(*GEMMA_TOKENS, "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        plain_tokens=GEMMA_NEWLINES,
        token_names={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        chat=_GEMMA3_CHAT,
        begin="<bos>",
        end="<end_of_turn>",
        pad="<pad>",
    ),
    _gemma4_family("gemma4_e2b", "google/gemma-4-E2B-it", _gemma4_e2b),
    _gemma4_family("gemma4_31b", "google/gemma-4-31B-it", _gemma4_31b),
    replace(_gemma4_family("gemma4_26b", "google/gemma-4-26B-A4B-it", _gemma4_26b), experts="together"),
    Family(
        name="mistral3",
        published="mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        source="defaults of transformers 5.19, which are this checkpoint's",
        architecture=Mistral3ForConditionalGeneration,
        config=_mistral3,
        processor=_mistral3_processor,
        tokens=_PIXTRAL_TOKENS,
        chat=_MISTRAL_IMAGE_CHAT,
        begin="<s>",
        end="</s>",
        pad="<pad>",
    ),
    Family(
        name="pixtral",
        published="mistral-community/pixtral-12b",
        source="defaults of transformers 5.19",
        architecture=LlavaForConditionalGeneration,
        config=_pixtral,
        processor=_pixtral_processor,
        tokens=_PIXTRAL_TOKENS,
        chat=_MISTRAL_IMAGE_CHAT,
        begin="<s>",
        end="</s>",
        pad="<pad>",
    ),
)
