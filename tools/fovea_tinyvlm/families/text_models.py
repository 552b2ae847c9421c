"""Families of text models, and the language settings that the vision families share."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fovea_tinyvlm.families.declaration import ChatWords, Family, TokenIds
from fovea_tinyvlm.families.vocabulary import MAX_LENGTH

HIDDEN_SIZE = 128
HEAD_DIM = 32  # the smallest head size for which vLLM's CPU attention has a kernel
SMALL_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
"""The settings that all towers with a SigLIP configuration share here."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * HIDDEN_SIZE // 4}
"""Settings of mixtures of experts: published ones have 128 or 256 experts, of which each token uses 8.

No side of such a matrix is as long as the other, so that a transposed one is noticed.
"""

CHATML = ChatWords(user="<|im_start|>user\n", assistant="<|im_start|>assistant\n", end="<|im_end|>\n")
GEMMA_CHAT = ChatWords(
    start="<bos>", user="<start_of_turn>user\n", assistant="<start_of_turn>model\n", end="<end_of_turn>\n"
)
MISTRAL_CHAT = ChatWords(start="<s>", user="[INST]", assistant="[/INST]", end="")
LLAMA_CHAT = ChatWords(
    start="<|begin_of_text|>",
    user="<|start_header_id|>user<|end_header_id|>\n\n",
    assistant="<|start_header_id|>assistant<|end_header_id|>\n\n",
    end="<|eot_id|>",
)

QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
GEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
GEMMA_NEWLINES = tuple("\n" * count for count in (1, 2, 3, 4))
"""Runs of line feeds, each of which is one token in Gemma's vocabulary; its processor relies on that."""
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
MISTRAL_TOKENS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<pad>")

_DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)

_CONFIG_SOURCE = "defaults of transformers 5.19"


def language(ids: TokenIds, *, begin: str | None, end: str, pad: str, layers: int = 3) -> dict[str, Any]:
    """Returns the settings that all decoders here share: 128 channels, four query heads of 32, two key heads."""
    return {
        "vocab_size": max(ids.values()) + 1,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 3 * HIDDEN_SIZE,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "dtype": "float32",
        "bos_token_id": None if begin is None else ids[begin],
        "eos_token_id": ids[end],
        "pad_token_id": ids[pad],
    }


def qwen_language(ids: TokenIds, layers: int = 3) -> dict[str, Any]:
    """Returns `language` with Qwen's tokens and norms."""
    settings = language(ids, begin=None, end="<|im_end|>", pad="<|endoftext|>", layers=layers)
    return settings | {"rms_norm_eps": 1e-6}


