"""Converts a Llama in a GGUF file to a Hugging Face checkpoint: `python -m fovea_real.convert FILE FOLDER DTYPE`.

Needs the package `gguf`, which `fovea_real.checkpoint` installs into a folder of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def published_name(name: str) -> str:
    """Returns Hugging Face's name of a tensor: `model.layers.3.mlp.up_proj.weight` for `blk.3.ffn_up.weight`.

    Raises:
        ValueError: The tensor is not one of a Llama.
    """
    parts = name.split(".")
    try:
        if parts[0] == "blk":
            _, layer, part, kind = parts
            return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
        part, kind = parts
        return f"{_WHOLE[part]}.{kind}"
    except (KeyError, ValueError):
        raise ValueError(f"{name} is no tensor of a Llama") from None


def unpaired(weight: Tensor, heads: int) -> Tensor:
    """Undoes the order of rows in GGUF files: rotary partners lie side by side there, and half a head apart here.

    Args:
        weight: The query or key projection, [heads * width, input].
        heads: Number of heads.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def configuration(fields: dict[str, Any], dtype: str, tied: bool) -> LlamaConfig:
    """Returns the configuration of the model.

    Args:
        fields: The metadata of the file.
        dtype: Element type of the checkpoint.
        tied: Whether the unembedding is the embedding.
    """
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Writes configuration, weights, tokenizer and end tokens into a new folder."""
    import gguf  # type: ignore[import-not-found] # see the module's docstring

    reader = gguf.GGUFReader(str(file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors: dict[str, Tensor] = {}
    for each in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy()).float()
        part = each.name.split(".")[-2]
        weight = unpaired(weight, heads[part]) if part in heads else weight
        tensors[published_name(each.name)] = weight.to(getattr(torch, dtype)).contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = configuration(fields, dtype, tied="lm_head.weight" not in tensors)
    config.save_pretrained(folder)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    GenerationConfig(bos_token_id=config.bos_token_id, **ends).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
