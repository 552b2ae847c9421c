"""Names and row order of a Llama's tensors in GGUF files, against transformers' own rotary embedding."""

import pytest
import torch

from fovea_real.convert import configuration, published_name, unpaired

FIELDS = {
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.block_count": 30,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.dimension_count": 64,
    "llama.context_length": 8192,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.tokens": [""] * 49152,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensors_get_their_published_names(name: str, published: str) -> None:
    assert published_name(name) == published


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "rope_freqs.weight", "blk.weight"])
def test_a_tensor_of_another_architecture_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is no tensor of a Llama"):
        published_name(name)


def test_rotary_partners_end_up_half_a_head_apart() -> None:
    heads, width = 2, 6
    rows = torch.arange(heads * width)
    halves = rows.reshape(heads, 2, width // 2)  # as in Hugging Face checkpoints
    paired = halves.transpose(1, 2).reshape(-1)  # as in GGUF files
    assert unpaired(paired[:, None], heads)[:, 0].tolist() == rows.tolist()


def test_the_configuration_is_that_of_the_file() -> None:
    config = configuration(FIELDS, "float32", tied=True)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (49152, 64, 3)
    assert (config.eos_token_id, config.tie_word_embeddings) == (2, True)