def mistral_language(ids: TokenIds) -> dict[str, Any]:
    """Returns `language` with Mistral's tokens and norms."""
    settings = language(ids, begin="<s>", end="</s>", pad="<pad>")
    return settings | {"model_type": "mistral", "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "sliding_window": None}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Returns the settings of rotary positions, without scaling unless `more` sets it."""
    return {"rope_type": "default", "rope_theta": theta} | more


def _qwen2(ids: TokenIds) -> Qwen2Config:
    # 1.5B: 28 layers, 12 heads of 128 for 2; theta 1,000,000; embeddings tied up to 3B.
    return Qwen2Config(**qwen_language(ids), rope_parameters=rope(1e6), tie_word_embeddings=True)


def _qwen3_moe(ids: TokenIds) -> Qwen3MoeConfig:
    # 30B-A3B: 48 layers, all of them with 128 experts of 768 channels; each token uses 8, with weights that sum to 1;
    # 32 query heads of 128 and 4 key heads.
    sparse = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return Qwen3MoeConfig(
        **qwen_language(ids) | sparse, head_dim=HEAD_DIM, rope_parameters=rope(1e6), tie_word_embeddings=False
    )


def _llama(ids: TokenIds) -> LlamaConfig:
    # 3B: 28 layers, 24 heads of 128 for 8, tied; Llama 3's scaling, its lengths divided as the context is.
    settings = language(ids, begin="<|begin_of_text|>", end="<|eot_id|>", pad="<|finetune_right_pad_id|>")
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rotary = rope(5e5, rope_type="llama3", original_max_position_embeddings=512, **scaling)
    return LlamaConfig(
        **settings, head_dim=HEAD_DIM, rms_norm_eps=1e-5, rope_parameters=rotary, tie_word_embeddings=True
    )


def _mistral(ids: TokenIds) -> MistralConfig:
    # 7B v0.3: 32 layers, 32 heads of 128 for 8, theta 1,000,000, no sliding window since v0.2.
    return MistralConfig(**mistral_language(ids), rope_parameters=rope(1e6), tie_word_embeddings=False)


def _mixtral(ids: TokenIds) -> MixtralConfig:
    # 8x7B: 32 layers, all of them with 8 experts of 14,336 channels, of which a token uses 2; 32 heads of 128 for 8.
    sparse = {"num_local_experts": EXPERTS["num_experts"], "num_experts_per_tok": EXPERTS["num_experts_per_tok"]}
    text = mistral_language(ids) | {"intermediate_size": EXPERTS["moe_intermediate_size"]}
    text.pop("model_type")
    return MixtralConfig(**text | sparse, rope_parameters=rope(1e6), tie_word_embeddings=False)


def _deepseek_v3(ids: TokenIds) -> DeepseekV3Config:
    # 671B-A37B: 61 layers, the first three dense, 256 experts of 2,048 channels in 8 groups, of which a token uses 8 of
    # 4 groups, and one that all tokens use; 128 heads with latent keys and values. vLLM's CPU kernel needs the latent
    # widths as published.
    text = language(ids, begin="<｜begin▁of▁sentence｜>", end="<｜end▁of▁sentence｜>", pad="<｜▁pad▁｜>")
    latent = {"q_lora_rank": 48, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 24}
    sparse = {"n_routed_experts": EXPERTS["num_experts"], "num_experts_per_tok": EXPERTS["num_experts_per_tok"]}
    sparse |= {"moe_intermediate_size": EXPERTS["moe_intermediate_size"], "n_group": 2, "topk_group": 1}
    yarn = {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rotary = rope(1e4, rope_type="yarn", original_max_position_embeddings=MAX_LENGTH // 40, **yarn)
    both = {
        "num_key_value_heads": text["num_attention_heads"],
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }
    return DeepseekV3Config(**text | latent | sparse | both, rope_parameters=rotary, tie_word_embeddings=False)


def gemma3_language(ids: TokenIds) -> dict[str, Any]:
    """Returns settings like Gemma 3 4B's: five layers with a window, one without; norms around both halves; tied."""
    return language(ids, begin="<bos>", end="<end_of_turn>", pad="<pad>", layers=6) | {
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,  # 256 in 4B, of which the heads have 256 channels
        "sliding_window": 32,  # 1024 published; documents in tests are longer than 32
        "layer_types": 5 * ["sliding_attention"] + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": rope(1e4),
            "full_attention": rope(1e6, rope_type="linear", factor=8.0),
        },
        "tie_word_embeddings": True,
    }


def _gemma3_text(ids: TokenIds) -> Gemma3TextConfig:
    # 1B has no scaling and a window of 512; the rest is as in 4B.
    both = {"sliding_attention": rope(1e4), "full_attention": rope(1e6)}
    return Gemma3TextConfig(**gemma3_language(ids) | {"rope_parameters": both})


TEXT_FAMILIES = (
    Family(
        name="qwen2_5",
        published="Qwen/Qwen2.5-1.5B-Instruct",
        source=_CONFIG_SOURCE,
        architecture=Qwen2ForCausalLM,
        config=_qwen2,
        tokens=QWEN_TOKENS,
        chat=CHATML,
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="qwen3_moe",
        published="Qwen/Qwen3-30B-A3B",
        source="its config.json, quoted in public code",
        architecture=Qwen3MoeForCausalLM,
        config=_qwen3_moe,
        tokens=QWEN_TOKENS,
        plain_tokens=("<think>", "</think>"),
        chat=CHATML,
        end="<|im_end|>",
        pad="<|endoftext|>",
    ),
    Family(
        name="llama",
        published="meta-llama/Llama-3.2-3B-Instruct",
        source=_CONFIG_SOURCE,
        architecture=LlamaForCausalLM,
        config=_llama,
        tokens=LLAMA_TOKENS,
        chat=LLAMA_CHAT,
        begin="<|begin_of_text|>",
        end="<|eot_id|>",
        pad="<|finetune_right_pad_id|>",
    ),
    Family(
        name="mistral",
        published="mistralai/Mistral-7B-Instruct-v0.3",
        source=_CONFIG_SOURCE,
        architecture=MistralForCausalLM,
        config=_mistral,
        tokens=MISTRAL_TOKENS,
        chat=MISTRAL_CHAT,
        begin="<s>",
        end="</s>",
        pad="<pad>",
    ),
    Family(
        name="mixtral",
        published="mistralai/Mixtral-8x7B-Instruct-v0.1",
        source=_CONFIG_SOURCE,
        architecture=MixtralForCausalLM,
        config=_mixtral,
        tokens=MISTRAL_TOKENS,
        chat=MISTRAL_CHAT,
        begin="<s>",
        end="</s>",
        pad="<pad>",
    ),
    Family(
        name="deepseek_v3",
        published="deepseek-ai/DeepSeek-V3, converted to bfloat16",
        source=_CONFIG_SOURCE,
        architecture=DeepseekV3ForCausalLM,
        config=_deepseek_v3,
        tokens=_DEEPSEEK_TOKENS,
        chat=ChatWords(
            start="<｜begin▁of▁sentence｜>", user="<｜User｜>", assistant="<｜Assistant｜>", end="<｜end▁of▁sentence｜>"
        ),
        begin="<｜begin▁of▁sentence｜>",
        end="<｜end▁of▁sentence｜>",
        pad="<｜▁pad▁｜>",
    ),
    Family(
        name="gemma3_text",
        published="google/gemma-3-1b-it",
        source=_CONFIG_SOURCE,
        architecture=Gemma3ForCausalLM,
        config=_gemma3_text,
        tokens=GEMMA_TOKENS,
        plain_tokens=GEMMA_NEWLINES,
        chat=GEMMA_CHAT,
        begin="<bos>",
        end="<end_of_turn>",
        pad="<pad>",
    ),
)
