"""Vision families with Qwen2-VL's patches and positions: Qwen2-VL, Qwen3-VL and Qwen3.5, GLM-4.1V and 4.6V."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
    PreTrainedTokenizerBase,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from fovea_tinyvlm.families.declaration import ChatWords, Family, TokenIds
from fovea_tinyvlm.families.text_models import (
    CHATML,
    EXPERTS,
    HEAD_DIM,
    HIDDEN_SIZE,
    QWEN_TOKENS,
    language,
    qwen_language,
    rope,
)

_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_CHAT = replace(CHATML, image=_QWEN_IMAGE)
_GLM_CHAT = ChatWords(
    start="[gMASK]<sop>",
    user="<|user|>\n",
    assistant="<|assistant|>\n",
    end="",
    image="<|begin_of_image|><|image|><|end_of_image|>",
)
_GLM_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)


def _qwen_vision_ids(ids: TokenIds) -> dict[str, int]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    edges = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: ids[token] for key, token in (names | edges).items()}


def _qwen2_vl(ids: TokenIds) -> Qwen2VLConfig:
    # 2B: 28 layers, sections [16, 24, 24] of 64 frequencies; tower of 32 blocks, 1280 channels, MLP of 4 times that.
    rotary = rope(1e6, mrope_section=[4, 6, 6])
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": HIDDEN_SIZE, "num_heads": 2, "mlp_ratio": 4}
    return Qwen2VLConfig(
        text_config=qwen_language(ids) | {"rope_parameters": rotary, "tie_word_embeddings": True},
        vision_config=vision | {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
        tie_word_embeddings=True,
        **_qwen_vision_ids(ids),
    )


def _qwen2_vl_processor(tokenizer: PreTrainedTokenizerBase) -> Qwen2VLProcessor:
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}
    image, video = Qwen2VLImageProcessor(size=size), Qwen2VLVideoProcessor(size=size)
    return Qwen2VLProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


# The settings that Qwen3-VL's and Qwen3.5's towers share: 27 blocks of 1152 channels, positions of a 48 x 48 grid.
QWEN3_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": HIDDEN_SIZE,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 256,
}


def _qwen3_vl_moe(ids: TokenIds) -> Qwen3VLMoeConfig:
    # 30B-A3B: the language model of Qwen3-30B-A3B with theta 5,000,000 and sections [24, 20, 20] of 64 frequencies;
    # features of blocks 8, 16 and 24 of the tower go into the first three layers.
    rotary = rope(5e6, mrope_section=[6, 5, 5], mrope_interleaved=True)
    sparse = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    text = {"head_dim": HEAD_DIM, "rope_parameters": rotary, "tie_word_embeddings": False}
    return Qwen3VLMoeConfig(
        text_config=qwen_language(ids) | sparse | text,
        vision_config=QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=False,
        **_qwen_vision_ids(ids),
    )


def qwen3_5_language(ids: TokenIds) -> dict[str, Any]:
    # 9B: 32 layers, every fourth with attention (16 heads of 256 for 4, gated, a quarter of them rotary), the others
    # gated delta nets with 16 heads of 128 for keys and 32 for values; sections [11, 11, 10] of 32 frequencies.
    rotary = rope(1e7, mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)
    delta_net = {
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
    }
    layers = 3 * ["linear_attention"] + ["full_attention"]
    text = {"head_dim": HEAD_DIM, "layer_types": layers, "rope_parameters": rotary, "tie_word_embeddings": False}
    return qwen_language(ids, layers=4) | text | delta_net


def _qwen3_5_text(ids: TokenIds) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**qwen3_5_language(ids))


def _qwen3_5(ids: TokenIds) -> Qwen3_5Config:
    return Qwen3_5Config(
        text_config=qwen3_5_language(ids),
        vision_config=QWEN3_TOWER,
        tie_word_embeddings=False,
        **_qwen_vision_ids(ids),
    )


def _qwen3_5_moe(ids: TokenIds) -> Qwen3_5MoeConfig:
    # 35B-A3B: 40 layers in the pattern of 9B, each with 256 experts of 512 channels, of which a token takes 8, and one
    # of 512 that all tokens take through a gate.
    shared = {"shared_expert_intermediate_size": EXPERTS["moe_intermediate_size"]}
    return Qwen3_5MoeConfig(
        text_config=qwen3_5_language(ids) | EXPERTS | shared,
        vision_config=QWEN3_TOWER,
        tie_word_embeddings=False,
        **_qwen_vision_ids(ids),
    )


def _qwen3_next(ids: TokenIds) -> Qwen3NextConfig:
    # 80B-A3B: 48 layers in Qwen3.5's pattern, each with 512 experts of 512 channels, of which a token uses 10, and one
    # of 512 that all tokens use through a gate; no sections of positions.
    shared = {"shared_expert_intermediate_size": EXPERTS["moe_intermediate_size"], "norm_topk_prob": True}
    text = qwen3_5_language(ids) | {"rope_parameters": rope(1e7, partial_rotary_factor=0.25)}
    return Qwen3NextConfig(**text | EXPERTS | shared)


def _qwen3_processor(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLProcessor:
    half = [0.5, 0.5, 0.5]
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    image = Qwen2VLImageProcessor(size=size, image_mean=half, image_std=half, patch_size=16)
    video = Qwen3VLVideoProcessor(size={"shortest_edge": 4_096, "longest_edge": 25_165_824})
    return Qwen3VLProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


def _glm_parts(ids: TokenIds, **text: Any) -> dict[str, Any]:
    """Returns the settings of a GLM with images around the language model with the settings `text`."""
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": HIDDEN_SIZE}
    edges = {"begin": "start", "end": "end"}
    spans = {
        f"{kind}_{edge}_token_id": f"<|{token}_of_{kind}|>"
        for kind in ("image", "video")
        for token, edge in edges.items()
    }
    rotary = rope(1e4, mrope_section=[2, 3, 3], partial_rotary_factor=0.5)
    base = language(ids, begin=None, end="<|endoftext|>", pad="<|endoftext|>") | {"rms_norm_eps": 1e-5}
    return {
        "text_config": base | {"rope_parameters": rotary, "tie_word_embeddings": False, "attention_bias": True} | text,
        "vision_config": vision | {"image_size": 336, "patch_size": 14},
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "tie_word_embeddings": False,
        **{key: ids[token] for key, token in spans.items()},
    }


def _glm4v(ids: TokenIds) -> Glm4vConfig:
    # 9B: 40 layers, 32 heads of 128 for 2, half of each rotary, sections [8, 12, 12], norms around both halves; tower
    # of 24 blocks, 1536 channels; its learnt positions of a 24 x 24 grid are interpolated. The entry attention_bias is
    # in published files, and vLLM reads it; transformers has the biases whatever it says.
    return Glm4vConfig(**_glm_parts(ids))


_GLM_MIXTURE = {
    "n_routed_experts": EXPERTS["num_experts"],
    "num_experts_per_tok": EXPERTS["num_experts_per_tok"],
    "moe_intermediate_size": EXPERTS["moe_intermediate_size"],
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}


def _glm4_moe(ids: TokenIds) -> Glm4MoeConfig:
    # 355B-A32B: 92 layers, the first three dense, 160 experts of 1,536 channels, of which a token uses 8, weighted by
    # 2.5 times their sigmoids, and one that all tokens use; 96 heads of 128 for 8, half of each rotary, with norms.
    text = language(ids, begin=None, end="<|endoftext|>", pad="<|endoftext|>") | {"rms_norm_eps": 1e-5}
    attention = {"head_dim": HEAD_DIM, "attention_bias": True, "use_qk_norm": True}
    rotary = rope(1e6, partial_rotary_factor=0.5)
    sparse = _GLM_MIXTURE | {"routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}
    return Glm4MoeConfig(**text | attention | sparse, rope_parameters=rotary, tie_word_embeddings=False)


def _glm4v_moe(ids: TokenIds) -> Glm4vMoeConfig:
    # 106B-A12B: the language model of GLM-4.5-Air, 46 layers, the first dense, without norms of queries and keys; the
    # tower of GLM-4.1V. The entries head_dim and use_qk_norm are in published files, and vLLM reads them.
    own = {"head_dim": HEAD_DIM, "use_qk_norm": False, "routed_scaling_factor": 1.0}
    return Glm4vMoeConfig(**_glm_parts(ids, **_GLM_MIXTURE, **own))


def _glm4v_processor(tokenizer: PreTrainedTokenizerBase) -> Glm4vProcessor:
    image, video = Glm4vImageProcessor(), Glm4vVideoProcessor()
    return Glm4vProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


def _glm46v_processor(tokenizer: PreTrainedTokenizerBase) -> Glm46VProcessor:
    image, video = Glm46VImageProcessor(), Glm46VVideoProcessor()
    return Glm46VProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


_GLM4V = Family(
    name="glm4v",
    published="zai-org/GLM-4.1V-9B-Thinking",
    source="defaults of transformers 5.19, which are this checkpoint's, and its convert_glm4v_mgt_weights_to_hf.py",
    architecture=Glm4vForConditionalGeneration,
    config=_glm4v,
    processor=_glm4v_processor,
    tokens=_GLM_TOKENS,
    plain_tokens=("<think>", "</think>", "<answer>", "</answer>"),
    chat=_GLM_CHAT,
    end="<|endoftext|>",
    pad="<|endoftext|>",
)

QWEN_LIKES = (
    Family(
        name="glm4_moe",
        published="zai-org/GLM-4.5",
        source="its config.json, quoted in public code",
        architecture=Glm4MoeForCausalLM,
        config=_glm4_moe,
        tokens=_GLM_TOKENS,
        plain_tokens=("<think>", "</think>"),
        chat=replace(_GLM_CHAT, image=""),
        end="<|endoftext|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen2_vl",
        published="Qwen/Qwen2-VL-2B-Instruct",
        source="docs of transformers 5.19",
        architecture=Qwen2VLForConditionalGeneration,
        config=_qwen2_vl,
        processor=_qwen2_vl_processor,
        tokens=QWEN_TOKENS,
        chat=_QWEN_CHAT,
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen3_5",
        published="Qwen/Qwen3.5-9B",
        source="its config.json, quoted in public tests of loaders; tower by the defaults of transformers 5.19",
        architecture=Qwen3_5ForConditionalGeneration,
        config=_qwen3_5,
        processor=_qwen3_processor,
        tokens=QWEN_TOKENS,
        plain_tokens=("<think>", "</think>"),
        chat=_QWEN_CHAT,
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen3_5_text",
        published="Qwen/Qwen3.5-9B without its tower",
        source="as qwen3_5",
        architecture=Qwen3_5ForCausalLM,
        config=_qwen3_5_text,
        tokens=QWEN_TOKENS,
        plain_tokens=("<think>", "</think>"),
        chat=CHATML,
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen3_next",
        published="Qwen/Qwen3-Next-80B-A3B-Instruct",
        source="defaults of transformers 5.19, which are this checkpoint's",
        architecture=Qwen3NextForCausalLM,
        config=_qwen3_next,
        tokens=QWEN_TOKENS,
        plain_tokens=("<think>", "</think>"),
        chat=CHATML,
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen3_vl_moe",
        published="Qwen/Qwen3-VL-30B-A3B-Instruct",
        source="its config.json, quoted in public code; tower by the defaults of transformers 5.19",
        architecture=Qwen3VLMoeForConditionalGeneration,
        config=_qwen3_vl_moe,
        processor=_qwen3_processor,
        tokens=QWEN_TOKENS,
        chat=_QWEN_CHAT,
        end="<|im_end|>",
        pad="<|endoftext|>",
        experts="together, transposed",
    ),
    Family(
        name="qwen3_5_moe",
        published="Qwen/Qwen3.5-35B-A3B",
        source="defaults of transformers 5.19, which are this checkpoint's",
        architecture=Qwen3_5MoeForConditionalGeneration,
        config=_qwen3_5_moe,
        processor=_qwen3_processor,
        tokens=QWEN_TOKENS,
        plain_tokens=("<think>", "</think>"),
        chat=_QWEN_CHAT,
        end="<|im_end|>",
        pad="<|endoftext|>",
        experts="together",
    ),
    _GLM4V,
    # The same model with a processor of its own; transformers' Glm46VForConditionalGeneration, which vLLM has not, is
    # no published checkpoint's.
    replace(_GLM4V, name="glm46v", published="zai-org/GLM-4.6V-Flash", processor=_glm46v_processor),
    replace(
        _GLM4V,
        name="glm4v_moe",
        published="zai-org/GLM-4.5V",
        source="its config.json, quoted in public code; tower by the defaults of transformers 5.19",
        architecture=Glm4vMoeForConditionalGeneration,
        config=_glm4v_moe,
    ),
)
